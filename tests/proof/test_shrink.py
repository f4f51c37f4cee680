"""Faults in rules, collectives and local operators: `verify` says WRONG, names the operator, and cuts it out.

Faults that `tamper` plants in one program are in test_verify.py.
"""

import pytest
import torch
import zoo
from torch import nn

import autopart
from autopart.ir.collective_nodes import MOVES
from autopart.ir.facts import facts
from autopart.ir.layout import Conversion
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.operators import reduction_rules
from autopart.passes.rules.operators.pointwise_rules import elementwise
from autopart.passes.rules.tables import RULES
from autopart.proof.localize.subgraph import Subgraph
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES

TOLERANCE = 1e-10


class Net(nn.Module):
    """Two layers of one width with something between, and something behind; no loss."""

    def __init__(self, between, behind=lambda x: x):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.between, self.behind = between, behind

    def forward(self, x):
        return self.behind(self.b(self.between(self.a(x))))


def net(*functions):
    torch.manual_seed(0)
    return Net(*functions), {"x": torch.randn(8, 4, 16)}


def largest(values):
    return [torch.stack(values).amax(0) for _ in values]


def mean(values):
    return [torch.stack(values).mean(0) for _ in values]


def reversed_ranks(values, cut):
    return [cut.join(values[::-1]) for _ in values]


def first_shard(values, cut):
    return [cut.take(value, 0) for value in values]


# name: (model and batch, mesh, what is patched (table, key, wrong entry), kind, operator named)
FAULTS = {
    "wrong collective": (
        lambda: net(torch.tanh, torch.tanh), "tp2", (LIST_PRIMITIVES, "all_reduce", largest), "value", "b/linear",
    ),
    "wrong scale": (zoo.gpt2, "dp2,tp2", (LIST_PRIMITIVES, "all_reduce", mean), "value", "transformer/add#1"),
    "wrong shard": (
        lambda: net(lambda x: x.softmax(-1)), "tp2", (LIST_PRIMITIVES, "slice", first_shard), "gradient", "b/linear",
    ),
    "swapped ranks": (
        lambda: net(lambda x: x.softmax(-1)), "tp2", (LIST_PRIMITIVES, "all_gather", reversed_ranks), "value",
        "a/linear",
    ),
    "wrong gradient only": (
        zoo.llama, "pp2,tp2", (MOVES, "sum_grad", Conversion("sum_grad", "identity", "identity")), "gradient",
        "lm_head/linear",
    ),
    "wrong rule: a dim that must be whole": (
        lambda: net(lambda x: x.softmax(-1)), "tp2", (RULES, "aten::softmax", Rule("... -> ...")), "value", "/softmax",
    ),
    "wrong rule: not linear": (
        lambda: net(torch.tanh, lambda x: torch.relu(x)[..., :1]), "tp2",
        (RULES, "aten::relu", Rule(of_call=elementwise((0,)))), "value", "/relu",
    ),
    "wrong rule: a product that is not summed": (
        lambda: net(torch.tanh, torch.tanh), "tp2",
        (RULES, "aten::linear", Rule("... k, n j -> ... n", whole="n", matmul=("... k n",))), "value", "/linear",
    ),
    "wrong rule: a mean without its local form": (
        lambda: net(torch.tanh, lambda x: x.mean((0, 1))), "dp2",
        (RULES, "aten::mean", Rule(of_call=reduction_rules.reduction)), "value", "/mean",
    ),
}  # fmt: skip


def is_wrong(subgraph):
    try:
        return subgraph.max_error() > TOLERANCE
    except RuntimeError:
        return True


@pytest.mark.few
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_named_and_cut_out(name, monkeypatch):
    builder, mesh, patch, kind, key = FAULTS[name]
    model, batch = builder()
    assert autopart.verify(model, mesh, example_kwargs=batch).ok
    monkeypatch.setitem(*patch)
    found = autopart.verify(model, mesh, example_kwargs=batch, shrink=True)
    print(found)
    assert not found.ok and str(found).startswith("WRONG")
    first, smallest = found.first_mismatch, found.smallest
    assert first.kind == kind and any(k.endswith(key) for k in first.keys), str(first)
    assert smallest is not None and len(smallest.operators) <= 2
    assert is_wrong(smallest)
    assert any(facts(node)["key"].endswith(key) for node in smallest.operators)
    text = str(smallest)
    assert text in "\n".join(line.strip() for line in str(found).splitlines())
    assert is_wrong(Subgraph.parse(text)), "the text does not show the fault"
    plain = "\n".join(line.partition("  # ")[0] for line in text.splitlines())
    assert str(Subgraph.parse(text)) == plain
    if "rule" in name:
        return  # the decisions that it led to stay wrong
    monkeypatch.undo()
    assert not is_wrong(smallest) and not is_wrong(Subgraph.parse(text)), "the part is wrong without the fault"

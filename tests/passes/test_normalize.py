"""Rewritings that look at more than one operator: mixtures of experts, rows that are made of nothing, sections of data.

That the normal form of a single operator computes what the operator computes is in `test_rules.py`.
"""

import pytest
import torch
import torch.nn.functional as F
import zoo
from sorted_experts import ROWS, WIDTH, SortedExperts
from torch import Tensor, nn
from traced import plan_of, verified
from transformers import MixtralConfig, MixtralForCausalLM

import autopart
from autopart.ir.graph import operator_name
from autopart.proof.reference import NOT_DOUBLE
from autopart.proof.verify import VerificationRun
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call


def names(model: nn.Module, x: Tensor) -> list[str]:
    graph = prepare(model, bind_call(model, (x,), {})).graph
    return [operator_name(node) for node in graph.nodes if node.op == "call_function"]


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.large
def test_experts_are_computed_in_the_order_of_their_rows(rows):
    model = SortedExperts().double()
    found = names(model, rows)
    assert found.count("autopart::expert_linear") == 1 and "aten::sort" not in found
    for mesh, microbatches in (("tp2", 1), ("tp3", 1), ("dp2,tp2", 2), ("dp4", 2)):
        assert autopart.verify(model, mesh, example_args=(rows,), microbatches=microbatches).ok, mesh


@pytest.mark.few
@pytest.mark.parametrize("fault", ["unsorted weights", "counts of something else", "a sum over the sorted rows"])
def test_a_sort_that_matters_is_left_alone(fault, rows):
    model = SortedExperts(fault).double()
    found = names(model, rows)
    assert "autopart::expert_linear" not in found and "aten::sort" in found
    if fault == "unsorted weights":  # the others give every expert other rows than the fallback can take
        assert autopart.verify(model, "tp2", example_args=(rows,)).ok


@pytest.mark.large
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_mixtral(implementation):
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM._from_config(config, experts_implementation=implementation)
    ids = torch.randint(64, (4, 6))
    run = VerificationRun(model, bind_call(model, (), {"input_ids": ids, "labels": ids}))
    plan = plan_of(run, "tp2")
    experts = {name: place["tp"] for name, place in plan.parameters.items() if "experts" in name}
    assert set(experts.values()) == {"S(1; sections=2)", "S(2)"}  # column- and row-parallel, one all-reduce a layer
    for mesh, microbatches in (("tp2", 1), ("pp2,dp2", 2)):
        found = verified(run, mesh, microbatches=microbatches)
        assert found.ok, found
        assert (NOT_DOUBLE in found.notes) == (implementation == "grouped_mm")


class TokenTypes(nn.Module):
    """Embeddings of token types that nobody gave: zeros of the shape of the batch."""

    def __init__(self):
        super().__init__()
        self.words, self.types, self.out = nn.Embedding(12, WIDTH), nn.Embedding(2, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        types = torch.zeros(ids.shape, dtype=torch.long)
        return self.out(self.words(ids) + self.types(types)).tanh()


class SequenceFirst(nn.Module):
    """Rows of the batch are the inner part of a merged dim, also of a mask that is made of the inputs."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        merged = self.words(ids).transpose(0, 1).reshape(-1, WIDTH)
        keep = (ids > 3).flip(1).t().reshape(-1, 1)
        return torch.where(keep, self.out(merged), merged).tanh()


@pytest.mark.parametrize("kind", [TokenTypes, SequenceFirst])
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp2", 1), ("dp2", 2), ("pp2", 4), ("dp2,tp2", 2)])
def test_rows_of_the_batch_are_followed(kind, mesh, microbatches):
    ids = torch.randint(12, (8, 5), generator=torch.Generator().manual_seed(0))
    assert autopart.verify(kind().double(), mesh, example_args=(ids,), microbatches=microbatches).ok


class LowPass(nn.Module):
    """Writes to parts of complex tensors."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.inner(x))
        kept = torch.zeros_like(spectrum)
        kept[:, :3:2] = spectrum[:, :3:2] * 2
        kept[:, -1] = spectrum[:, 1]
        return torch.fft.irfft(kept, n=WIDTH)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_writes_to_a_part_of_a_complex_tensor(mesh):
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    found = autopart.verify(LowPass(), mesh, example_args=(x,))
    assert found.ok and found.max_error < 1e-10 and not found.notes, str(found)


def _shifted(form, logits, labels, **options):
    """The loss of all positions but the last, as people write it."""
    if form == "flat":
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), **options)
    if form == "contiguous, in float":
        shifted = logits[..., :-1, :].contiguous().float()
        return F.cross_entropy(shifted.view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1), **options)
    if form == "classes second":
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], **options)
    return F.cross_entropy(logits.transpose(1, 2)[..., :-2], labels[:, 2:], **options)


@pytest.mark.few
@pytest.mark.parametrize("options", [{}, {"ignore_index": 3, "label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("form", ["flat", "contiguous, in float", "classes second", "two left out"])
def test_a_loss_without_the_last_positions_is_that_of_all(form, options):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids):
            return _shifted(form, self.head(self.embed(ids)), ids, **options)

    torch.manual_seed(0)
    model, ids = Model().double(), torch.randint(0, 16, (4, 12))
    plan = autopart.plan(model, "cp2", example_args=(ids,))
    assert not any(name.endswith("/slice") and "R" in on.get("cp", "R") for name, on in plan.operators.items())
    assert plan.operators["/cross_entropy_loss"]["cp"].startswith("S(")
    report = autopart.verify(model, "cp2", example_args=(ids,))
    assert report.ok, report


def hidden_biases(pm):
    return [n for n in pm.graph(0).graph.nodes if operator_name(n) == "aten::where" and n.meta["needs_grad"]]


@pytest.mark.large
def test_blocks_hide_the_same_of_one_bias_once():
    """T5's encoder and its decoder save one value each."""
    model, batch = zoo.t5(num_layers=3)
    hidden = hidden_biases(autopart.parallelize(model, "dp1", example_kwargs=batch))
    assert [len(node.users) for node in hidden] == [3, 3]


@pytest.mark.large
def test_blocks_that_are_computed_again_hide_for_themselves():
    model, batch = zoo.t5(num_layers=3)
    hidden = hidden_biases(autopart.parallelize(model, "dp1", example_kwargs=batch, recompute="full"))
    assert len({node.meta["region"] for node in hidden}) == len(hidden) == 6

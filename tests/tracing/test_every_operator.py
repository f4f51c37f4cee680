"""The normalized trace of a call of every operator gives torch's values and gradients, in float64.

Operators that have no rule are decomposed: by the trace, by torch's tables, or by formulas of normalization. A wrong
formula would be a silent difference. The calls come from torch's database of operators and from the rules' samples.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from in_place_samples import Written
from operator_samples import MAY_BE_REFUSED, calls, database
from rule_samples import SAMPLES
from torch import Tensor, nn

from autopart.compat.torch_internals import tree_flatten, tree_unflatten
from autopart.errors import TraceError
from autopart.ir.graph import draws_random_numbers
from autopart.proof.comparison import fixed_seed, relative, weights_like
from autopart.recipe.make_plan import prepare
from autopart.tracing.autograd.decompositions import TRACE_DECOMPOSITIONS
from autopart.tracing.trace_model import bind_call

TOLERANCE = 1e-10
CHUNKS = 320
"""Number of test cases, each of a few operators: `make test` runs one of them."""
REFUSED = set(" ".join(MAY_BE_REFUSED.values()).split())
aten = torch.ops.aten


class AfterAWrite(nn.Module):
    """A model that writes in place: torch then decomposes more operators, because it functionalizes the trace."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, one: Tensor) -> tuple[Tensor, ...]:
        return self.model(one.clone().mul_(1.0))


def difference(model: nn.Module) -> str:
    """Describe what differs between a model and its normalized trace; "" if values and gradients agree.

    Nothing is compared if eager PyTorch cannot run or differentiate the call, if its values are not finite, or if it
    draws random numbers.
    """
    one = torch.ones((), dtype=torch.float64)
    weights = list(model.parameters())
    try:
        with fixed_seed():
            expected, gradients = results(list(model(one)), weights)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return ""
    if not expected or not all(bool(value.isfinite().all()) for value in expected):
        return ""
    traced = prepare(model, bind_call(model, (one,), {}), double=True)
    if any(map(draws_random_numbers, traced.graph.nodes)):
        return ""
    values = traced.values((one,), {**traced.parameters, **traced.buffers, **traced.constants})
    outputs = [values[node] for node in traced.graph.output_node().args[0]]
    actual, found = results(outputs, weights)
    pairs = [*zip(actual, expected, strict=True), *zip(found, gradients, strict=True)]
    wrong = [f"{relative(a, b):.2g}" for a, b in pairs if relative(a, b) > TOLERANCE or a.dtype != b.dtype]
    return f"differs by {', '.join(wrong)}" if wrong else ""


def results(outputs: list[Tensor], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the dense values of outputs and the gradients of weights; zeros are those of an unused weight."""
    outputs = [output if output.layout == torch.strided else output.to_dense() for output in outputs]
    seeds = [torch.view_as_real(o.resolve_conj()) if o.is_complex() else o for o in outputs if o.requires_grad]
    loss = sum((seed * weights_like(seed)).sum() for seed in seeds)
    grads = torch.autograd.grad(loss, weights, allow_unused=True) if isinstance(loss, Tensor) else [None] * len(weights)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, grads, strict=True)]
    return [output.detach() for output in outputs], filled


def faults(name: str, description: str, model: Written) -> list[str]:
    try:
        wrong = difference(model) or difference(AfterAWrite(model))
    except TraceError as error:
        wrong = "" if name in REFUSED else str(error)
    except Exception as error:  # a raw exception is a fault, whatever it is: the next calls still run
        wrong = f"{type(error).__name__}: {error}"
    return [f"{description}: {wrong}"] if wrong else []


@pytest.mark.few
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_an_operator_is_torchs(chunk):
    names = sorted(database())[chunk::CHUNKS]
    wrong = [fault for name in names for call in calls(name) for fault in faults(name, *call)]
    assert not wrong, "\n".join(wrong)


def called(sample) -> Written:
    name, _, overload = sample.operator.partition(".")
    namespace, packet = name.split("::") if "::" in name else ("aten", name)
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    flat, spec = tree_flatten((sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        leaves = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, spec)
        return [leaf for leaf in tree_flatten(operator(*args, **kwargs))[0] if isinstance(leaf, Tensor)]

    return Written(function, [flat[place] for place in places])


@pytest.mark.few
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_sample_of_the_rules_is_torchs(chunk):
    is_cast = [torch.float32 in (*sample.args, *sample.kwargs.values()) for sample in SAMPLES]  # casts are replaced
    samples = (sample for sample, cast in [*zip(SAMPLES, is_cast, strict=True)][chunk::CHUNKS] if not cast)
    wrong = [fault for sample in samples for fault in faults("", str(sample), called(sample))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.large
def test_at_least_six_hundred_operators_are_compared():
    assert len(database()) > 600


NOT_COVERED = {"_bincount", "_tensor", "_where_method"}
"""Decompositions of torch functions that have no sample in torch's database. This set may only shrink."""


def test_decompositions_without_a_sample_are_listed():
    names = {entry.name.rpartition(".")[2] for entry in database().values()}
    functions = {target: function for target, function in TRACE_DECOMPOSITIONS.items()
                 if not hasattr(target, "__objclass__")}  # methods are not called  # fmt: skip
    covered = {function.__name__ for target, function in functions.items() if target.__name__ in names}
    assert {function.__name__ for function in TRACE_DECOMPOSITIONS.values()} - covered == NOT_COVERED


# --- what was wrong --------------------------------------------------------------------------------------------------


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


REDUCTIONS = "none", "mean", "sum"
MASKED = torch.tensor([[0.3, -torch.inf, 0.1], [-torch.inf] * 3], dtype=torch.float64).requires_grad_()
MEAN, VARIANCE = torch.randn(3).double(), torch.ones(3).double()
WAS_WRONG = {
    "a softmax of rows that are all masked": (lambda t: [aten._safe_softmax.default(t, 1)], [MASKED]),
    "a margin of zero": (
        lambda t: [F.multi_margin_loss(t, torch.tensor([0, 2]), margin=0.0)],
        [torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64).requires_grad_()],
    ),
    "a padded list of labels": (
        lambda t: (
            [F.multilabel_margin_loss(t, torch.tensor([[0, -1, 0], [2, 1, -1]]), reduction=r) for r in REDUCTIONS]
            + [F.multilabel_margin_loss(t[0], torch.tensor([2, -1, 1]), reduction=r) for r in REDUCTIONS]
        ),
        [torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64).requires_grad_()],
    ),
    "gradients of a batch norm's statistics": (
        lambda t: [*torch.native_batch_norm(t, None, None, None, None, True, 0.1, 1e-5)],
        [x(4, 3, 2)],
    ),
    "statistics of a batch norm in eval mode": (
        lambda t, mean, var: [*torch.native_batch_norm(t, None, None, mean, var, False, 0.1, 1e-5)],
        [x(4, 3, 2), MEAN, VARIANCE],
    ),
    "a batch norm in eval mode that could write": (
        lambda t, mean, var: [*aten._native_batch_norm_legit.default(t, None, None, mean, var, False, 0.1, 1e-5)],
        [x(4, 3, 2), MEAN, VARIANCE],
    ),
    "a batch norm of no values": (
        lambda t: [F.batch_norm(t, torch.zeros(0).double(), torch.ones(0).double()).sum() + t.sum()],
        [x(0)],
    ),
    "dims of a scalar": (lambda t: [t.transpose(0, 0), t.squeeze(0), t.movedim(0, 0)], [x()]),
    "an empty index with other dims": (lambda t: [t.gather(0, torch.zeros(2, 0, dtype=torch.int64))], [x(5)]),
}


@pytest.mark.parametrize("case", WAS_WRONG)
def test_a_call_that_was_wrong_is_torchs(case):
    model = Written(*WAS_WRONG[case])
    assert difference(model) == difference(AfterAWrite(model)) == ""


def test_the_comparison_finds_a_wrong_gradient():
    class Wrong(Written):
        def forward(self, one: Tensor) -> tuple[Tensor, ...]:
            (value,) = super().forward(one)
            return (value.detach() * 2 - value if torch.compiler.is_exporting() else value,)

    assert difference(Wrong(lambda t: [t.sin()], [x(3)])).startswith("differs by")


def test_a_selected_scalar_is_refused():
    with pytest.raises(TraceError, match=r"a 0-d mask \(a single value\) selects elements"):
        difference(Written(lambda t: [torch.nonzero(t)], [x()]))

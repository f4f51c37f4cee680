"""Models with a `torch.autograd.Function` of their own: traced as one operator, with the backward that it defines."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import autopart
from autopart.errors import RuleError, StageError, TraceError
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.registered_rules import REGISTERED

SIZE = 8


class Round(torch.autograd.Function):
    """A straight-through estimator: the gradient by plain operations would be 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Scaled(torch.autograd.Function):
    """With a setup_context, plain arguments with defaults, and a gradient that is not that of the forward."""

    @staticmethod
    def forward(x: Tensor, factor: float, options: Any = None) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return -ctx.factor * grad, None, None


class Reversed(torch.autograd.Function):
    """A gradient reversal: its output is a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Clipped(torch.autograd.Function):
    """A backward that is not linear in its gradient: sums of clipped parts are not the clipped sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


class Parts(torch.autograd.Function):
    """Several outputs, one of them not to be differentiated; no gradient for one input, none asked for by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor, extra: Any) -> tuple:
        ctx.save_for_backward(x, weight)
        score = (x @ weight).softmax(-1)
        best = score.argmax(-1)
        ctx.mark_non_differentiable(best)
        return score, x * mask, best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, masked: Tensor, best: Any) -> tuple:
        x, weight = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, True, False, False)
        return 2 * grad @ weight.t() + masked, 3 * x.flatten(0, -2).t() @ grad.flatten(0, -2), None, None


class Product(torch.autograd.Function):
    """A product, which autocast computes in bfloat16; its backward computes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        return grad.float() @ weight.t(), x.flatten(0, -2).t() @ grad.float().flatten(0, -2)


class BySize(torch.autograd.Function):
    """Every operator is pointwise, and one of the numbers is the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * ctx.rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.rows


class Scanned(torch.autograd.Function):
    """Rows are padded, written in place and kept as they are then, as a parallel scan does (mambapy's)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sums = F.pad(x, (0, 0, 0, 2)).transpose(-1, -2)
        sums[..., 1:].add_(sums[..., :-1] * 0.5)
        ctx.save_for_backward(sums)
        return sums.transpose(-1, -2)[..., : x.shape[-2], :]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (sums,) = ctx.saved_tensors
        return grad * sums.transpose(-1, -2)[..., : grad.shape[-2], :]


bound_before = Round.apply


class Model(nn.Module):
    """Linear layers around a Function. `on`: what calls it."""

    def __init__(self, on: Any) -> None:
        super().__init__()
        self.up, self.down, self.on = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE), on
        self.weight = nn.Parameter(torch.rand(2 * SIZE, 2 * SIZE) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.on(self.up(x), self.weight)) ** 2).mean()


def parts(y: Tensor, weight: Tensor) -> Tensor:
    score, masked, best = Parts.apply(y, weight, torch.ones(2 * SIZE, dtype=y.dtype), {"a": (1, None)})
    return score + masked * (1 + best).unsqueeze(-1)


CALLS = {
    "round": lambda y, weight: Round.apply(y),
    "bound before": lambda y, weight: bound_before(y),
    "scaled": lambda y, weight: Scaled.apply(Scaled.apply(y, 2.0), factor=3.0),
    "reversed": lambda y, weight: Reversed.apply(y),
    "clipped": lambda y, weight: Clipped.apply(y),
    "by size": lambda y, weight: BySize.apply(y),
    "scanned": lambda y, weight: Scanned.apply(y),
    "parts": parts,
    "of a weight": lambda y, weight: y @ Round.apply(weight),
    "clipped weight": lambda y, weight: y @ Clipped.apply(weight),
}  # fmt: skip
WHOLE = {"parts": "Parts", "scanned": "Scanned"}
"""Of the others every operator is pointwise."""


def example() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.rand(8, 4, SIZE, dtype=torch.float64)}


def model_of(call: Any) -> Model:
    torch.manual_seed(0)
    return Model(CALLS.get(call, call)).double()


# --- exact ---------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2,tp2", "pp2"])
@pytest.mark.parametrize("call", CALLS)
def test_exact(call, mesh):
    found = autopart.verify(model_of(call), mesh, example_kwargs=example(), tolerance=1e-10)
    assert found.ok, found


@pytest.mark.few
@pytest.mark.parametrize("call", CALLS)
def test_one_rank_has_the_gradients_of_the_model_itself(call):
    """Values and gradients of plain eager code, in eval mode and without gradients as well."""
    model = model_of(call)
    _, loss, grads = zoo.reference(model, example())
    pm = autopart.parallelize(copy.deepcopy(model), "tp1", example_kwargs=example())
    zoo.assert_close_outputs(pm.step(**example()), loss)
    zoo.assert_same_grads(pm.full_grads(), grads)
    with torch.no_grad():
        zoo.assert_close_outputs(pm.eval()(**example()), loss)


def test_a_dropped_backward_is_seen():
    """What a trace of the forward alone would give: the gradient of rounding is 0."""
    model = model_of(lambda y, weight: (4 * y).round() / 4)
    _, _, dropped = zoo.reference(model, example())
    _, _, grads = zoo.reference(model_of("round"), example())
    with pytest.raises(AssertionError):
        zoo.assert_same_grads(grads, dropped)


def test_autocast_is_that_of_the_call():
    """Under autocast the forward runs in bfloat16, and the backward as plain eager code runs it."""

    def call(y: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return Product.apply(y, weight).float()

    model, batch = Model(call).float(), {"x": example()["x"].float()}
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), "tp1", example_kwargs=batch)
    assert torch.equal(pm.step(**batch), loss)
    for name, grad in pm.full_grads().items():
        assert torch.equal(grad, grads[name]), name


def same_as_eager(mesh):
    for call in ("parts", "scaled", "clipped weight"):
        model = model_of(call)
        _, loss, grads = zoo.reference(model, example())
        pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=example())
        again = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=example(), plan=pm.plan)
        for made in (pm, again):
            zoo.assert_close_outputs(made.step(**example()), loss)
            zoo.assert_same_grads(made.full_grads(), grads)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_exact_in_processes(mesh):
    dist.run_ranks(same_as_eager, 2, mesh, timeout_s=120.0)


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("call", CALLS)
def test_what_is_pointwise_is_sharded_and_the_rest_is_listed(call):
    made = autopart.plan(model_of(call), "tp2", example_kwargs=example())
    assert autopart.Plan.from_json(made.to_json()) == made
    found = [row["operator"] for row in made.unsharded]
    assert found == ([f"autograd_function::test_functions_{WHOLE[call]}"] if call in WHOLE else [])


@pytest.mark.large
def test_the_line_to_try_is_accepted():
    """Also before the Function is traced for the first time in a process."""
    try:
        autopart.rule("autograd_function::not_traced_yet", "b c -> b c")
        (row,) = autopart.plan(model_of("parts"), "dp2", example_kwargs=example()).unsharded
        exec(row["try"])
        REGISTERED[row["operator"]] = Rule("b a c, c d, c -> b a c, b a c, b a", "d c a")
        assert autopart.plan(model_of("parts"), "dp2", example_kwargs=example()).unsharded == ()
        assert autopart.verify(model_of("parts"), "dp2", example_kwargs=example(), tolerance=1e-10).ok
    finally:
        REGISTERED.clear()


@pytest.mark.large
def test_two_classes_of_one_name_are_two_operators():
    def make(factor: float) -> Any:
        class Same(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * factor

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * factor

        return Same

    for factor in (2.0, 3.0):
        function = make(factor)
        model = model_of(lambda y, weight, function=function: function.apply(y))
        assert autopart.verify(model, "tp2", example_kwargs=example(), tolerance=1e-10).ok


class ByClass(torch.autograd.Function):
    """It reads a number that is not among its arguments."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        return (x if weight is None else x @ weight) * ByClass.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad * ByClass.factor, None


def by_class(y: Tensor, weight: Tensor, *given: Any) -> Tensor:
    for ByClass.factor in (2.0, 3.0):
        y = ByClass.apply(y, weight.detach() if given else None)
    return y


@pytest.mark.few
@pytest.mark.parametrize("call", [by_class, lambda y, weight: by_class(y, weight, True)], ids=["pointwise", "whole"])
def test_a_number_read_from_elsewhere_must_not_change(call):
    with pytest.raises(TraceError, match="its result differs from that of an earlier call with equal arguments"):
        autopart.plan(model_of(call), "tp2", example_kwargs=example())


@pytest.mark.large
def test_microbatches_are_refused_where_the_backward_is_not_linear_in_sums_of_them():
    autopart.plan(model_of("of a weight"), "dp2", example_kwargs=example(), microbatches=2)
    with pytest.raises(StageError, match="cannot be split into 2 microbatches"):
        autopart.plan(model_of("clipped weight"), "dp2", example_kwargs=example(), microbatches=2)


# --- refused -------------------------------------------------------------------------------------------------------


class Any_(torch.autograd.Function):
    """Its forward is its last argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Any) -> Any:
        return FORWARDS[kind](x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad * (torch.rand_like(grad) if ctx.needs_input_grad[0] else 1), None


class Draws(torch.autograd.Function):
    """It draws in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


class Sparsemax(torch.autograd.Function):
    """Of Martins and Astudillo 2016, which makes its input smaller in place, as packages write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.max(-1, keepdim=True).values
        ordered = x.sort(-1, descending=True).values
        rank = torch.arange(1, x.size(-1) + 1, dtype=x.dtype)
        sums = ordered.cumsum(-1) - 1
        support = (rank * ordered > sums).sum(-1, keepdim=True)
        output = (x - sums.gather(-1, support - 1) / support).clamp(min=0)
        ctx.save_for_backward(support, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        support, output = ctx.saved_tensors
        grad = grad.masked_fill(output == 0, 0)
        return torch.where(output != 0, grad - grad.sum(-1, keepdim=True) / support, grad)


class FusedGate(torch.autograd.Function):
    """A gate as fused kernels compute it: on rows, and its backward overwrites what the forward saved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        rows = a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1])
        c = torch.empty_like(rows[0])
        c.copy_(F.silu(rows[0]) * rows[1])
        ctx.of = a.shape
        ctx.save_for_backward(*rows)
        return c.view(a.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        a, b = ctx.saved_tensors
        grad, s = grad.reshape(a.shape), torch.sigmoid(a)
        of_b = grad * a * s
        a.copy_(grad * s * (1 + a * (1 - s)) * b)
        b.copy_(of_b)
        return a.view(ctx.of), b.view(ctx.of)


class FusedLoss(torch.autograd.Function):
    """A linear layer and the sum of its cross-entropy, in chunks; the forward computes the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, reads: bool = False) -> Tensor:
        of_x, of_weight, losses = torch.zeros_like(x), torch.zeros_like(weight), x.new_zeros(len(x))
        if reads:
            losses = losses / (target >= 0).sum().item()
        for start in range(0, len(x), 5):
            rows = slice(start, start + 5)
            chances = (x[rows] @ weight.T).log_softmax(-1)
            losses[rows] = F.nll_loss(chances, target[rows], reduction="none")
            grad = chances.exp() - F.one_hot(target[rows], len(weight))
            of_x[rows] = grad @ weight
            of_weight += grad.T @ x[rows]
        ctx.save_for_backward(of_x, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        of_x, of_weight = ctx.saved_tensors
        of_weight.mul_(grad)
        return of_x * grad, of_weight, None, None


TABLE = torch.rand(2 * SIZE, dtype=torch.float64)
FORWARDS = {
    "draws": lambda x: x + torch.rand_like(x),
    "draws in Python": lambda x: x * random.random(),
    "returns None": lambda x: (x.clone(), None),
    "table": lambda x: x + TABLE,
}  # fmt: skip
TRIED = "torch.library.custom_op with register_autograd, and autopart.rule to shard it; or plain operations"
REFUSED = {
    "module": (lambda y, weight: Any_.apply(y, nn.Identity()),
               "it receives an Identity; only tensors, numbers and strings are supported"),
    "writes": (lambda y, weight: y @ Sparsemax.apply(weight.T), "it writes to a tensor that it is given"),
    "draws": (lambda y, weight: Any_.apply(y, "draws"), "it draws random numbers, which its backward would draw again"),
    "draws in Python": (lambda y, weight: Any_.apply(y, "draws in Python"),
                        "it draws random numbers, which its backward would draw again"),
    "draws backwards": (lambda y, weight: Draws.apply(y),
                        "it draws random numbers, which its backward would draw again"),
    "returns None": (lambda y, weight: Any_.apply(y, "returns None")[0], "it returns None; it may return only tensors"),
    "reads": (lambda y, weight: FusedLoss.apply(y.flatten(0, 1), weight, torch.arange(y[..., 0].numel()) % 8, True),
              "it reads the value of a tensor, as `if` and .item() do"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, why = REFUSED[case]
    with pytest.raises(TraceError) as raised:
        autopart.plan(model_of(call), "tp2", example_kwargs=example())
    what, *lines = str(raised.value).splitlines()
    name = {"draws backwards": "Draws", "writes": "Sparsemax", "reads": "FusedLoss"}.get(case, "Any_")
    assert what == f"{name} is an autograd.Function that cannot be traced"
    assert lines[0] == f"  why    {why}"
    assert lines[1].startswith(f"  where  {__file__}:")
    assert lines[2:] == [f"  try    {TRIED}"]


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_one_that_writes_to_what_nobody_reads_afterwards(mesh):
    found = autopart.verify(model_of(lambda y, weight: Sparsemax.apply(y * 3)), mesh, example_kwargs=example())
    assert found.ok and found.max_error < 1e-10, str(found)


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_fused_gate_is_pointwise_though_it_writes_and_flattens(mesh):
    found = autopart.verify(
        model_of(lambda y, weight: FusedGate.apply(y * 2, y @ weight)), mesh, example_kwargs=example()
    )
    assert found.ok and found.max_error < 1e-10, str(found)
    assert not any("no sharding rule" in note for note in found.notes)


@pytest.mark.parametrize("has_rule", [False, True])
def test_fused_loss_with_and_without_a_rule(has_rule):
    def loss(y, weight):
        target = torch.arange(y[..., 0].numel()) % len(weight)
        return y * FusedLoss.apply(y.flatten(0, 1), weight, target)

    if has_rule:
        autopart.rule(FusedLoss, "b d, n d, b ->", sum="b", whole="d n")
    try:
        for mesh in ("dp2", "tp2", "dp2,tp2"):
            found = autopart.verify(model_of(loss), mesh, example_kwargs=example())
            assert found.ok and found.max_error < 1e-10, str(found)
            assert has_rule != any("FusedLoss" in note for note in found.notes)
    finally:
        for name in [name for name in REGISTERED if name.endswith("FusedLoss")]:
            del REGISTERED[name]


@pytest.mark.large
def test_process_with_three_overloads_of_a_function_ends_normally():
    """Torch aborts if it deregisters three overloads of one operator."""
    code = """
import torch
from autopart.tracing.autograd.autograd_functions import operator_of

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, factor, *more):
        return x.sum() * y.sum() * factor

    @staticmethod
    def backward(ctx, grad):
        return None, None, None

x = torch.ones(3)
for args in ((x, x, 1.0), (x, x, 2.0), (x, x, 3.0, x)):
    operator_of(Scaled, *args)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class OwnMaximum(torch.autograd.Function):
    """It begins with the lowest number of its input's dtype, in torch's default dtype, which holds none of float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        lowest = torch.full((*x.shape[:-1], 1), -torch.finfo(x.dtype).max)
        output = (x - torch.maximum(lowest, x.detach().amax(-1, keepdim=True))).exp()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_one_that_does_not_run_in_float64_is_proven_in_float64(mesh):
    model = model_of(lambda y, weight: OwnMaximum.apply(y)).float()
    found = autopart.verify(model, mesh, example_kwargs={"x": example()["x"].float()})
    assert found.ok and found.max_error < 1e-10, str(found)


class Both(nn.Module):
    """What a Function gives, and what it has written to."""

    def __init__(self, read: Any):
        super().__init__()
        self.up, self.read = nn.Linear(SIZE, SIZE), read

    def forward(self, x: Tensor) -> Any:
        x = self.up(x)
        return self.read(Sparsemax.apply(x), x)


@pytest.mark.parametrize("read", [lambda y, x: y + x, lambda y, x: y + x[:1].sum(), lambda y, x: (y, x)])
def test_what_one_has_written_to_is_not_read(read):
    with pytest.raises(TraceError, match=r"a tensor is read after an autograd\.Function has written to it"):
        autopart.plan(Both(read).double(), "tp2", example_kwargs=example())


def test_a_tensor_from_elsewhere_is_refused():
    with pytest.raises(TraceError) as raised:
        autopart.plan(model_of(lambda y, weight: Any_.apply(y, "table")), "tp2", example_kwargs=example())
    why, where, tried = str(raised.value).splitlines()[1:]
    assert why == "  why    an autograd.Function reads a tensor that is not among its arguments"
    assert where.startswith(f"  where  {__file__}:") and "x + TABLE" in where
    assert tried == "  try    that tensor as an argument of apply()"


class SummedLoss(torch.autograd.Function):
    """The cross-entropy of all rows, with the gradient computed in the forward, as in fused losses."""

    @staticmethod
    def forward(ctx, h, weight, target, scale):
        logits = h @ weight.T
        grad = (logits.softmax(-1) - F.one_hot(target, len(weight))) * scale
        ctx.save_for_backward(grad @ weight, grad.T @ h)
        return (logits.logsumexp(-1) - logits.gather(1, target[:, None])[:, 0]).sum() * scale

    @staticmethod
    def backward(ctx, grad):
        of_rows, of_weight = ctx.saved_tensors
        return of_rows * grad, of_weight * grad, None, None


class WithSummedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(8, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x, target):
        return SummedLoss.apply(self.a(x), self.head.weight, target, 1 / len(x))


def test_a_rule_of_a_function_is_checked_and_used():
    torch.manual_seed(0)
    call = torch.randn(12, 8), torch.arange(12) % 6
    model = WithSummedLoss()
    assert len(autopart.plan(model, "dp2", example_args=call).unsharded) == 1
    with pytest.raises(RuleError, match="sum='b', or whole="):
        autopart.rule(SummedLoss, "b d, n d, b ->", sum="b d n", whole="d n")
    try:
        autopart.rule(SummedLoss, "b d, n d, b ->", sum="b", whole="d n")
        checked = autopart.check_rule(
            SummedLoss, torch.rand(12, 8).double(), torch.rand(6, 8).double(), torch.arange(12) % 6, 0.5
        )
        assert checked.ok and any("S(0)" in text for text in checked.right), checked
        assert autopart.plan(model, "dp2", example_args=call).unsharded == ()
        for mesh in ("dp2", "pp2"):
            assert autopart.verify(model, mesh, example_args=call).ok
        with pytest.raises(RuleError, match="with another rule already"):
            autopart.rule(SummedLoss, "b d, n d, b ->", whole="b d n")
    finally:
        REGISTERED.clear()

"""Gradients that a trace could lose: checkpoints of the model's own, and whatever runs without grad mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import autopart
from autopart.compat.torch_internals import Tracing
from autopart.errors import TraceError
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import prepare
from autopart.tracing import gradient_check
from autopart.tracing.call_signature import ExportEntry
from autopart.tracing.gradient_check import with_gradients_checked
from autopart.tracing.python import eager_semantics
from autopart.tracing.python.eager_semantics import EagerSemantics
from autopart.tracing.trace_model import bind_call, trace

SIZE = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE), nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x) * scale)))


def twice(run: Any, *given: Any, **options: Any) -> Tensor:
    """One checkpoint inside another."""
    return checkpoint(lambda x: 2 * checkpoint(run, x, *given[1:], **options), given[0], **options)


CALLS = {
    "whole": lambda block, x, how: checkpoint(block, x, 0.5, None, **how),
    "bound": lambda block, x, how: checkpoint(partial(block.forward, scale=2.0), x, preserve_rng_state=False, **how),
    "nested": lambda block, x, how: twice(block, x, 0.5, **how),
    "part": lambda block, x, how: block.down(torch.tanh(checkpoint(block.up, x, **how))),
}


class Stack(nn.Module):
    """Blocks under checkpoint, called in one of several ways; every `every`th of them."""

    def __init__(self, call: str, reentrant: bool = True, every: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.call, self.every, self.how = CALLS[call], every, {"use_reentrant": reentrant}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for i, block in enumerate(self.h):
            x = self.call(block, x, self.how) if i % self.every == 0 else block(x)
        return x.square().mean()


class Sequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.parts = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.parts, 2, self.inner(x), use_reentrant=True)


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, SIZE, dtype=torch.float64)


def built(call: str, *how: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack(call, *how).double(), batch()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_model_checkpoints_has_its_gradient(call: str, reentrant: bool) -> None:
    model, x = built(call, reentrant)
    found = autopart.verify(model, "tp2", example_args=(x,))
    assert found.ok and {name for name, _ in model.named_parameters()} <= set(found.errors)


def test_a_sequence_of_checkpoints() -> None:
    torch.manual_seed(0)
    assert autopart.verify(Sequential().double(), "dp2", example_args=(batch(),)).ok


def test_a_checkpoint_of_inputs_alone_has_no_gradient_as_in_torch() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.a, model.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)  # type: ignore[assignment]
    kind = type("Net", (nn.Module,), {"forward": lambda self, x: self.a(x) + checkpoint(self.b, x, use_reentrant=True)})
    model.__class__ = kind
    found = autopart.verify(model.double(), "tp2", example_args=(batch(),))
    assert found.ok and not {"b.weight", "b.bias"} & set(found.errors)


@pytest.mark.large
@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_checkpoints(reentrant: bool) -> None:
    model, example = zoo.gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    plan = autopart.plan(model, "tp2", example_kwargs=example)
    assert plan.recompute == "full"
    assert autopart.verify(model, "tp2", plan=plan, example_kwargs=example).ok


def loop(call: str, mesh: str, **options: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    model, x = built(call)
    pm = autopart.parallelize(model.eval(), mesh, example_args=(x,), **options)
    losses = [pm.step(x).item() for _ in range(2)]
    return losses, pm.full_grads(), pm.plan.recompute


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_ranks_train_a_checkpointed_model_as_one_process_does(mesh: str) -> None:
    model, x = built("whole")
    model.eval()
    for _ in range(2):
        loss = model(x)
        loss.backward()
    for losses, grads, recompute in dist.run_ranks(loop, 2, "whole", mesh):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-12) and recompute == "full"
        assert set(grads) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.large
def test_the_models_checkpoints_are_the_plans_choice_until_another_is_asked_for() -> None:
    model, x = built("whole", True, 2)
    plan = autopart.plan(model, "tp2", example_args=(x,))
    assert plan.recompute == {"h.0": "full", "h.2": "full"}
    assert "the model's own checkpoints are followed: the backward recomputes h.0, h.2" in plan.notes
    assert Plan.from_json(plan.to_json()).recompute == plan.recompute
    asked = autopart.plan(model, "tp2", example_args=(x,), recompute="none")
    assert asked.recompute == "none"
    assert "recompute='none' is used in place of the model's own checkpoints" in asked.notes
    assert sum(row["activations"] for row in plan.memory) < sum(row["activations"] for row in asked.memory)


def test_a_checkpoint_of_a_part_is_not_kept_and_the_plan_says_so() -> None:
    model, x = built("part")
    plan = autopart.plan(model, "tp2", example_args=(x,))
    assert plan.recompute == "none"
    assert [
        n for n in plan.notes if n.startswith("autopart ignores the model's own checkpoints of h.0.up, h.1.up, h.2.up")
    ]


def test_the_users_own_model_still_checkpoints_after_a_trace() -> None:
    model, x = built("whole")
    autopart.plan(model, "tp2", example_args=(x,))
    loss = model(x)
    kinds, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        kinds.add(type(node).__name__)
        todo += [after for after, _ in node.next_functions if after is not None]
    assert "CheckpointFunctionBackward" in kinds


class DetachedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).detach_())


class Freezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return self.a(x)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(DetachedInPlace, "detach_() detaches a tensor in place"), (Freezing, "forward() freezes a parameter")],
)
def test_what_a_trace_would_lose_is_refused(kind: type[nn.Module], what: str) -> None:
    model = kind().double()
    before = copy.deepcopy(model)
    with pytest.raises(TraceError, match=what.replace("(", r"\(").replace(")", r"\)")):
        autopart.plan(model, "tp2", example_args=(batch(),))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in before.parameters()]


# The check after a trace


class Partly(nn.Module):
    """A part without grad mode, one in grad mode inside that, and one that Python decides about."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.norm = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.a(x)
            with torch.enable_grad():
                moving = self.b(x)
        steps = torch.arange(3)
        self.seen = self.seen + 1
        return self.c(moving) + still if steps[-1] > 1 else self.norm(x)


def test_a_gradient_that_a_trace_loses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_torch_does(self: ExportEntry, apply: Any, function: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        return apply(function, *args, **kwargs)

    monkeypatch.setattr(ExportEntry, "apply_function", as_torch_does)
    model, x = built("bound")
    with pytest.raises(TraceError) as caught:
        autopart.plan(model, "tp2", example_args=(x,))
    text = str(caught.value)
    assert "the trace of Stack loses the gradient of 'inner.weight', 'inner.bias', 'h.0.up.weight', ..." in text
    assert "the model gives them a gradient, and the trace does not" in text and "where" in text


def test_a_gradient_that_a_trace_makes_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_semantics, "_detached", lambda leaf, written: leaf)
    with pytest.raises(TraceError, match=r"the trace of Partly gives a gradient to 'a.weight', 'a.bias'"):
        autopart.plan(Partly().double(), "tp2", example_args=(batch(),))


def checked(model: nn.Module, *args: Tensor) -> tuple[str, ...]:
    arguments = bind_call(model, args, {})
    return with_gradients_checked(model, arguments, trace(model, arguments), None).notes


def test_the_check_agrees_where_a_model_has_its_gradients_and_leaves_it_as_it_was() -> None:
    model = Partly().double()
    before = copy.deepcopy(model.state_dict())
    assert not [note for note in checked(model, batch()) if "compared" in note]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not p.is_meta for p in model.parameters())


def test_a_plan_says_where_nothing_could_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("no values here\nand more")

    monkeypatch.setattr(gradient_check, "_call", fails)
    notes = checked(Partly().double(), batch())
    assert "its gradients were not compared with the model's (RuntimeError: no values here)" in notes


class Written(nn.Module):
    """Writes to what it has made, on the CPU and beside its input, and computes in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.zeros(4, SIZE, dtype=x.dtype), x.new_zeros(4, SIZE)
        first[:2] = self.a(x)[:2]
        second.add_(self.b(x))
        return (first + second).float() * torch.linspace(0, 1, SIZE).max().item()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None])[0]


@pytest.mark.parametrize("kind", [Written, Recurrent])
def test_models_that_the_check_can_run(kind: type[nn.Module]) -> None:
    assert not [note for note in checked(kind().double(), batch()) if "compared" in note]


def test_the_models_own_run_is_without_what_corrects_a_trace(monkeypatch):
    inside = []
    meet = EagerSemantics.__torch_function__

    def noted(self, *args, **kwargs):
        inside.append(Tracing.current() is not None)
        return meet(self, *args, **kwargs)

    monkeypatch.setattr(EagerSemantics, "__torch_function__", noted)
    prepare(Stack("whole"), bind_call(Stack("whole"), (torch.ones(2, SIZE),), {}))
    assert inside and all(inside)


class Zeros(nn.Module):
    """Operators whose gradient is always zero, or has no elements."""

    def __init__(self, operator: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...] = (4, 4)) -> None:
        super().__init__()
        self.a, self.w, self.operator = nn.Linear(4, 4), nn.Parameter(torch.rand(shape)), operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(self.a(x), self.w).square().mean()


ZEROS = {
    "matrix_power": (lambda y, w: y @ torch.linalg.matrix_power(w, 0), (4, 4)),
    "method": (lambda y, w: y @ w.matrix_power(0) + y @ w.matrix_power(2), (4, 4)),
    "bernoulli": (lambda y, w: y @ torch.bernoulli(w), (4, 4)),
    "addmm with beta=0": (lambda y, w: torch.addmm(w, y.t(), y, beta=0), (4, 4)),
    "an empty vector": (lambda y, w: torch.cat([w, y]), (0,)),
}


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
@pytest.mark.parametrize("name", ZEROS)
def test_a_gradient_of_zero_is_one(name, mesh):
    """AdamW decays weights whose gradient is zero, and leaves weights without a gradient."""
    torch.manual_seed(0)
    report = autopart.verify(Zeros(*ZEROS[name]), mesh, example_args=(torch.randn(8, 4),), steps=2)
    assert report.ok, report


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        parts = torch.tensor_split(self.a(x), at)
        return sum((i + 1) * part.square().sum() for i, part in enumerate(parts))


@pytest.mark.large
def test_a_split_at_the_values_of_an_input_is_traced_for_each_value():
    torch.manual_seed(0)
    model, x = Split().double(), torch.randn(8, 4).double()
    pm = autopart.parallelize(model, "tp1", example_args=(x, torch.tensor([2, 5])))
    for at in ([2, 5], [1, 7], [4, 4]):
        torch.testing.assert_close(pm(x, torch.tensor(at)), model(x, torch.tensor(at)), rtol=1e-12, atol=1e-12)
    assert autopart.verify(model, "tp2", example_args=(x, torch.tensor([2, 5]))).ok

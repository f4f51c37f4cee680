"""What a model, its call and its outputs may be made of: each is traced, partitioned, and exact.

A case is a model and its call. It is verified on meshes, and called: what comes back has the model's own types.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from traced import verified
from transformers.modeling_outputs import BaseModelOutput

import autopart
from autopart.proof.verify import VerificationRun
from autopart.tracing.trace_model import bind_call

ROWS, SEQ, SIZE = 4, 3, 8


class Base(nn.Module):
    """Two linear layers; `f` runs both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def f(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


def rows(seed: int = 1, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, SEQ, SIZE), generator=torch.Generator().manual_seed(seed))


# --- outputs and inputs --------------------------------------------------------------------------------------------


class ReturnsInputs(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.f(x)
        return x, y, x.view(-1), x[:, :1], x, [y, y.transpose(0, 1)], self.up.weight, y.argmax(-1), y > 0


@dataclass
class Pair:
    """Known to nobody as a container."""

    first: Tensor
    second: Tensor | None = None
    number: int = 3


class Named(NamedTuple):
    a: Tensor
    b: Any


class Dataclasses(Base):
    def forward(self, pair: Pair, named: Named) -> Any:
        y = self.f(pair.first) * pair.number + named.b["list"][0]
        return Named(Pair(y, None, 4), {"none": None, "text": "z", "list": [y.sum(-1), 2.5]})


class ReturnsModelOutput(Base):
    def forward(self, x: Tensor) -> Any:
        return BaseModelOutput(last_hidden_state=self.f(x), hidden_states=(x, self.up(x)))


class ReturnsConstants(Base):
    def forward(self, x: Tensor) -> Any:
        return {"y": self.f(x), "range": torch.arange(3), "mean": x.mean(), "list": torch.tensor([1.0, 2.0]), "n": None}


class ByPosition(Base):
    def forward(self, x: Tensor, /, y: Tensor, *rest: Tensor, scale: float, shift: Any = None, **more: Any) -> Any:
        return self.f(x) * scale + y + sum(rest) * more["extra"]


class Kind(enum.Enum):
    DOUBLE, SAME = 1, 2


class Options(Base):
    def forward(self, x: Tensor, kind: Kind, flag: bool, name: str, dtype: torch.dtype, none: None) -> Any:
        y = self.f(x) * (2 if kind is Kind.DOUBLE else 1) + flag
        return getattr(torch, name)(y), y.detach().to(dtype).sum()


class ZeroDims(Base):
    def forward(self, x: Tensor, factor: Tensor, count: Tensor) -> Any:
        return self.f(x) * factor + count, factor * 2, count + 1


class EmptyPart(Base):
    def forward(self, x: Tensor, before: Tensor) -> Any:
        return self.f(torch.cat([before, x], 1)), self.f(before)


# --- parameters and modules ----------------------------------------------------------------------------------------


class Lists(Base):
    """Parameters and modules in containers, called different numbers of times."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(SIZE)) for _ in range(3)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.randn(SIZE)), "unused": nn.Parameter(torch.ones(1))})
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.heads = nn.ModuleDict({"k": nn.Linear(SIZE, SIZE)})

    def forward(self, x: Tensor) -> Any:
        y = self.f(x)
        for count, (layer, shift) in enumerate(zip(self.layers, self.shifts, strict=True)):
            for _ in range(count):
                y = torch.tanh(layer(y)) + shift
        return self.heads["k"](y) * self.scales["a"]


class Hooks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, inputs, output: output * 2)
        self.up.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.register_forward_hook(lambda module, inputs, output: -output)


class Triangle(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + 0.1 * weight.triu(1)


class Parametrised(Base):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)
        self.down = parametrizations.orthogonal(self.down)
        self.last, self.pruned, self.old = (nn.Linear(SIZE, SIZE) for _ in range(3))
        parametrize.register_parametrization(self.last, "weight", Triangle())
        prune.l1_unstructured(self.pruned, "weight", 0.5)
        self.old = nn.utils.weight_norm(self.old)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.pruned(self.old(self.f(x))))


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.down.bias.requires_grad_(False)


# --- what forward does ---------------------------------------------------------------------------------------------


class GradModes(Base):
    """Grad mode inside autocast, and next to writes in place: torch.export loses it in both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Any:
        y = self.f(x)
        with torch.no_grad():
            z = self.up(x) * 2
            with torch.enable_grad():
                w = self.up(x) * z
            self.total.add_(y.sum((0, 1)))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            v = self.f(x)
        return y + self.down(w) + v.to(y.dtype) + self.total.mean()


class Casts(Base):
    """Rounds to bfloat16 inside, by autocast and by hand."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.f(x)
            with torch.autocast("cpu", enabled=False):
                z = y.float().softmax(-1)
        return (y.bfloat16().to(x.dtype) + z).square().mean()


class CastsModule(Base):
    """Casts a module of its own to the dtype that it has."""

    def forward(self, x: Tensor) -> Any:
        self.up = self.up.to(x.dtype)
        return self.f(x)


class Checkpointed(Base):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.f, x, use_reentrant=False) + checkpoint(self.up, x, use_reentrant=True).mean()


class StraightThrough(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return self.down(y + (y.round() - y).detach())


class Vmapped(Base):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.f)(x)


class KeepsThings(Base):
    """Attributes that forward sets and does not decide by."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.positions = 0, [], None

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.positions is None or len(self.positions) < x.shape[1]:
            self.positions = torch.arange(x.shape[1])[:, None] / 10
        y = self.up(x + self.positions)
        self.seen.append(y)
        self.last = self.seen[-1]
        return self.down(self.last)


class HooksItself(Base):
    """Hooks that the first forward adds to a part, which transformers' models do to return hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def forward(self, x: Tensor) -> Any:
        if not self.hooked:
            self.up.register_forward_hook(lambda module, args, output: output * 2)
            self.hooked = True
        return self.down(self.up(x))


CASES: dict[str, tuple[Callable[[], Base], tuple, dict[str, Any]]] = {
    "Dataclasses": (Dataclasses, (), {"pair": Pair(rows()), "named": Named(rows(2), {"list": [rows(3)], "x": None})}),
    "ByPosition": (ByPosition, (rows(), rows(2), rows(3), rows(4)), {"scale": 0.5, "extra": rows(5)}),
    "Options": (Options, (), {
        "x": rows(), "kind": Kind.DOUBLE, "flag": True, "name": "relu", "dtype": torch.float64, "none": None}),
    "ZeroDims": (ZeroDims, (), {"x": rows(), "factor": torch.tensor(2.0), "count": torch.tensor(3)}),
    "EmptyPart": (EmptyPart, (), {"x": rows(), "before": torch.zeros(ROWS, 0, SIZE)}),
    **{cls.__name__: (cls, (), {"x": rows()}) for cls in (
        ReturnsInputs, ReturnsModelOutput, ReturnsConstants, Lists, Hooks, Parametrised, Frozen, GradModes,
        Checkpointed, StraightThrough, Vmapped, KeepsThings, HooksItself, Casts, CastsModule)},
}  # fmt: skip
ROUNDED = {"GradModes": 2**-6, "Casts": 2**-6}
"""How far the cases that round to bfloat16 may be from one device: partial sums round elsewhere."""


@cache
def run_of_case(name: str) -> VerificationRun:
    build, args, kwargs = CASES[name]
    model = build()
    return VerificationRun(model, bind_call(model, args, kwargs))


@pytest.mark.parametrize("mesh", ["tp2", "dp2,pp2"])
@pytest.mark.parametrize("name", CASES)
def test_the_partitioned_program_is_exact(name, mesh):
    found = verified(run_of_case(name), mesh)
    assert found.ok and found.max_error < 1e-12, str(found)


@pytest.mark.parametrize("name", CASES)
def test_a_call_returns_what_the_model_returns(name):
    build, args, kwargs = CASES[name]
    found = autopart.parallelize(build(), "tp1", example_args=args, example_kwargs=kwargs)(*args, **kwargs)
    expected = build()(*args, **kwargs)
    assert type(found) is type(expected)
    (flat, spec), (flat_expected, spec_expected) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == spec_expected
    for one, other in zip(flat, flat_expected, strict=True):
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.allclose(one.float(), other.float(), atol=ROUNDED.get(name, 1e-6))
        else:
            assert type(one) is type(other) and one == other


def test_tracing_leaves_attributes_alone():
    model = KeepsThings()
    plan = autopart.plan(model, "tp2", example_kwargs={"x": rows()})
    assert (model.calls, model.seen, model.positions) == (0, [], None) and not hasattr(model, "last")
    assert [note for note in plan.notes if note.startswith("forward() also sets")]
    hooked = HooksItself()
    autopart.plan(hooked, "tp2", example_kwargs={"x": rows()})
    assert not hooked.hooked and not hooked.up._forward_hooks


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2,pp2,tp2"])
def test_low_rank_adapters(mesh):
    """peft hands its arguments on to the model, whose weights are frozen."""
    peft = pytest.importorskip("peft")
    model, batch = zoo.llama(num_layers=1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    found = autopart.verify(model, mesh, example_kwargs=batch)
    assert found.ok and found.max_error < 1e-12, str(found)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and {name for name in found.errors if "." in name} == trained


def test_a_frozen_weight_is_not_synchronised():
    plan = autopart.plan(Frozen(), "dp2", example_kwargs={"x": rows()})
    (sums,) = [c for c in plan.collectives if c.where == "gradients of parameters"]
    trained = sum(p.numel() * 4 for p in Frozen().parameters() if p.requires_grad)
    assert sums.bytes == trained


# --- over processes ------------------------------------------------------------------------------------------------


def trains(name, mesh):
    """Gradients and two optimizer steps of a case whose output is one tensor; frozen weights stay as they are."""
    build, args, kwargs = CASES[name]
    model = build().double()
    kwargs = {n: v.double() if isinstance(v, Tensor) else v for n, v in kwargs.items()}
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_args=args, example_kwargs=kwargs)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, pm)]
    for _ in range(2):
        losses = [m(**kwargs).square().mean() for m in (model, pm)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})
        assert not frozen & set(pm.full_grads())
        for optimizer in optimizers:
            optimizer.step()
    found = pm.full_state_dict()
    for name_, value in model.state_dict().items():
        zoo.assert_close_outputs(found[name_], value, where=name_)
    assert all(torch.equal(found[n], before[n]) for n in frozen)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("Frozen", "tp2"), ("Lists", "dp2"), ("Hooks", "tp2"), ("Hooks", "dp2"), ("StraightThrough", "tp2")],
)
def test_training_over_processes(name, mesh):
    dist.run_ranks(trains, 2, name, mesh)


def half_precision(dtype, mesh):
    """A model in half precision, and one under the caller's autocast: as near to one device as its precision allows."""
    model, x = Base(), rows()
    pm = autopart.parallelize(copy.deepcopy(model), mesh)
    with torch.autocast("cpu", dtype=dtype):
        expected, found = model(x), pm(x)
        loss = pm.step(x=x, loss_fn=F.mse_loss, target=x)
    assert found.dtype == expected.dtype == dtype
    assert (found - expected).abs().max() < 2**-6 and loss.isfinite()
    assert pm(x).dtype == torch.float32 and torch.allclose(pm(x), model(x), atol=1e-6)
    model, x = model.to(dtype), x.to(dtype)
    pm = autopart.parallelize(copy.deepcopy(model), mesh)
    (expected, found) = (m(x) for m in (model, pm))
    assert found.dtype == dtype and (found - expected).abs().max() < 2**-6
    for output in (expected, found):
        output.float().square().mean().backward()
    for name, grad in pm.full_grads().items():
        whole = model.get_parameter(name).grad
        assert grad.dtype == dtype and (grad - whole).abs().max() < 2**-5 * whole.abs().max(), name


@pytest.mark.few
@pytest.mark.parametrize(("dtype", "mesh"), [(torch.bfloat16, "tp2"), (torch.float16, "dp2")])
def test_half_precision_over_processes(dtype, mesh):
    dist.run_ranks(half_precision, 2, dtype, mesh)


class Windows(nn.Module):
    """Overlapping windows of a value's memory, read as it lies there."""

    def __init__(self, transposed):
        super().__init__()
        self.first, self.second, self.transposed = nn.Linear(8, 8), nn.Linear(8, 8), transposed

    def forward(self, x):
        x = self.second(torch.relu(self.first(x)))
        x = x.transpose(1, 2) if self.transposed else x
        windows = x.as_strided((x.numel() // 8 - 1, 16), (8, 1))
        return (windows * torch.arange(16.0, dtype=x.dtype)).square().mean()


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2,tp2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_is_read_as_in_the_trace(transposed, mesh):
    torch.manual_seed(0)
    found = autopart.verify(Windows(transposed).double(), mesh, example_kwargs={"x": torch.randn(4, 6, 8).double()})
    assert found.ok, str(found)


def test_memory_of_another_value_is_not_read():
    class Slice(Windows):
        def forward(self, x):
            return self.first(x)[:, 1:].as_strided((4, 8), (8, 1)).square().mean()

    with pytest.raises(autopart.AutopartError, match="as_strided reads memory outside of its input"):
        autopart.plan(Slice(False).double(), "tp2", example_kwargs={"x": torch.randn(4, 6, 8).double()})


class Moves(nn.Module):
    """Moves a part of itself to where its input is, which it is already, and calls a function of TorchScript."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scripted = torch.jit.script(squared)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first.to(x.device)(x)
        return self.scripted(self.second.to(device=x.device, dtype=h.dtype, non_blocking=True)(h)).mean()


def squared(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_moves_to_where_it_is(mesh):
    result = autopart.verify(Moves(), mesh, example_args=(torch.randn(4, 8),))
    assert result.ok and not any("compared" in note for note in result.notes), result


def test_lazy_modules_after_their_first_call():
    model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.randn(4, 8)
    model(x)
    assert autopart.verify(model, "tp2", example_args=(x,)).ok


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.relu())


class SettlesInItsFirstCall(nn.Module):
    """As transformers' BigBird, which gives up block-sparse attention for short rows and puts modules in the place of
    others, with first values that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.up, self.down = "sparse", nn.Linear(SIZE, 2 * SIZE), Rectified()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse":
            other = Rectified()
            other.inner = self.down.inner
            self.kind, self.down = "full", other
        return self.down(self.up(x))


@pytest.mark.large
def test_a_first_call_that_only_makes_more_than_later_ones():
    model = SettlesInItsFirstCall()
    down = model.down
    autopart.plan(model, "tp2", example_kwargs={"x": rows()})
    assert model.down is down and model.kind == "sparse"
    assert autopart.verify(model, "dp2,tp2", example_kwargs={"x": rows()}).ok

"""What models do to a trace: each is traced as it should be, and its partitioned program is still exact."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import gpt2

import autopart
from autopart.compat import export_internals
from autopart.ir.facts import facts
from autopart.ir.graph import describe, module_path, operator_name, source_line
from autopart.ir.trace import Trace
from autopart.recipe.make_plan import prepare
from autopart.tracing import call_signature
from autopart.tracing.trace_model import bind_call, trace

ROWS, SIZE = 4, 8


class Block(nn.Module):
    """Two linear layers; subclasses say what happens between and around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class TwoInputs(Block):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), 2 * y)


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(2 * SIZE, SIZE)
        self.again.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.again(torch.relu(self.up(x)))


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(SIZE, SIZE)


class Stopped(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with torch.no_grad():
            scale = y.abs().mean(-1, keepdim=True)
        return self.down(y / scale + self.up(x).detach())


class NestedModes(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with torch.no_grad():
            z = y * 2
            with torch.enable_grad():
                w = self.up(x) * z
            z = z + 1
        return self.down(w + z)


class WritesViews(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        full = y.new_empty(y.shape)
        full[..., :SIZE].copy_(y[..., SIZE:])
        full[..., SIZE:] = y[..., :SIZE] * 2
        full.mul_(0.5)
        return self.down(full)


class Aliases(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = super().forward(x)
        return y, y, y.view(-1, SIZE // 2), x


class Mixed(Block):
    def forward(self, x: Tensor, scale: float = 1.0, pair: Any = None, options: Any = None) -> dict[str, Any]:
        y = super().forward(x) * scale
        if pair is not None:
            y = y + pair[0] - pair[1]
        if options and options["relu"]:
            y = torch.relu(y)
        return {"y": y, "parts": (y.sum(-1), [y.mean(-1)]), "none": None, "number": 3, "name": "z"}


@dataclass
class Result:
    loss: Tensor
    hidden: Tensor | None = None


pytree.register_dataclass(Result, serialized_type_name="test_trace.Result")


class ReturnsDataclass(Block):
    def forward(self, x: Tensor) -> Result:
        y = super().forward(x)
        return Result(loss=y.pow(2).mean(), hidden=y)


class Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(2 * SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) + self.offset + torch.tensor([0.5, 1.5]).repeat(SIZE))


class FrozenPart(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


def rows(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, 3, SIZE, generator=torch.Generator().manual_seed(seed))


X = rows()
CALLS: dict[str, tuple[type[Block], Mapping[str, Any]]] = {
    "plain": (Block, {"x": X}),
    "one object twice": (TwoInputs, {"x": X, "y": X}),
    "tied": (Tied, {"x": X}),
    "twice": (Twice, {"x": X}),
    "unused": (Unused, {"x": X}),
    "no_grad": (Stopped, {"x": X}),
    "nested no_grad": (NestedModes, {"x": X}),
    "writes through views": (WritesViews, {"x": X}),
    "aliased outputs": (Aliases, {"x": X}),
    "number": (Mixed, {"x": X, "scale": 0.5}),
    "tuple": (Mixed, {"x": X, "pair": (rows(2), rows(3))}),
    "dict": (Mixed, {"x": X, "options": {"relu": True, "other": None}}),
    "list": (Mixed, {"x": X, "pair": [rows(2), rows(2)]}),
    "dataclass": (ReturnsDataclass, {"x": X}),
    "buffer and constant": (Buffered, {"x": X}),
    "frozen part": (FrozenPart, {"x": X}),
}


def traced(name: str) -> Trace:
    cls, call = CALLS[name]
    return prepare(cls(), bind_call(cls(), (), call))


@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2", "dp2,pp2,tp2"])
@pytest.mark.parametrize("name", CALLS)
def test_the_partitioned_program_is_exact(name, mesh):
    cls, call = CALLS[name]
    verification = autopart.verify(cls(), mesh, example_kwargs=call)
    assert verification.ok, str(verification)
    assert verification.max_error < 1e-12


@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_what_the_model_returns(name):
    cls, call = CALLS[name]
    model = cls()
    found = autopart.parallelize(model, "tp1", example_kwargs=call)(**call)
    expected = model(**call)
    assert type(found) is type(expected)
    (flat, spec), (flat_expected, spec_expected) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == spec_expected
    for one, other in zip(flat, flat_expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6) if isinstance(other, Tensor) else one == other


def test_one_tensor_given_twice_stays_two_inputs():
    trace = traced("one object twice")
    assert trace.call.names == ("x", "y")
    used = {node.target: len(node.users) for node in trace.graph.find_nodes(op="placeholder")}
    assert set(used.values()) == {1}


def test_a_program_reads_each_of_two_inputs_that_were_one_object():
    model = TwoInputs()
    pm = autopart.parallelize(model, "tp1", example_kwargs={"x": X, "y": X})
    other = {"x": rows(5), "y": rows(6)}
    assert torch.allclose(pm(**other), model(**other))


def test_a_tied_parameter_has_one_name_and_an_alias():
    trace = traced("tied")
    assert trace.aliases == {"down.weight": ("again.weight",)}
    assert "again.weight" not in trace.parameters
    reads = [n for n in trace.graph.find_nodes(op="get_attr") if n.target == "down.weight"]
    assert sum(len(n.users) for n in reads) == 2
    assert not [n for n in trace.graph.find_nodes(op="get_attr") if n.target == "again.weight"]


def test_a_module_called_twice_reads_its_weights_twice():
    trace = traced("twice")
    keys = [
        facts(n)["key"] for n in trace.graph.nodes if operator_name(n) == "aten::linear" and n.op == "call_function"
    ]
    assert len(keys) == len(set(keys)) == 4
    assert [key.split("/")[0].split("@")[0] for key in keys] == ["up", "down", "up", "down"]


def test_an_unused_parameter_is_stored_and_has_no_gradient():
    model = Unused()
    pm = autopart.parallelize(model, "tp1", example_kwargs={"x": X})
    pm(x=X).sum().backward()
    assert set(pm.full_state_dict()) == set(model.state_dict())
    assert set(pm.full_grads()) == {"up.weight", "up.bias", "down.weight", "down.bias"}


def test_a_no_grad_region_stops_gradients():
    trace = traced("no_grad")
    assert any(operator_name(n) == "aten::detach" for n in trace.graph.nodes if n.op == "call_function")
    model = Stopped()
    model(X).sum().backward()
    pm = autopart.parallelize(Stopped(), "tp1", example_kwargs={"x": X})
    pm(x=X).sum().backward()
    for name, grad in pm.full_grads().items():
        assert torch.allclose(grad, model.get_parameter(name).grad, atol=1e-5), name


def test_in_place_writes_become_functional():
    trace = traced("writes through views")
    for node in trace.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, node


def test_arguments_that_are_no_tensors_are_options():
    trace = traced("tuple")
    assert trace.call.names == ("x", "pair.0", "pair.1")
    assert list(traced("number").call.options.values()) == [0.5]
    assert list(traced("dict").call.options.values()) == [True, None]


def test_use_cache_is_switched_off_and_noted():
    model, batch = gpt2(num_layers=1, rows=2, seq=6)
    assert autopart.plan(model, "tp2", example_kwargs=batch).notes[0] == "traced with use_cache=False"
    assert autopart.plan(model, "tp2", example_kwargs={**batch, "use_cache": False}).notes[0].startswith("traced with")
    cls, call = CALLS["plain"]
    assert autopart.plan(cls(), "tp2", example_kwargs=call).notes == ()


def test_source_lines_and_module_paths_are_kept():
    trace = traced("plain")
    seen = [
        (operator_name(n), module_path(n), source_line(n).split(":")[0])
        for n in trace.graph.nodes if n.op == "call_function" and operator_name(n) in ("aten::linear", "aten::tanh")
    ]  # fmt: skip
    file = "test_trace.py"
    assert seen == [("aten::linear", "up", file), ("aten::tanh", "", file), ("aten::linear", "down", file)]
    (tanh,) = [n for n in trace.graph.nodes if n.op == "call_function" and operator_name(n) == "aten::tanh"]
    number = Block.forward.__code__.co_firstlineno + 1
    assert describe(tanh) == f"tanh at test_trace.py:{number}"


def test_lines_are_looked_up_no_further_out_than_the_models_call(monkeypatch):
    """Who calls autopart is no concern of an operator's: only what torch asks outside of the call sees all frames."""
    outermost, summary = [], export_internals._Stack.summary

    def seen(stack):
        frames = summary(stack)
        outermost.append((frames[0].filename, frames[0].name))
        return frames

    monkeypatch.setattr(export_internals._Stack, "summary", seen)
    model = Block()
    called = [n for n in trace(model, bind_call(model, (X,), {})).graph.nodes if n.op == "call_function"]
    assert outermost.count((call_signature.__file__, "forward")) >= len(called) >= 3


def test_a_pass_that_adds_operators_keeps_where_they_come_from():
    trace = traced("one object twice")
    nodes = [n for n in trace.graph.nodes if n.op == "call_function"]
    assert all(source_line(n).startswith("test_trace.py") for n in nodes), [describe(n) for n in nodes]


def test_meta_weights_trace_and_give_the_same_plan():
    cls, call = CALLS["plain"]
    with torch.device("meta"):
        model = cls()
    on_meta = autopart.plan(model, "pp2,tp2", example_kwargs=call)
    assert on_meta == autopart.plan(cls(), "pp2,tp2", example_kwargs=call)


def test_a_loss_function_and_its_target_are_traced_with_the_model():
    model, target = Block(), rows(7)
    F.mse_loss(model(X), target).backward()
    pm = autopart.parallelize(Block(), "tp1")
    for expected in (1, 2):  # the second call finds the trace of the first
        loss = pm.step(x=X, loss_fn=F.mse_loss, target=target)
        assert torch.allclose(loss, F.mse_loss(model(X), target))
        for name, grad in pm.full_grads().items():
            assert torch.allclose(grad, expected * model.get_parameter(name).grad, atol=1e-6), name


def test_garbage_is_collected_again_after_a_plan_and_after_an_error():
    autopart.plan(Block(), "tp2", example_kwargs={"x": rows()})
    assert gc.isenabled()
    with pytest.raises(autopart.AutopartError):
        autopart.plan(Block(), "dp3", example_kwargs={"x": rows()})
    assert gc.isenabled()


def test_tracing_leaves_model_and_inputs_alone():
    model, x = Block(), rows()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace(model, {"x": x})
    assert torch.equal(x, rows())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert model.training


class Table(nn.Module):
    """Parameters that are kept in a dictionary too, and read there (as in ncps); a buffer likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 8)
        self.register_buffer("scale", torch.rand(16))
        self.table = {"weight": self.weight, "scale": [self.scale]}

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.table["weight"]).tanh() * self.table["scale"][0])


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_parameters_that_are_read_from_a_dictionary_are_parameters(mesh):
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    model = Table()
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,))
    pm.step(x, loss_fn=lambda output, target: output.square().sum(), target=x)
    model(x).square().sum().backward()
    torch.testing.assert_close(pm.full_grads()["weight"], model.weight.grad)
    assert autopart.verify(Table(), mesh, example_args=(x,)).ok

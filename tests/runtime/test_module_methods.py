"""Every public method of `nn.Module`, called on a partitioned model and on one of its layers.

Each is *right* (it does what it does to the unpartitioned model), *refused* (with the text here) or *harmless* (it
returns the module, and nothing has changed). A method that torch adds is in no row, and fails the test.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import AutopartError

TIMEOUT_S = 180.0
MESHES = {"tp2": {}, "pp2": {"microbatches": 1}, "dp2": {"zero": 3}}
ROWS, SIZE = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.linear(x)))

    def extra_repr(self) -> str:
        return f"size={SIZE}, training={self.training}"


class Model(Block):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(super().forward(x))


# --- right ----------------------------------------------------------------------------------------------------------

Outcome = Callable[[Any, Tensor], Any]
"""Call a method of a module (the model, or its layer `block`) and return what can be compared, with all undone."""


def forms(named: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named}


def kinds(modules: Any) -> list[str]:
    return ["Model" if isinstance(m, autopart.ParallelModule) else m.__class__.__name__ for m in modules]


def visited(module: Any, x: Tensor) -> list[str]:
    seen: list[Any] = []
    assert module.apply(seen.append) is module
    return kinds(seen)


def modes(change: Callable[[Any], Any]) -> Outcome:
    def outcome(module: Any, x: Tensor) -> dict[str, bool]:
        assert change(module) is module
        changed = {name: m.training for name, m in module.named_modules()}
        module.train()
        return changed

    return outcome


def needs(module: Any, x: Tensor) -> dict[str, list[bool]]:
    assert module.requires_grad_(False) is module
    seen = {name: [p.requires_grad] for name, p in module.named_parameters()}
    module.requires_grad_(True)
    return {name: [*seen[name], p.requires_grad] for name, p in module.named_parameters()}


def without_gradients(module: Any, x: Tensor) -> dict[str, bool]:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    module.zero_grad()
    return {name: p.grad is None for name, p in module.named_parameters()}


def loaded(module: Any, x: Tensor) -> list[Any]:
    """The state of this module is doubled, and read back."""
    saved = {name: value.clone() for name, value in module.state_dict().items()} if is_plain(module) else full(module)
    result = module.load_state_dict({name: value * 2 for name, value in saved.items()})
    after = full(module)
    module.load_state_dict(saved)
    return [list(result.missing_keys), list(result.unexpected_keys), {n: v.double().sum() for n, v in after.items()}]


def is_plain(module: Any) -> bool:
    return not isinstance(module, autopart.ParallelModule) and type(module).__name__ != "LayerProxy"


def full(module: Any) -> dict[str, Tensor]:
    if is_plain(module):
        return {name: value.clone() for name, value in module.state_dict().items()}
    if isinstance(module, autopart.ParallelModule):
        return module.full_state_dict()
    start = "block."
    return {n[len(start) :]: v for n, v in module._modes.root.full_state_dict().items() if n.startswith(start)}


def outputs(module: Any, x: Tensor) -> Tensor:
    module.eval()
    with torch.no_grad():
        result = module.forward(x)
    module.train()
    return result


def hooked(name: str, use: Callable[[Any, Tensor], Any]) -> Outcome:
    """Return the number of runs of a hook, and of its arguments."""

    def outcome(module: Any, x: Tensor) -> list[int]:
        calls: list[int] = []
        handle = getattr(module, name)(lambda *args: calls.append(len(args)))
        try:
            use(module, x)
        finally:
            handle.remove()
            module._is_full_backward_hook = None  # torch allows one kind on a module
            module.train()
        assert calls
        return calls

    return outcome


def call(module: Any, x: Tensor) -> None:
    module.eval()
    with torch.no_grad():
        module(x)


def call_backward(module: Any, x: Tensor) -> None:
    module.eval()
    module(x).sum().backward()
    module.zero_grad()


RIGHT: dict[str, Outcome] = {
    "apply": visited,
    "buffers": lambda m, x: [b.clone() for b in m.buffers()],
    "children": lambda m, x: kinds(m.children()),
    "cuda": lambda m, x: m.cuda(),
    "eval": modes(lambda m: m.eval()),
    "extra_repr": lambda m, x: m.extra_repr(),
    "forward": outputs,
    "get_buffer": lambda m, x: m.get_buffer("norm.running_mean").clone(),
    "get_extra_state": lambda m, x: m.get_extra_state(),
    "get_parameter": lambda m, x: {"linear.weight": tuple(m.get_parameter("linear.weight").shape)},
    "get_submodule": lambda m, x: kinds([m.get_submodule("norm")]),
    "ipu": lambda m, x: m.ipu(),
    "load_state_dict": loaded,
    "modules": lambda m, x: kinds(m.modules()),
    "mtia": lambda m, x: m.mtia(),
    "named_buffers": lambda m, x: dict(m.named_buffers()),
    "named_children": lambda m, x: [(name, *kinds([child])) for name, child in m.named_children()],
    "named_modules": lambda m, x: [(name, *kinds([child])) for name, child in m.named_modules()],
    "named_parameters": lambda m, x: forms(m.named_parameters()),
    "parameters": lambda m, x: forms(enumerate(m.parameters())),
    "register_backward_hook": hooked("register_backward_hook", call_backward),
    "register_forward_hook": hooked("register_forward_hook", call),
    "register_forward_pre_hook": hooked("register_forward_pre_hook", call),
    "register_full_backward_hook": hooked("register_full_backward_hook", call_backward),
    "register_full_backward_pre_hook": hooked("register_full_backward_pre_hook", call_backward),
    "register_load_state_dict_post_hook": hooked("register_load_state_dict_post_hook", loaded),
    "register_load_state_dict_pre_hook": hooked("register_load_state_dict_pre_hook", loaded),
    "register_state_dict_post_hook": hooked("register_state_dict_post_hook", lambda m, x: m.state_dict()),
    "register_state_dict_pre_hook": hooked("register_state_dict_pre_hook", lambda m, x: m.state_dict()),
    "requires_grad_": needs,
    "set_extra_state": lambda m, x: m.set_extra_state({}),
    "state_dict": lambda m, x: {n: tuple(getattr(v, "place", v).shape) for n, v in m.state_dict().items()},
    "train": modes(lambda m: m.train(False)),
    "xpu": lambda m, x: m.xpu(),
    "zero_grad": without_gradients,
}

# --- harmless -------------------------------------------------------------------------------------------------------

HARMLESS: dict[str, Callable[[Any], Any]] = {
    "cpu": lambda m: m.cpu(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to("cpu", torch.float64),
}

# --- refused --------------------------------------------------------------------------------------------------------

CHANGED = """{} of a partitioned model would change nothing
  why    the program was traced from the original model
  try    change the model before parallelize(); to change values, use pm.load_state_dict(...)"""
CONVERTED = """a partitioned model keeps the dtype and device it was made with
  why    its programs were traced for float64 on cpu, not {} on cpu
  try    convert the model before: parallelize(model.bfloat16().cuda(), ...)"""

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "add_module": (lambda m: m.add_module("new", nn.Linear(2, 2)), CHANGED.format("add_module()")),
    "bfloat16": (lambda m: m.bfloat16(), CONVERTED.format("bfloat16")),
    "compile": (lambda m: m.compile(), """pm.compile() compiles nothing
  why    pm(...) runs the graphs of the stages, not the modules
  try    parallelize(..., compile=True)"""),
    "float": (lambda m: m.float(), CONVERTED.format("float32")),
    "half": (lambda m: m.half(), CONVERTED.format("float16")),
    "register_buffer": (lambda m: m.register_buffer("new", torch.ones(1)), CHANGED.format("register_buffer()")),
    "register_module": (lambda m: m.register_module("new", nn.Linear(2, 2)), CHANGED.format("add_module()")),
    "register_parameter": (lambda m: m.register_parameter("new", None), CHANGED.format("register_parameter()")),
    "set_submodule": (lambda m: m.set_submodule("norm", nn.Identity()), CHANGED.format("set_submodule()")),
    "share_memory": (lambda m: m.share_memory(), """a partitioned model has no share_memory()
  why    the program uses the memory of the parameters
  try    share the memory of pm.full_state_dict()"""),
    "to_empty": (lambda m: m.to_empty(device="cpu"), """to_empty() of a partitioned model would lose its values
  why    its programs use these tensors
  try    build the model on meta and call parallelize(model, mesh, weights=...)"""),
    "type": (lambda m: m.type(torch.float64), CONVERTED.replace("float64", "int64").format("float64")),
}  # fmt: skip

HOOK = """a hook on a layer of a partitioned model would never run
  why    its operators are a part of the program
  try    register it on the model before parallelize(), which traces it"""
OF_A_LAYER = {
    "forward": """a layer of a partitioned model cannot be called alone
  why    its operators are a part of the program that pm(...) runs
  try    call the layer of the unpartitioned model, or let forward() return what the layer computes""",
    **{name: HOOK for name in RIGHT if name.endswith("_hook") and ("forward" in name or "backward" in name)},
}
"""Refused on a layer."""
BACKWARD = """backward() does not go through a pipeline
  why    pm(...) runs the stages forward only
  try    loss = pm.step(**batch); with outputs=True it returns both"""
ON_A_PIPELINE = {name: BACKWARD for name in RIGHT if "backward" in name}
"""Refused on a pipeline, where `forward` has no gradient."""
ELSEWHERE = """'{}' is not on this rank
  why    each rank holds the parameters of its stages
  try    pm.full_state_dict() has the parameters of all stages, on every rank"""


def result_of(outcome: Outcome, module: Any, x: Tensor) -> Any:
    """Return the result of a call, or its error: of torch, the class and text."""
    torch.manual_seed(0)
    try:
        return outcome(module, x)
    except AutopartError as error:
        return str(error)
    except Exception as error:
        return type(error), str(error)


def close(ours: Any, theirs: Any, on_a_pipeline: bool) -> bool:
    if on_a_pipeline and isinstance(theirs, dict):  # of the parameters, those of this rank's stages
        return bool(ours.keys() <= theirs.keys() and all(close(ours[key], theirs[key], True) for key in ours))
    if isinstance(theirs, Tensor):
        return bool(torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10))
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], theirs[key], False) for key in theirs)
    if isinstance(theirs, list | tuple) and not isinstance(theirs, torch.Size):
        return len(ours) == len(theirs) and all(close(a, b, on_a_pipeline) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def table(mesh: str) -> tuple[dict[str, str], list[str]]:
    """Return {method, of the model or a layer: verdict}, and the names of the parameters that this rank has."""
    torch.manual_seed(0)
    plain, x = Model().double(), torch.randn(ROWS, SIZE).double()
    pm = autopart.parallelize(copy.deepcopy(plain), mesh, example_args=(x,), rng="exact", **MESHES[mesh])
    verdicts = {}
    for layer in (False, True):
        ours, theirs = (pm.block, plain.block) if layer else (pm, plain)
        of = "layer" if layer else "model"
        for name, outcome in RIGHT.items():
            got, expected = result_of(outcome, ours, x), result_of(outcome, theirs, x)
            refused = OF_A_LAYER.get(name) if layer else ON_A_PIPELINE.get(name) if mesh == "pp2" else None
            if name == "get_parameter" and isinstance(got, str):
                refused = ELSEWHERE.format("block.linear.weight" if layer else "linear.weight")
            if name == "parameters" and mesh == "pp2":  # in order, those that this rank has
                named = dict(theirs.named_parameters())
                expected = forms(enumerate(named[key] for key, _ in ours.named_parameters()))
            if refused is not None:
                assert got == refused, (mesh, of, name, got)
            else:
                assert close(got, expected, mesh == "pp2"), (mesh, of, name, got, expected)
            verdicts[f"{name} of a {of}"] = "right" if refused is None else "refused"
        for name, use in HARMLESS.items():
            assert use(ours) is ours, (mesh, of, name)
            verdicts[f"{name} of a {of}"] = "harmless"
        for name, (use, text) in REFUSED.items():
            with pytest.raises(AutopartError) as error:
                use(ours)
            assert str(error.value) == text, (mesh, of, name, str(error.value))
            verdicts[f"{name} of a {of}"] = "refused"
    check_unchanged(plain, pm, x)
    return verdicts, [name for name, _ in pm.named_parameters()]


def check_unchanged(plain: Any, pm: Any, x: Tensor) -> None:
    """A step after all of these calls is that of the model."""
    torch.manual_seed(1)
    expected = F.mse_loss(plain(x), x)
    expected.backward()
    torch.manual_seed(1)
    got = pm.step(x, loss_fn=F.mse_loss, target=x)
    assert abs(float(got - expected.detach())) < 1e-10
    grads, state = pm.full_grads(), pm.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-10, msg=name)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_no_method_is_unlisted():
    functions = {name: getattr(nn.Module, name) for name in dir(nn.Module) if not name.startswith("_")}
    # Libraries that other tests import add methods of their own to the class.
    methods = [name for name, f in functions.items() if inspect.isfunction(f) and f.__module__.startswith("torch.")]
    assert sorted([*RIGHT, *HARMLESS, *REFUSED]) == sorted(methods) and len(methods) > 45


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
def test_methods_of_modules(mesh):
    (verdicts, first), (others, second) = dist.run_ranks(table, 2, mesh, timeout_s=TIMEOUT_S)
    num_methods = len(RIGHT) + len(HARMLESS) + len(REFUSED)
    assert len(verdicts) == 2 * num_methods
    if mesh == "pp2":  # a parameter is on one of the two
        named = [name for name, _ in Model().named_parameters()]
        assert sorted([*first, *second]) == sorted(named)
        for each in (verdicts, others):
            for key in ("get_parameter of a model", "get_parameter of a layer"):
                each.pop(key)
    assert verdicts == others

"""Side effects of a model's forward on Python state: attributes, and random numbers.

A trace runs the forward's Python once, but the program made from the trace never runs it. So an effect on which a later
call depends is rejected.
"""

from __future__ import annotations

import random
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor, fx, nn

from autopart.compat.symbolic_shape_internals import expression
from autopart.compat.torch_internals import tree_map
from autopart.errors import Refusal, TraceError
from autopart.ir.graph import operator_name
from autopart.tracing.python.concrete_constants import ConcreteConstants, tensors_in
from autopart.tracing.python.hidden_tensors import HiddenTensors
from autopart.tracing.python.layer_settings import is_plain
from autopart.tracing.python.python_random import Entropy, OwnGenerators
from autopart.tracing.python.size_conditions import plain_sizes
from autopart.tracing.with_loss import users_modules

_TORCH_OWN = {"_parameters", "_buffers", "_non_persistent_buffers_set"}
_OF_PARAMETERS = {"_flat_weights", "_flat_weight_refs"}
"""Attributes in which nn.RNNBase lists its own parameters again.

Tracing replaces these parameters, which is not an effect of the forward.
"""
_CONTAINERS = (list, dict, set, OrderedDict, np.ndarray)
"""Types of attributes that a forward may change in place. Hooks of a module are in an OrderedDict."""
_CASTS = "aten::to", "aten::_to_copy", "aten::type_as"
_LIKE = {f"aten::{name}_like" for name in ("zeros", "ones", "full", "empty")} | {
    f"aten::new_{name}" for name in ("zeros", "ones", "full", "empty")
}
"""Operators that read only the metadata of their first argument."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_SMALLEST, _LARGEST = 0x801102, 0x12DD9BB3
"""Words that fill the state of a random generator, so that it draws extreme numbers.

If the state of a Mersenne Twister is filled with one of them, its next 312 draws from [0, 1) are all 6e-8, or all 1 -
1e-16. So every `random() < p` in a forward has one outcome with the first word, and the other with the second.
"""


class PythonState:
    """Recorder of the attributes that a forward writes, and of random numbers drawn from Python or numpy.

    At the end, the writes are undone, and tensors that the code stored outside of module attributes are removed.
    """

    def __init__(self, model: nn.Module):
        self.modules, self._model = dict(users_modules(model)), model
        self._own = OwnGenerators(model)
        self._drew: set[int] = set()
        self.start: dict[str, Any] = {}
        """{attribute: value that it is set to before the forward}"""
        self.changed: dict[str, tuple[Any, Any]] = {}
        """{attribute: (value before the forward, value after it)}"""
        self.caches = HiddenTensors(model)
        self.word: int | None = None
        """Value with which the states of Python's and numpy's generators are filled; None leaves the states."""
        self.drawn = ""
        """Name of the generator that was drawn from last."""
        self.new_parameters: list[str] = []
        """Names of the parameters that the forward created."""

    def __enter__(self) -> PythonState:
        self.changed.clear()
        self.caches.__enter__()
        self._before = {name: _copied(vars(module)) for name, module in self.modules.items()}
        self._parameters = {name: frozenset(module._parameters) for name, module in self.modules.items()}
        self._random = random.getstate(), np.random.get_state(legacy=False)
        self._own_before = self._own.states()
        if self.word is not None:
            self._own.reseed(self._drew, self.word)
            random.setstate((3, (self.word,) * 624 + (0,), None))
            np.random.set_state(("MT19937", np.full(624, self.word, np.uint32), 0, 0, 0.0))
        self._started = self._own.states(), random_state()
        self._entropy = Entropy().__enter__()
        for name, value in self.start.items():
            path, _, last = name.rpartition(".")
            attributes = vars(self.modules[path])
            if type(value) in _CONTAINERS and type(attributes.get(last)) is type(value):
                _refill(attributes[last], value)  # a closure may refer to this container
            else:
                attributes[last] = value
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.new_parameters = []
        for name, module in self.modules.items():
            self._restore(name, module, self._before[name])
            new = [key for key in module._parameters if key not in self._parameters[name]]
            self.new_parameters += [
                f"{name}.{key}".lstrip(".") for key in new if module._parameters.pop(key) is not None
            ]
        self.caches.__exit__()
        self._entropy.__exit__()
        now = self._own.states(), random_state()
        self._drew |= {place for place, before in self._started[0].items() if now[0][place] != before}
        drawn = ["the operating system's random numbers"] * self._entropy.is_read
        drawn += [self._own.name_of(place, self._model) for place in sorted(self._drew)]
        drawn += [name for name, before in self._started[1].items() if now[1][name] != before]
        self.drawn = drawn[-1] if drawn else ""
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        self._own.restore(self._own_before)

    def _restore(self, name: str, module: nn.Module, before: Mapping[str, tuple[Any, Any]]) -> None:
        attributes = vars(module)
        attributes |= {key: before[key][0] for key in _OF_PARAMETERS & before.keys()}
        for key in [k for k in attributes if k not in before and k not in _TORCH_OWN]:
            new = plain_sizes(_bound_to(module, attributes.pop(key)))
            is_method = isinstance(new, types.MethodType) and new == getattr(module, key, None)
            if not is_method:  # the class's own method: the code replaced `forward` and restored it
                self.changed[f"{name}.{key}".lstrip(".")] = (None, new)
        for key, (value, content) in before.items():
            now = _bound_to(module, attributes.get(key))
            if now is value and content is not None and not _same(now, content):
                self.changed[f"{name}.{key}".lstrip(".")] = (content, plain_sizes(_copy(now)))
                _refill(now, content)
            elif now is not value:
                if not _same(now, value):
                    self.changed[f"{name}.{key}".lstrip(".")] = (value, plain_sizes(now))
                attributes[key] = value

    def pop_symbolic(self, known: ConcreteConstants) -> dict[str, Any]:
        """Remove attributes from `changed` that depend only on number inputs. Return {attribute: formula}."""
        symbolic = {
            name: known.formula(expression(after)) for name, (before, after) in self.changed.items()
            if isinstance(after, (*_SYMBOLIC, torch.SymBool)) and (isinstance(before, _SYMBOLIC) or is_plain(before))
        }  # fmt: skip
        found = {name: recorded for name, recorded in symbolic.items() if recorded is not None}
        for name in found:
            del self.changed[name]
        return found

    @property
    def numbers(self) -> dict[str, Any]:
        """Attributes that the forward set to a value without tensors. The next forward can branch on them."""
        return {name: after for name, (_, after) in self.changed.items() if not _holds_tensors(after)}


@contextmanager
def same_containers(model: nn.Module) -> Iterator[None]:
    """Restore lists and dicts that are module attributes, at the end of a `with` block.

    torch.export replaces them by copies.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, before in attributes:
            for name, value in before.items():
                if isinstance(value, (*_CONTAINERS, tuple)) and name not in _TORCH_OWN and name in now:
                    now[name] = value


def _bound_to(module: nn.Module, value: Any) -> Any:
    """Return a method that is bound to torch.export's copy of a module as a method of the module itself.

    Other values are returned unchanged.
    """
    if isinstance(value, types.MethodType) and getattr(value.__self__, "__dict__", None) is vars(module):
        return types.MethodType(value.__func__, module)
    return value


def random_state() -> dict[str, Any]:
    """Return the states of Python's and numpy's global random generators, by module name."""
    _, words, *rest = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (np.asarray(words).tobytes(), *rest)}


def _copied(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (value, copy)} of all attributes of an object.

    `copy` is a shallow copy of a list, dict, set or numpy array, and None for other values.
    """
    return {
        name: (value, _copy(value) if type(value) in _CONTAINERS else None)
        for name, value in attributes.items() if name not in _TORCH_OWN
    }  # fmt: skip


def _copy(container: Any) -> Any:
    return container.copy() if isinstance(container, np.ndarray) else type(container)(container)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = content
        return
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or _holds_tensors(one) or _holds_tensors(other):
        if isinstance(one, (list, dict)) and type(one) is type(other) and len(one) == len(other):
            pairs = zip(one, other, strict=True) if isinstance(one, list) else ((one[k], other.get(k)) for k in one)
            return all(a is b for a, b in pairs)
        return False
    try:
        return one.tobytes() == other.tobytes() if isinstance(one, np.ndarray) else bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _holds_tensors(value: Any) -> bool:
    return any(True for _ in tensors_in(value))


def check_draws(model: nn.Module, state: PythonState, program: Any, again: Callable[[], Any]) -> None:
    """Raise TraceError if the result of a forward depends on random numbers of Python or numpy.

    A program would repeat the numbers of the trace in every step. The call is traced (by `again`) with the smallest
    possible numbers and with the largest. If these graphs differ from the first, the forward depends on the numbers.
    """
    drawn = state.drawn
    if not drawn:
        return
    text = _text(program)
    for word in (_SMALLEST, _LARGEST):
        state.word = word
        same = _text(again()) == text
        state.word = None
        if not same:
            raise TraceError(
                f"{type(model).__name__} draws random numbers from {drawn} in its forward",
                refusal=Refusal.RANDOM,
                why="forward() runs once, for the trace: every step would use the numbers drawn there",
                hint="autopart.host_function around the function that draws them and returns tensors; or torch.rand",
            )


def _text(program: Any) -> str:
    """Return the graph and the constants of a trace, as text."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    nodes = [node for node in program.graph.find_nodes(op="placeholder") if node.name in constants]
    casts = {node: _cast_of(node) for node in nodes}
    codes, connected = [], set[fx.Node]()
    for module in modules:
        kept = _connected(module.graph, casts)
        codes.append(_text_of(kept, casts))
        connected.update(kept)
    for node, cast in casts.items():
        value = program.constants[constants[node.name]]
        if node in connected and _has_values(value):
            value = value if cast is None else value.to(cast.meta["val"].dtype)
            codes.append(f"{value.dtype} {value.tolist()!r}")
    return "\n".join(codes)


def _cast_of(constant: fx.Node) -> fx.Node | None:
    """Return the cast of a constant, if the constant has no other use; else None."""
    readers = list(constant.users)
    return readers[0] if len(readers) == 1 and operator_name(readers[0]) in _CASTS else None


def _connected(graph: fx.Graph, constants: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a graph that are connected to an input, a weight or an output.

    Other nodes are, for example, initial values of a module that the forward creates. So that equal graphs give equal
    lists, a node that reads only a shape comes directly before its first use, wherever it is in the graph.
    """
    neighbours = nx.Graph((node, read) for node in graph.nodes for read in _value_inputs(node))
    ends = [node for node in graph.nodes if node.op != "call_function" and node not in constants]
    kept = set(ends).union(*(nx.node_connected_component(neighbours, node) for node in ends if node in neighbours))
    ordered = dict[fx.Node, None]()
    for node in graph.nodes:
        if node in kept and _value_inputs(node) == node.all_input_nodes:
            ordered |= {one: None for one in (*node.all_input_nodes, node) if one in kept}
    return list(ordered)


def _text_of(nodes: Sequence[fx.Node], constants: Mapping[fx.Node, fx.Node | None]) -> str:
    """Return the text of the nodes of a graph. Constants appear without their names.

    Args:
        constants: {constant: cast of it that is left out of the text, or None}.
    """
    text, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    casts = {cast: constant for constant, cast in constants.items() if cast is not None}
    for node in nodes:
        if node in casts:
            copies[node] = copies[casts[node]]
        elif node in constants:
            copies[node] = text.placeholder("constant")
        else:
            args = node.args
            if _shape_read(node) is not None:
                args = (str((_shape_read(node), args[0].meta["val"].dtype)), *args[1:])
            args, kwargs = fx.map_arg((args, node.kwargs), copies.__getitem__)
            copies[node] = text.create_node(node.op, node.target, args, kwargs)
    return str(text)


def _shape_read(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of the first argument of `zeros_like` and similar operators, else None."""
    if node.op != "call_function" or operator_name(node) not in _LIKE or not isinstance(node.args[0], fx.Node):
        return None
    shape = tuple(node.args[0].meta["val"].shape)
    return shape if all(isinstance(size, int) for size in shape) else None


def _value_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the input nodes of which a node reads more than the shape and dtype."""
    if _shape_read(node) is None:
        return node.all_input_nodes
    return [read for read in node.all_input_nodes if read is not node.args[0]]


def _read_constants(program: Any) -> list[Any]:
    """Return the constants of a trace of which an operator reads more than the shape and dtype."""
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    unread = {
        lifted[node.name] for node in program.graph.find_nodes(op="placeholder")
        if node.name in lifted and not any(node in _value_inputs(user) for user in node.users)
    }  # fmt: skip
    return [constant for name, constant in program.constants.items() if name not in unread]


def _metadata(value: Any) -> Any:
    """Replace each tensor in a value by its shape and dtype, and everything else by None."""
    return tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None, value)


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and (tensor.layout != torch.strided or tensor.untyped_storage().nbytes() > 0)


def _only_cast(state: PythonState, program: Any, again: Callable[[], Any]) -> list[str]:
    """Return the changed tensor attributes for which the only change is a cast to another dtype.

    A second trace checks this. It starts with the cast values, and must be equal to the first trace except for the
    cast.
    """
    cast = {
        name: before.to(after.dtype) for name, (before, after) in state.changed.items()
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape
        and before.dtype != after.dtype
    }  # fmt: skip
    if not cast:
        return []
    changed, state.start = state.changed.copy(), cast
    are_the_same = _text(again()) == _text(program)
    state.changed, state.start = changed, {}
    return list(cast) if are_the_same else []


def _is_same(program: Any, again: Callable[[], Any], computed: Callable[[Any], Any], may_fail: bool) -> bool:
    try:
        return bool(computed(again()) == computed(program))
    except Exception:  # forward cannot be traced with the values that it stored
        if not may_fail:
            raise
        return False


def _zeros(leaf: Any) -> Any:
    """Replace a traced tensor, which has no values, by zeros."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def check_attributes(
    model: nn.Module, state: PythonState, program: Any, known: ConcreteConstants, again: Callable[[], Any],
    computed: Callable[[Any], Any] | None = None,
) -> tuple[tuple[str, ...], Mapping[str, Any]]:  # fmt: skip
    """Raise TraceError if a forward reads a tensor attribute that it changes for its next call.

    A forward reads a tensor if the tensor's first value is a constant of the trace, or if Python used its values.

    If the forward stores numbers, or tensors in attributes that had no tensor of this shape, `again` traces the call a
    second time. Before it, the attributes are set to these numbers, and to zeros for tensors. The second graph must
    equal the first. It may differ if all changed attributes are numbers, flags or strings of modules.

    Returns notes for the user, and {attribute: new value} of these numbers, flags and strings.

    Args:
        computed: returns the part of a graph that must be equal; by default the entire graph.
    """
    name, changed, numbers = type(model).__name__, dict(state.changed), state.numbers
    for attribute in _only_cast(state, program, again):
        del changed[attribute]
    before = [(attribute, value) for attribute, (value, _) in changed.items()]
    constants = [*_read_constants(program), *known.read]
    for attribute, value in [*before, *state.caches.replaced]:
        if any(constant is tensor for tensor in tensors_in(value) for constant in constants):
            raise TraceError(
                f"{name} keeps a tensor from one call to the next in '{attribute}'",
                refusal=Refusal.STATE,
                why="every call of the program would use the value from the trace",
                hint=f"register_buffer('{attribute.rpartition('.')[2]}', ...)",
            )
    first_tensors = {
        attribute: tree_map(_zeros, after) for attribute, (before, after) in changed.items()
        if _metadata(before) != _metadata(after) and any(not known.is_fixed(tensor) for tensor in tensors_in(after))
    }  # fmt: skip
    left = [one for one in state.caches.left if any(not known.is_fixed(tensor) for tensor in tensors_in(one.value))]
    are_plain = _are_plain(numbers, model)
    notes = []
    if numbers or first_tensors or left:
        state.start = {**numbers, **first_tensors}
        state.caches.start = [one._replace(value=tree_map(_zeros, one.value)) for one in left]
        is_same = _is_same(program, again, computed or _text, may_fail=bool(first_tensors or left) or not are_plain)
        if not is_same and not (are_plain and not first_tensors and not left):
            shown = [f"a tensor in {place}" for place in dict.fromkeys([*first_tensors, *(one.name for one in left)])]
            shown += [f"{attribute} = {value!r:.40}" for attribute, value in numbers.items()]
            raise TraceError(
                f"{name} computes something different in every call", refusal=Refusal.STATE,
                why=f"forward() stores {', '.join(shown[:3])}, and the next call reads it",
                hint="keep it as a tensor in a buffer (register_buffer), changed by tensor operations",
            )  # fmt: skip
        if not is_same:
            notes.append(f"{SETS} {', '.join(numbers)}, which the next call reads: each value is traced")
    updates = numbers if are_plain else {}
    others = [attribute for attribute in changed if attribute not in updates]
    if others:
        written = ", ".join(others[:5]) + ", ..." * (len(others) > 5)
        notes.append(f"forward() also sets {written}: this happens only while the model is traced")
    return tuple(notes), updates


SETS = "forward() changes"
"""First words of a note: this call changes numbers of the model on which the next call depends."""


def _are_plain(numbers: Mapping[str, Any], model: nn.Module) -> bool:
    """Return True if all changed attributes are numbers, flags or strings of modules of the model."""
    paths = {path for path, _ in model.named_modules()}
    return all(is_plain(value) and name.rpartition(".")[0] in paths for name, value in numbers.items())

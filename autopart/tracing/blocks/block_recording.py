"""Recording of one call of a repeated block (layer) during a trace, to compare later calls with it.

A block that is compared runs its own Python, on tensors with the recorded metadata (stand-in tensors). Some side
effects are not visible in the inputs and outputs of a block: writes to inputs, changed attributes, Python's random
numbers (`State`), and tensors stored outside of the block (`leaked`). A block with such a side effect is neither
recorded nor compared.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, fx, nn

from autopart.compat.torch_internals import GRAD_MODE, Tracing, is_operator, tree_flatten
from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_WRITE_UNSAID = ("aten::batch_norm", "aten::instance_norm")
TEMPLATE: Final = "repeated_template"
"""Key in `node.meta`. The value is (number of the recorded block, number of the node in this block)."""

Ref = tuple[bool, int]
"""Reference to a value of a block.

It is (True, index of the node that computes it), or (False, index among the block's inputs).
"""


class Differs(Exception):
    """Exception: a block differs from the recorded block, or cannot be recorded or compared."""


@dataclass(frozen=True)
class _RecordedStep:
    """One operator call of a recorded block.

    Args:
        key: comparison key of the call.
        made: the results of the call, each given by its index among the block's tensors.
        is_factory: True if the call reads no tensor.
    """

    key: tuple
    made: Any
    is_factory: bool


@dataclass
class Template:
    """A recorded block (layer), with which later blocks are compared.

    The tensors of a block are numbered: first the tensors that are passed to it, then the results of its operators. A
    `Ref` identifies a tensor by (True, index of the node that computes it) or (False, index of the input).

    Args:
        reads: the tensors that each operator call reads, as `Ref`s.
        leaves: for each result of the block, a key with which results of later blocks are compared.
        parts: the tensors that code after the block can use, results first; each as its number and its `Ref`.
    """

    number: int
    key: tuple
    path: str
    steps: list[_RecordedStep]
    targets: list[Any]
    reads: list[list[Ref]]
    leaves: list[Any]
    spec: Any
    parts: list[tuple[int, Ref]]
    stand_ins: list[Tensor]
    num_given: int
    num_refs: list[int] = field(default_factory=list)

    @property
    def used(self) -> list[int]:
        """Indices of the block's inputs that its operators read, or that code after the block can use."""
        refs = [*(ref for refs in self.reads for ref in refs), *(ref for _, ref in self.parts)]
        return sorted({place for is_own, place in refs if not is_own})

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """{id of a stand-in tensor: number of the block's result that it replaces in Python code}."""
        return {id(tensor): self.num_given + i for i, tensor in enumerate(self.stand_ins)}

    def leaked(self) -> bool:
        """Return True if a stand-in tensor has new references: Python has stored it outside of the block."""
        return [sys.getrefcount(tensor) for tensor in self.stand_ins] != self.num_refs


class RecordedCall:
    """One call of a block (layer) during a trace, which is recorded or compared with a recorded call.

    Args:
        given: the block's tensors (arguments, parameters, buffers), without duplicates.
        key: comparison key of the call's arguments, parameters and global modes. Only calls with equal keys are
            compared further.
    """

    def __init__(self, block: Sequence[nn.Module], arguments: Any, tracing: Tracing, around: tuple):
        self.block, self.arguments, self.tracing = block, arguments, tracing
        self.leaves, spec = tree_flatten(arguments)
        block_tensors = [(name, t) for m in block for held in (m._parameters, m._buffers) for name, t in held.items()]
        self.given: list[Tensor] = []
        self.places: dict[int, int] = {}
        described = [self._described(leaf) for leaf in [*self.leaves, *(tensor for _, tensor in block_tensors)]]
        names = tuple(name for name, _ in block_tensors)
        self.key = (str(spec), names, tuple(described), around, _ambient(self.given))
        self.path = tracing.modules[-1][0] if tracing.modules else ""

    def _described(self, leaf: Any) -> tuple:
        if not isinstance(leaf, Tensor):
            return _spelt(leaf, None)
        if id(leaf) in self.places:
            return ("again", self.places[id(leaf)])
        self.places[id(leaf)] = len(self.given)
        self.given.append(leaf)
        if leaf.layout is not torch.strided:
            raise Differs
        return (type(leaf), *_metadata(leaf), leaf.is_leaf, self.tracing.node_of(leaf) is not None)

    def is_intact(self) -> bool:
        """Return True if the arguments of the block's call are still the same objects after it.

        A block can replace an entry of a list or dict that it is given.
        """
        leaves = tree_flatten(self.arguments)[0]
        return len(leaves) == len(self.leaves) and all(a is b for a, b in zip(leaves, self.leaves, strict=True))


class _Comparing:
    """Base class of `Recording` and `Replay`: converts operator calls of a block to comparison keys."""

    def __init__(self, call: RecordedCall, stop: Any):
        self.call, self.stop, self.failed = call, stop, False
        self.tracing = call.tracing
        self.depth = len(self.tracing.modules)
        self.last = self.tracing.last
        self._places = dict(call.places)
        self._made: dict[int, weakref.ref] = {}

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor that is the block's input or result; None for any other tensor."""
        reference = self._made.get(id(tensor))
        return None if reference is not None and reference() is not tensor else self._places.get(id(tensor))

    def note(self, tensor: Tensor, place: int) -> Tensor:
        """Record the number of a result, by the id of the result.

        Stores only a weak reference, because torch copies tensors that have other references.
        """
        self._places[id(tensor)], self._made[id(tensor)] = place, weakref.ref(tensor)
        return tensor

    def spelt(self, function: Any, args: Any, kwargs: Any, frame: Any) -> tuple:
        arguments = _spelt(args, self.place_of), _spelt(kwargs, self.place_of)
        modules = tuple(
            (relative_path(path, self.call.path), kind) for path, kind in self.tracing.modules[self.depth :]
        )
        return function, arguments, modules, torch.is_grad_enabled(), frames_to(frame, self.stop)


class Recording(_Comparing):
    """Recorder of a block's operator calls, while the block is traced."""

    def __init__(self, call: RecordedCall, stop: Any):
        super().__init__(call, stop)
        self.steps: list[_RecordedStep] = []
        self.stand_ins: list[Tensor] = []
        self.nodes_given = [self.tracing.node_of(tensor) for tensor in call.given]

    def meet(self, run: Callable[[], Any], function: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        if self.failed:
            return run()
        try:
            key = self.spelt(function, args, kwargs, frame)
            self._check(function, args)
        except Differs:
            self.failed = True
        output = run()
        try:
            if not self.failed:
                is_factory = not any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs))[0])
                self.steps.append(
                    _RecordedStep(key, self._placed(output) if is_operator(function) else None, is_factory)
                )
        except Differs:
            self.failed = True
        return output

    def _check(self, function: Any, args: Any) -> None:
        """Raise Differs for a call with side effects, except writes to tensors that the block created."""
        if not is_operator(function):
            if function is not GRAD_MODE:
                raise Differs
        elif function._schema.name in _WRITE_UNSAID:
            raise Differs
        elif function._schema.is_mutable:
            written = [i for i, a in enumerate(function._schema.arguments) if a.alias_info and a.alias_info.is_write]
            storages = {_storage(tensor) for tensor in self.call.given}
            if written != [0] or not args or not isinstance(args[0], Tensor) or _storage(args[0]) in storages:
                raise Differs

    def _placed(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            place = self.place_of(output)
            if place is not None:
                before = (*self.call.given, *self.stand_ins)[place]
                if _metadata(before) != _metadata(output):
                    raise Differs
                return place
            if output.layout is not torch.strided or not all(type(size) is int for size in output.shape):
                raise Differs
            with self.tracing.apart():
                self.stand_ins.append(_stand_in(output))
            place = len(self.call.given) + len(self.stand_ins) - 1
            self.note(output, place)
            return place
        if type(output) in (tuple, list):
            return type(output)(self._placed(part) for part in output)
        if output is not None:
            raise Differs
        return None

    def template(self, number: int, output: Any) -> Template:
        """Return the recorded block. Raises Differs if the block cannot be repeated."""
        if self.failed or not self.call.is_intact():
            raise Differs
        nodes = self.tracing.nodes_after(self.last)
        read = [node for node in self.nodes_given if node is not None]
        if len(set(read)) != len(read) or any(node.op != "call_function" for node in nodes):
            raise Differs
        refs: dict[fx.Node, Ref] = {node: (False, i) for i, node in enumerate(self.nodes_given) if node is not None}
        refs |= {node: (True, i) for i, node in enumerate(nodes)}
        reads = [[_ref(refs, source) for source in tensor_inputs(node)] for node in nodes]
        leaves, spec = tree_flatten(output)
        inputs = self.call.given
        parts: dict[int, Ref] = {}
        spelt: list[Any] = []
        for leaf in leaves:
            spelt.append(_spelt(leaf, self.place_of))
            if isinstance(leaf, Tensor) and spelt[-1][1] >= len(inputs):
                parts[spelt[-1][1]] = _ref(refs, self.tracing.node_of(leaf))
        for place, tensor in enumerate(inputs):  # a no-op `x.to(...)` returns x itself, but adds a node that computes x
            node = self.tracing.node_of(tensor)
            if node is not self.nodes_given[place]:
                parts[place] = _ref(refs, node)
        for i, node in enumerate(nodes):
            facts(node)[TEMPLATE] = (number, i)
        targets = [node.target for node in nodes]
        template = Template(
            number, self.call.key, self.call.path, self.steps, targets, reads, spelt, spec,
            list(parts.items()), self.stand_ins, len(inputs),
        )  # fmt: skip
        del self.stand_ins
        template.num_refs = [sys.getrefcount(tensor) for tensor in template.stand_ins]
        return template


class Replay(_Comparing):
    """Run of a block on stand-in tensors that compares its operator calls with a recorded block's."""

    def __init__(self, call: RecordedCall, stop: Any, template: Template):
        super().__init__(call, stop)
        self.template, self.next = template, 0
        self._places |= template.places
        self.own: list[weakref.ref] = []

    def meet(self, run: Callable[[], Any], function: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        steps = self.template.steps
        try:
            alike = self.next < len(steps) and self.spelt(function, args, kwargs, frame) == steps[self.next].key
        except Differs:
            alike = False
        self.next += 1
        self.failed |= not alike
        if not is_operator(function):  # also called at the end of a no_grad region, which an error would leave open
            return function(*args, **kwargs) if function is GRAD_MODE else None
        if self.failed:
            raise Differs
        step = steps[self.next - 1]
        return self._given_back(step.made, step.is_factory)

    def _given_back(self, recorded: Any, is_factory: bool) -> Any:
        if recorded is None:
            return None
        if isinstance(recorded, int):
            num_given = self.template.num_given
            result = (
                self.call.given[recorded] if recorded < num_given else self.template.stand_ins[recorded - num_given]
            )
            if not is_factory:
                return result
            with self.tracing.apart():
                result = _stand_in(result)
            self.own.append(weakref.ref(result))
            return self.note(result, recorded)
        return type(recorded)(self._given_back(part, is_factory) for part in recorded)

    def leaked(self) -> bool:
        """Return True if Python stored an intermediate result of the block outside of the block."""
        if not any(ref() is not None for ref in self.own) and not self.template.leaked():
            return False
        gc.collect()
        return any(ref() is not None for ref in self.own) or self.template.leaked()

    def is_alike(self, output: Any) -> bool:
        """Return True if all operator calls and results of the block equal those of the recorded block."""
        leaves, spec = tree_flatten(output)
        try:
            spelt = [_spelt(leaf, self.place_of) for leaf in leaves]
        except Differs:
            return False
        done = not self.failed and self.next == len(self.template.steps)
        return done and spec == self.template.spec and spelt == self.template.leaves

    def finish(self, target: Any, meta: Mapping[str, Any]) -> dict[int, Tensor]:
        """Add one call of `target`, which represents the block, to the graph. Returns {number: result tensor}."""
        nodes = [node for p in self.template.used if (node := self.tracing.node_of(self.call.given[p])) is not None]
        num_given = self.template.num_given
        with self.tracing.apart():
            tensors = {
                place: self.call.given[place] if place < num_given
                else _stand_in(self.template.stand_ins[place - num_given])
                for place, _ in self.template.parts
            }  # fmt: skip
        self.tracing.add(target, nodes, list(tensors.values())).meta.update(meta)
        return tensors


def relative_path(path: str, block: str, to: str = "*") -> str:
    inside = path == block or path.startswith(f"{block}.")
    return to + path[len(block) :] if inside else path


def _ref(refs: Mapping[fx.Node, Ref], node: fx.Node | None) -> Ref:
    if node is None or node not in refs:
        raise Differs
    return refs[node]


def _spelt(value: Any, place_of: Callable[[Tensor], int | None] | None) -> tuple:
    """Return a comparison key of a value: tensors by number in the block, all else by type and value."""
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if kind is float or kind is complex:
        return (kind, value, repr(value))
    if isinstance(value, Tensor):
        place = place_of(value) if place_of is not None else None
        if place is None:
            raise Differs
        return (Tensor, place)
    if kind in (tuple, list, torch.Size):
        return (kind, *[_spelt(part, place_of) for part in value])
    if kind is dict:
        return (kind, *[(name, _spelt(part, place_of)) for name, part in value.items()])
    raise Differs


def frames_to(frame: Any, stop: Any) -> tuple:
    """Return (code, bytecode offset) of the Python frames from `frame` up to the function `stop`."""
    places: list[Any] = []
    while frame is not None and frame.f_code is not stop:
        places += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(places)


def _ambient(tensors: Sequence[Tensor]) -> tuple:
    """Return the global modes that determine how operators run, such as grad mode and autocast."""
    kinds = sorted({"cpu", "cuda", *(tensor.device.type for tensor in tensors)})
    casts = [
        (kind, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        for kind in kinds if torch.amp.is_autocast_available(kind)
    ]  # fmt: skip
    return torch.is_grad_enabled(), torch.get_default_dtype(), tuple(casts)


def _metadata(tensor: Tensor) -> tuple:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a new fake tensor with the metadata of `tensor`, to be passed to Python in its place."""
    size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    alike = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    if offset:
        alike = torch.empty(offset + alike.untyped_storage().nbytes() // alike.element_size(), dtype=tensor.dtype,
                            device=tensor.device).as_strided(size, stride, offset)  # fmt: skip
    if not tensor.requires_grad:
        return alike
    with torch.enable_grad():
        leaf = alike.requires_grad_()
        copied = leaf.clone()
        return copied if _metadata(copied) == _metadata(tensor) else torch.ops.aten.alias.default(leaf)


class State:
    """Snapshot that detects side effects: attributes of a block's modules, and Python's random state."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = modules
        self.before = self._now()

    def _now(self) -> list[Any]:
        drawn = np.random.get_state(legacy=False)["state"].values()
        held: list[Any] = [random.getstate(), [d.tobytes() if isinstance(d, np.ndarray) else d for d in drawn]]
        for module in self.modules:
            for name, value in vars(module).items():
                held += (name, value)
                if isinstance(value, dict):
                    held += (*value.keys(), *value.values())
                elif isinstance(value, (list, set)):
                    held += value
        return held

    def changed(self) -> bool:
        now = self._now()
        (*drawn, held), (*drawn_now, held_now) = ((s[0], s[1], s[2:]) for s in (self.before, now))
        same = len(held) == len(held_now) and all(a is b for a, b in zip(held, held_now, strict=True))
        return drawn != drawn_now or not same

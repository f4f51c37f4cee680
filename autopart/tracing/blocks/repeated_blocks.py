"""Repeated blocks (equal layers) of a model, traced once.

While `torch.export` runs a model's forward, the first call of a block (`RepeatedBlocks`) is traced as usual and
recorded. A later block of the same class and shapes also runs its own Python, but its operator calls are not traced.
Each call is compared with the recorded call (`block_recording.py`): operator, constants, Python line and modules. The
tensors that the call reads are compared by index among the block's inputs, parameters and earlier results.

If all calls are equal, the graph gets one node for the entire block. `RepeatedBlocks.expand` later replaces this node
by copies of the first block's operators. If anything differs, the block is traced as usual. If the difference is
detected too late for that, the entire model is traced again (`NotARepeat`).
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from autopart.common.scoped import attributes
from autopart.compat.torch_internals import Tracing, intercepted, tree_unflatten, without_torch_functions
from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs
from autopart.tracing.blocks.block_recording import (
    TEMPLATE,
    Differs,
    RecordedCall,
    Recording,
    Ref,
    Replay,
    State,
    Template,
    frames_to,
    relative_path,
)
from autopart.tracing.python.concrete_constants import ConcreteConstants

_MOST = 4
"""Maximum number of different recorded calls of one kind of block. Other calls are traced as usual."""
_DEFINED = torch.library.Library("autopart_trace", "FRAGMENT")
_DEFINED.define("repeated_block(Tensor[] inputs) -> Tensor[]")
_BLOCK = torch.ops.autopart_trace.repeated_block.default
_REPEAT: Final = "repeated_block"
"""Metadata key of a node that represents a block: its index in `RepeatedBlocks.repeats`."""
_ROOT = "_export_root."
"""Prefix of module paths in a torch.export trace."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class NotARepeat(Exception):
    """Exception: a block that the graph contains as one node is found to differ from the recorded block."""


@dataclass(frozen=True)
class _Repeat:
    template: Template
    path: str


class RepeatedBlocks:
    """The modules of a model that may be equal blocks, and the blocks that were recorded so far."""

    def __init__(self, model: nn.Module, known: ConcreteConstants):
        self.known = known
        alike = list(_alike(model))
        self.blocks = {id(vars(block)): (kind, list(block.modules())) for block, kind in alike}
        self.classes = {type(block) for block, _ in alike}
        self.templates: list[Template] = []
        self.repeats: list[_Repeat] = []
        self._by_kind: defaultdict[Any, list[Template]] = defaultdict(list)
        self._recorded: Counter[Any] = Counter()
        self._active: Recording | Replay | None = None
        self.lost = self.tried = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace each repeated call of a block as one node, inside a `with` block."""
        watched = {(kind, "forward"): self._watched(kind.forward) for kind in self.classes}
        with attributes(watched), intercepted(self._meet):
            yield

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            block, tracing = self.blocks.get(id(vars(module))), Tracing.current()
            if block is None or tracing is None or self._active is not None:
                return forward(module, *args, **kwargs)

            def run() -> Any:
                return forward(module, *args, **kwargs)

            try:
                with without_torch_functions():
                    called = RecordedCall(block[1], (args, kwargs), tracing, frames_to(sys._getframe(1), None))
            except Differs:
                return run()
            return self._run(block[0], called, run)

        return call

    def _meet(self, run: Callable[[], Any], tracer: Any, function: Any, args: Any, kwargs: Any) -> Any:
        active = self._active
        if active is None or active.tracing.tracer is not tracer:
            return run()
        return active.meet(run, function, args, kwargs, sys._getframe(2))

    def _run(self, kind: Any, call: RecordedCall, run: Callable[[], Any]) -> Any:
        for template in self._by_kind[kind]:
            if template.key == call.key:
                repeated, output = self._replay(template, call, run)
                if repeated:
                    return output
        if self._recorded[kind] == _MOST:
            return run()
        self._recorded[kind] += 1
        state = State(call.block)
        self._active = recording = Recording(call, run.__code__)
        try:
            output = run()
        finally:
            self._active = None
        try:
            if not state.changed():
                self.templates.append(recording.template(len(self.templates), output))
                self._by_kind[kind].append(self.templates[-1])
        except Differs:
            pass
        return output

    def _replay(self, template: Template, call: RecordedCall, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Compare a call with a recorded block. Return True and the results if the call repeats the block.

        Returns (False, None) if the call differs. Raises NotARepeat if the call had side effects.
        """
        self.tried = True
        state, counts = State(call.block), call.tracing.counts()
        self._active = replay = Replay(call, run.__code__, template)
        alike, output = False, None
        try:
            output = run()
            alike = replay.is_alike(output)
        except Exception:  # a block's own code may raise anything for stand-in tensors
            replay.failed = True
        finally:
            self._active = None
        del output
        self.known.drop(template.stand_ins)
        if state.changed() or not call.is_intact() or call.tracing.last is not replay.last or replay.leaked():
            self.lost = True
            raise NotARepeat
        if not alike:
            call.tracing.restore(counts)
            return False, None
        self.repeats.append(_Repeat(template, call.path))
        tensors = replay.finish(_BLOCK, {_REPEAT: len(self.repeats) - 1})
        leaves = [
            tensors.get(leaf[1], call.given[leaf[1]] if leaf[1] < template.num_given else None)
            if leaf[0] is Tensor else leaf[1]
            for leaf in template.leaves
        ]  # fmt: skip
        return True, tree_unflatten(leaves, template.spec)

    def expand(self, graph: fx.Graph) -> None:
        """Replace each node that represents a block by the block's operators.

        Raises NotARepeat if operators of the recorded block were removed from the graph.
        """
        if self.lost:
            raise NotARepeat
        tagged: dict[tuple[int, int], fx.Node] = {}
        for node in graph.nodes:
            place = facts(node).pop(TEMPLATE, None)
            if place is not None and place in tagged:
                raise NotARepeat
            if place is not None:
                tagged[place] = node
                facts(node)["custom"] = {**(facts(node).get("custom") or {}), "copied": (place[0], 0, place[1])}
        copies: Counter[int] = Counter()
        for node in list(graph.nodes):
            if node.target is _BLOCK:
                repeat = self.repeats[facts(node)[_REPEAT]]
                copies[repeat.template.number] += 1
                self._expand(graph, node, repeat, tagged, copies[repeat.template.number])

    def _expand(
        self, graph: fx.Graph, node: fx.Node, repeat: _Repeat, tagged: Mapping[tuple[int, int], fx.Node], copy: int
    ) -> None:
        template = repeat.template
        inputs = dict(zip(template.used, node.args[0], strict=True))
        copies: dict[int, fx.Node] = {}
        paths = template.path.removeprefix(_ROOT), repeat.path.removeprefix(_ROOT)

        def of(ref: Ref) -> fx.Node:
            if ref[0] and ref[1] not in copies:
                raise NotARepeat
            return copies[ref[1]] if ref[0] else inputs[ref[1]]

        with graph.inserting_before(node):
            for i, (target, reads) in enumerate(zip(template.targets, template.reads, strict=True)):
                first = tagged.get((template.number, i))
                if first is None:
                    continue
                if first.target is not target or len(tensor_inputs(first)) != len(reads):
                    raise NotARepeat
                for source, (is_own, number) in zip(tensor_inputs(first), reads, strict=True):
                    if is_own and tagged.get((template.number, number)) is not source:
                        raise NotARepeat
                refs = iter(reads)
                args, kwargs = fx.map_arg((first.args, first.kwargs), lambda _, refs=refs: of(next(refs)))
                copies[i] = graph.create_node("call_function", target, args, kwargs, base_name(first))
                copies[i].meta = {**first.meta, "nn_module_stack": _moved(facts(first)["nn_module_stack"], *paths),
                                "custom": {**facts(first)["custom"], "copied": (template.number, copy, i)}}  # fmt: skip
        for part in list(node.users):
            part.replace_all_uses_with(of(template.parts[part.args[1]][1]))
            graph.erase_node(part)
        graph.erase_node(node)


def base_name(node: fx.Node) -> str:
    """Return a node's name without its numeric suffix."""
    stem, _, number = node.name.rpartition("_")
    return stem if stem and number.isdigit() else node.name


def _moved(stack: Mapping[str, tuple[str, str]], old: str, new: str) -> dict[str, tuple[str, str]]:
    """Return a node's module stack, with the path of one block replaced by the path of another block."""
    return {
        key.replace(old, new) if relative_path(path, old) != path else key: (relative_path(path, old, new), kind)
        for key, (path, kind) in stack.items()
    }


def _alike(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield (module, kind) for modules that have children and a sibling of equal kind, such as layers.

    The kind consists of the classes of a module and its submodules, and the metadata of its tensors. Modules inside a
    yielded module are not searched.
    """
    kinds = {child: _kind(child) for child in model.children() if any(True for _ in child.children())}
    counts = Counter(kinds.values())
    for child, kind in kinds.items():
        if counts[kind] > 1 and any(True for _ in child.parameters()) and type(child) not in _CONTAINERS:
            yield child, kind
        else:
            yield from _alike(child)


def _kind(block: nn.Module) -> tuple:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    return shapes, tuple((name, type(module)) for name, module in block.named_modules())

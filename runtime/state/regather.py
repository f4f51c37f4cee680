"""Weights that are gathered over `dp`, or cast, where they are read are not kept for the backward: it reads them again.

Autograd saves the gathered weight for the gradient of the other operand, so that at the end of a forward a rank would
hold all weights whole. Here it saves the rank's part in its place (Rajbhandari et al. 2020, arXiv:1910.02054, section
7.2.2: a weight is broadcast once in the forward and once in the backward). So it is with a weight that is cast to what
is computed in: a copy would be held for each microbatch on its way through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopart.errors import StageError
from autopart.ir.facts import facts
from autopart.ir.operators import axis_of, operator_name, stored_source

GATHERS = ("all_gather", "all_gather_sum")


def note_gathers(module: fx.GraphModule, group_name: str | None, casts: bool = True) -> Gathered | None:
    """Lets a stage's bound graph note the weights that it gathers over this group; None where there are none.

    `casts`: also those that it casts.
    """
    gathered = Gathered()
    names = (*GATHERS, *(("cast",) if casts else ()))
    nodes = [n for n in module.graph.nodes if operator_name(n) in names and axis_of(n) in (None, group_name)]
    # What a region that is run again gathers is not kept anyway.
    nodes = [node for node in nodes if stored_source(node) is not None and "region" not in facts(node)]
    for node in nodes:
        part, *arguments = node.args
        name, source = f"gathered_{node.name}", stored_source(node)
        assert source is not None
        operator = partial(node.target, **node.kwargs)
        module.add_submodule(name, _Gather(str(source.target), operator, tuple(arguments), gathered))
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_module(name, (part,)))
        module.graph.erase_node(node)
    module.recompile()
    return gathered if nodes else None


@dataclass
class Gathered:
    """The weights that a run of a stage has gathered so far, by the memory they are in."""

    weights: dict[StorageWeakRef, _Weight] = field(default_factory=dict)

    @contextmanager
    def saving_parts(self) -> Iterator[None]:
        """Inside, autograd saves parts in the place of gathered weights."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self.weights.clear()

    def _pack(self, saved: Tensor) -> Any:
        weight = self.weights.get(StorageWeakRef(saved.untyped_storage()))
        if weight is None or saved.dtype != weight.dtype or saved.is_conj():
            return saved
        return _View(weight, saved.shape, saved.stride(), saved.storage_offset())


@dataclass(frozen=True)
class _Weight:
    """How to gather a weight from this rank's part, or to cast it; `version`: of the part, when it was read first."""

    name: str
    dtype: torch.dtype
    part: Tensor
    version: int
    gather: Callable[[Tensor], Tensor]

    def again(self) -> Tensor:
        if self.part._version != self.version:
            raise StageError(
                f"'{self.name}' was changed between a forward and its backward",
                why="the backward reads it again, and would find other values",
                hint="optimizer.step() after backward()",
            )  # fmt: skip
        with torch.no_grad():
            return self.gather(self.part)


@dataclass(frozen=True)
class _View:
    """What autograd saves: a view of a gathered weight, without the weight."""

    weight: _Weight
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _View):
        return saved
    return saved.weight.again().as_strided(saved.shape, saved.stride, saved.offset)


class _Gather(nn.Module):
    """Gathers a weight, and notes where it is."""

    def __init__(self, name: str, operator: Callable[..., Tensor], arguments: tuple[Any, ...], gathered: Gathered):
        super().__init__()
        self.name, self.operator, self.arguments, self.gathered = name, operator, arguments, gathered

    def forward(self, part: Tensor) -> Tensor:
        full = self._gather(part)
        if torch.is_grad_enabled():
            weight = _Weight(self.name, full.dtype, part.detach(), part._version, self._gather)
            self.gathered.weights[StorageWeakRef(full.untyped_storage())] = weight
        return full

    def _gather(self, part: Tensor) -> Tensor:
        return self.operator(part, *self.arguments)

"""Detect the structure of a stage's attention masks (causal, sliding window, full) at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.program import Program, Stage, StageInput
from autopart.ops.mask_key_ranges import KeyRangeEvaluator, MaskStructure, key_ranges_of, mask_structure_of
from autopart.ops.masked_attention import mask_window_of
from autopart.ops.stage_masks import (
    LARGEST_MASK,
    at_any_length,
    input_independent_masks,
    mask_graph,
    masks_of,
    scores_of,
    with_mask_structure,
)
from autopart.runtime.batch.batch_split import stage_arguments
from autopart.runtime.comm.process_mesh import Process

MaskStructures = tuple[tuple[str, MaskStructure], ...]
"""[(mask name, structure)] of a stage."""


def specialize_constant_masks(
    stage: Stage, program: Program, process: Process, bind: Callable[[fx.GraphModule], fx.GraphModule]
) -> tuple[Stage, frozenset[str]]:
    """Replace the constant attention masks of a stage by their structure, such as causal.

    A mask is constant if it depends on no model input or buffer. This function detects the structure of each constant
    mask once. Attention kernels then use the structure instead of the mask tensor. If a constant mask has no structure
    that kernels support, attention still uses the mask tensor.

    Args:
        bind: function that prepares a graph of the stage for this rank.

    Returns:
        The rewritten stage, and the names of its constant masks, which need no inspection in later calls of the stage.
    """
    masks, inputs, graph = input_independent_masks(stage)
    names = frozenset(mask.name for mask in masks)
    if not masks:
        return stage, names
    if (
        max(math.prod(scores_of(call)) for calls in map(masks_of(stage).__getitem__, masks) for call in calls)
        > LARGEST_MASK
    ):
        return with_mask_structure(
            stage, _analyze_large_masks(stage, program, process, masks, inputs, graph), process.device
        ), names
    microbatches = stage_arguments(program, inputs, bind(graph)(), process.coordinates, program.runs_of(stage))
    other_masks = {mask.name for mask in masks_of(stage)} - names
    mask_structures = StageMasks(stage, bind, other_masks).mask_structures(microbatches)
    return with_mask_structure(
        stage, dict(set(mask_structures[0]).intersection(*mask_structures)), process.device
    ), names


def _analyze_large_masks(
    stage: Stage, program: Program, process: Process, masks: Sequence[fx.Node], inputs: Sequence[StageInput],
    graph: fx.GraphModule,
) -> dict[str, MaskStructure]:  # fmt: skip
    """Return {mask name: structure} of masks that would be too large as tensors.

    The function computes only the ranges of keys to which each query attends. It leaves out masks that have no
    structure that kernels support.

    Args:
        inputs: stage inputs from which the stage graph computes the masks.
        graph: graph that computes the values of these inputs.
    """
    whole = KeyRangeEvaluator({}, process.device)
    (outputs,) = graph.graph.output_node().args
    values = [whole.made(output) for output in outputs]
    (arguments, *_) = stage_arguments(program, inputs, values, process.coordinates, program.runs_of(stage))
    subgraph = mask_graph(stage, masks)
    by_node = {node: arguments[str(node.target)] for node in subgraph.graph.find_nodes(op="placeholder")}
    sizes = {axis: (index, program.mesh.size(axis)) for axis, index in process.coordinates.items()}
    seen = KeyRangeEvaluator(by_node, process.device, sizes)
    mask_structures: dict[str, MaskStructure] = {}
    for mask, node in zip(masks, subgraph.graph.output_node().args[0], strict=True):
        intervals, scores = seen.of(node), {*map(scores_of, masks_of(stage)[mask])}
        if (
            intervals is not None
            and len(scores) == 1
            and (structure := mask_structure_of(intervals, *scores.pop())) is not None
        ):
            mask_structures[mask.name] = structure
    return mask_structures


def _structure_of(mask: Tensor, calls: Sequence[fx.Node], sizes: Mapping[str, int]) -> MaskStructure | None:
    """Return the structure of a mask: causal, sliding window or full; None for any other mask.

    The result is also None if the attention calls that use the mask differ in their numbers of queries or keys. If the
    graph takes sizes as inputs, the structure is made independent of the sequence length (`at_any_length`).
    """
    scores = {scores_of(call, sizes) for call in calls}
    if len(scores) > 1:
        return None
    (queries, keys) = scores.pop()
    structure: MaskStructure | None
    if mask.dtype == torch.bool and queries != keys == mask.size(-1):
        intervals = key_ranges_of(mask)
        structure = mask_structure_of(intervals, queries, keys) if intervals is not None else None
    else:
        structure = mask_window_of(mask, queries, keys)
    return at_any_length(structure, queries, keys) if structure is not None and sizes else structure


class StageMasks:
    """Detects, in every call, the structure of a stage's attention masks.

    Args:
        bind: function that prepares a graph of the stage for this rank.
        without: names of masks to ignore.
        sizes: names of inputs that are integers (batch sizes, sequence lengths).
    """

    def __init__(
        self, stage: Stage, bind: Callable[[fx.GraphModule], fx.GraphModule], without: Collection[str] = (),
        sizes: Collection[str] = (),
    ):  # fmt: skip
        self.sizes = {stage_input.name for stage_input in stage.inputs}.intersection(sizes)
        self.calls = {mask: calls for mask, calls in masks_of(stage).items() if mask.name not in without}
        self.make = bind(mask_graph(stage, list(self.calls))) if self.calls else None
        self.reads = [str(n.target) for n in self.make.graph.find_nodes(op="placeholder")] if self.make else []

    def mask_structures(self, microbatches: Sequence[Mapping[str, Any]]) -> list[MaskStructures]:
        """Return, for each microbatch, its mask structures. A mask that microbatches share is inspected once.

        Args:
            microbatches: keyword arguments of the stage's graph for each microbatch.
        """
        if self.make is None:
            return [()] * len(microbatches)
        cache: dict[tuple[int, ...], MaskStructures] = {}
        all_structures = []
        for arguments in microbatches:
            key = tuple(id(arguments[name]) for name in self.reads)
            if key not in cache:
                cache[key] = self._detect(self.make, arguments)
            all_structures.append(cache[key])
        return all_structures

    @torch.no_grad()
    def _detect(self, make: fx.GraphModule, arguments: Mapping[str, Any]) -> MaskStructures:
        masks = make(**{name: arguments[name] for name in self.reads})
        sizes = {name: arguments[name] for name in self.sizes}
        cache: dict[Any, MaskStructure | None] = {}
        pairs = []
        for (mask, calls), value in zip(self.calls.items(), masks, strict=True):
            key = id(value), frozenset(scores_of(call, sizes) for call in calls)
            if key not in cache:
                cache[key] = _structure_of(value, calls, sizes)
            pairs.append((mask.name, cache[key]))
        return tuple((name, band) for name, band in pairs if band is not None)

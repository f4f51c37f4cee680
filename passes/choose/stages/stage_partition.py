"""Choice of stage boundaries: exact minimization of the cost of the most loaded stage.

Operators keep their order. A stage may begin at any operator at which all values that cross the boundary can be sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np
from torch import fx

from autopart.common.names import layer_of
from autopart.cost.flops import matrix_work, work
from autopart.cost.predict.send_costs import load_per_byte
from autopart.cost.predict.stage_balance import Partition, balance
from autopart.errors import StageError
from autopart.ir.atoms import selections_in
from autopart.ir.blocks.deduplication import DeduplicatedBlocks, expand_blocks
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators, name_of, shape, size_bytes, source_of, tensor_inputs, tuple_values
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Trace, batch_size
from autopart.passes.choose.problem import Problem
from autopart.passes.normalize.batch_norm_forms import INNER


def partition(
    graph: fx.Graph, num_stages: int, folds: DeduplicatedBlocks = (), send_cost: float = 0.0,
    tail: Set[fx.Node] = frozenset(),
) -> Partition:  # fmt: skip
    """Return the best partition of an annotated graph into `num_stages` stages.

    Raises StageError if the model has too few operators at which a stage can begin.

    Args:
        folds: deduplicated blocks: the trace contains only one of several equal blocks. Boundary indices count the
            operators of all blocks.
        send_cost: cost of one sent byte in FLOPs, added to both the sending and the receiving stage.
        tail: operators that run on the last stage after all microbatches.
    """
    nodes = active_operators(graph)
    best = find_partition(nodes, num_stages, folds=folds, send_cost=send_cost, tail=tail)
    if best is None:
        places = num_boundaries(nodes, tail=tail)
        raise StageError(
            f"the model cannot be split into {num_stages} stages",
            why=f"it has {len(nodes)} operators that depend on parameters, and {places} possible stage "
            "boundaries between them",
            hint=f"pp={places + 1} or less (pp times virtual_stages is the number of stages)",
        )
    return best


def find_partition(
    nodes: list[fx.Node], num_stages: int, begins: Set[int] = frozenset(), inside: Set[int] = frozenset(),
    folds: DeduplicatedBlocks = (), send_cost: float = 0.0, tail: Set[fx.Node] = frozenset(),
) -> Partition | None:  # fmt: skip
    """Return the best partition of the operators that depend on parameters into stages.

    None if there are too few operators at which a stage can begin.

    Args:
        begins: operator indices at which a stage must begin.
        inside: operator indices at which no stage may begin.
        folds: deduplicated blocks of the trace, each of which represents several equal blocks.
        send_cost: cost of one sent byte in FLOPs, added to both the sending and the receiving stage.
        tail: operators that run on the last stage after all microbatches. No other stage waits for them.
    """
    order, sent = full_model_indices(nodes, folds), boundary_bytes(nodes, tail)
    works = [0.0 if node in tail else work(node) for node in nodes]
    crossing = [math.inf if i in inside else sent[index] for i, index in enumerate(order)]
    return balance([works[index] for index in order], crossing, num_stages, begins, send_cost)


def flops_per_sent_byte(problem: Problem) -> float:
    """Return the forward FLOPs that a rank can run in the time in which one byte crosses a stage boundary.

    Each rank of a stage is assumed to run an equal share of every operator.
    """
    nodes = active_operators(problem.graph)
    order = full_model_indices(nodes, problem.trace.folds)
    flops = Counter[str]()
    for index, count in Counter(order).items():
        if amount := matrix_work(nodes[index]):
            flops[str(tuple_values(nodes[index])[0].dtype).removeprefix("torch.")] += count * amount
    dtype = max(flops, key=lambda name: flops[name], default="")
    shares = problem.mesh.num_ranks // problem.mesh.size("pp") * problem.microbatches
    loads = np.array([work(node) / shares for node in nodes])[order]
    return load_per_byte(loads, dtype, problem.mesh, problem.hardware)


def full_model_indices(nodes: Sequence[fx.Node], folds: DeduplicatedBlocks) -> list[int]:
    """Return, for each operator of the full model, the index in `nodes` of the node that represents it.

    If blocks are deduplicated, the trace contains only one of several equal blocks, and its operators represent those
    of all these blocks. Only operators that depend on parameters are included.
    """
    return [*expand_blocks(folds, range(len(nodes)), lambda i: facts(nodes[i])["key"], lambda i, _: i)]


def can_run_tail(trace: Trace, tail: Set[fx.Node], num_stages: int) -> bool:
    """Return True if a pipeline can run the operators `tail` once, for all microbatches, at its end.

    The tail runs on the last stage. It may have at most half of the FLOPs, because all other stages wait for it.
    """
    nodes = active_operators(trace.graph)
    loads = np.array([work(node) for node in nodes])
    is_tail = np.array([node in tail for node in nodes])
    order = full_model_indices(nodes, trace.folds)
    return (
        loads[order][is_tail[order]].sum() <= loads[order].sum() / 2
        and find_partition(nodes, num_stages, folds=trace.folds, tail=tail) is not None
    )


def num_boundaries(nodes: list[fx.Node], inside: Set[int] = frozenset(), tail: Set[fx.Node] = frozenset()) -> int:
    return sum(math.isfinite(size) and i not in inside for i, size in enumerate(boundary_bytes(nodes, tail)) if i)


def boundary_bytes(nodes: list[fx.Node], tail: Set[fx.Node] = frozenset()) -> list[float]:
    """Return, for each operator, the bytes that would be sent if a stage began at it.

    The number is infinite if no stage can begin at the operator, for one of three reasons: a value that crosses the
    boundary has no gradient, or has a data-dependent size, or another mode of the model lacks the operator.

    Args:
        tail: operators that run on the last stage, after all others.
    """
    position = {node: len(nodes) - 1 if node in tail else i for i, node in enumerate(nodes)}
    last_use: dict[fx.Node, int] = {}
    values: dict[fx.Node, int] = {}
    for node in nodes:
        for used in tensor_inputs(node):
            source, _ = source_of(used)
            if source in position:
                values[used] = position[source]
                last_use[used] = max(position[node], last_use.get(used, 0))
    change = np.zeros(len(nodes) + 1)
    blocked = np.zeros(len(nodes) + 1)
    for used, start in values.items():
        can_cross = facts(used)["needs_grad"] and not any(map(selections_in, facts(used)["atoms"]))
        target, weight = (change, size_bytes(used)) if can_cross else (blocked, 1)
        target[start + 1] += weight
        target[last_use[used] + 1] -= weight
    sent, stuck = np.cumsum(change), np.cumsum(blocked)
    return [
        math.inf if stuck[i] or _tied_to_mode(node) or node in tail else float(sent[i]) for i, node in enumerate(nodes)
    ]


def _tied_to_mode(node: fx.Node) -> bool:
    """Return True for an operator that only some modes of the model contain (loss, dropout).

    No stage begins at such an operator, because all modes need the same boundaries.
    """
    inner = facts(node).get("named") == INNER
    return (
        facts(node).get("loss", False) or facts(node)["for_buffers"] or inner or facts(node).get("tied_to_mode", False)
    )


def equal_layer_loads(graph: fx.Graph, num_stages: int) -> list[float]:
    """Return the load (FLOPs) of each stage if every stage gets an equal number of repeated blocks.

    The embedding is in the stage of the first blocks, the head in the stage of the last blocks.
    """
    nodes = active_operators(graph)
    layers = sorted({layer for n in nodes if (layer := layer_of(name_of(n))) is not None})
    per_stage = max(1, math.ceil(len(layers) / num_stages))
    loads, stage = [0.0] * num_stages, 0
    for node in nodes:
        layer = layer_of(name_of(node))
        stage = stage if layer is None else min(layers.index(layer) // per_stage, num_stages - 1)
        loads[stage] += work(node)
    return loads


def check_batch(trace: Trace, mesh: Mesh, microbatches: int) -> None:
    """Raise StageError if data-parallel ranks times microbatches does not divide the batch size."""
    batch = batch_size(trace)
    parts = mesh.batch_divisor * microbatches
    if batch % parts:
        fits = [m for m in range(1, batch + 1) if batch % (mesh.batch_divisor * m) == 0]
        axes = (*mesh.along("rows"), *mesh.along("experts")) or (mesh.data_axis,)
        over = "".join(f"{axis}={mesh.size(axis)} x " for axis in axes)
        inside = f", or {mesh.innermost('positions')} in place of {axes[0]}: it shards the sequence of a sample"
        raise StageError(
            f"a batch of {batch} samples cannot be split into {over}microbatches={microbatches} equal parts",
            why=f"{batch} is not a multiple of {parts}" + _of_a_list(trace, batch),
            hint=f"microbatches={', '.join(map(str, fits))}"
            if fits
            else f"a batch size that is a multiple of {mesh.batch_divisor}{inside * (batch < mesh.batch_divisor)}",
        )


def _of_a_list(trace: Trace, batch: int) -> str:
    """Return text for an error that names the list of tensors that determines the batch size.

    "" if the batch size does not come from a list.
    """
    names = [facts(node).get("input_name", "") for node in trace.graph.find_nodes(op="placeholder")
             if shape(node)[:1] == (batch,)]  # fmt: skip
    if not names or not all(name.rpartition(".")[2].isdigit() for name in names):
        return ""
    return f": the first dim of '{names[0]}' counts as the samples, because the tensors of a list are separate inputs"

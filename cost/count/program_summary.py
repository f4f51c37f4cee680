"""Summary of a program that its plan stores: stages, collectives with their bytes, predicted cost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.common.names import layer_of
from autopart.cost.count.gradient_communication import exchanged_by_method, reduce_dtype_of
from autopart.cost.flops import work
from autopart.cost.predict.collective_costs import wire_bytes
from autopart.cost.predict.dp_sync_costs import exchanges
from autopart.cost.predict.send_costs import BoundaryBytes
from autopart.cost.predict.simulate import Simulation
from autopart.ir.blocks.deduplication import DeduplicatedBlocks, names_of
from autopart.ir.decisions import Decisions
from autopart.ir.facts import cost_notes, facts, times
from autopart.ir.graph import (
    active_operators,
    operator_name,
    parameters_of,
    pattern_of,
    size_bytes,
    tensor_inputs,
    value,
)
from autopart.ir.layout import DIRECTIONS
from autopart.ir.program import Boundary, Program, Stage
from autopart.ir.run.report_terms import Collective
from autopart.ir.run.scatter_gather_sends import scatter_layout
from autopart.ir.run.unshard_policy import gathers_stored, storing_axes, unsharded_for_step
from autopart.ir.trace import Trace
from autopart.ops.operators import stored_source

_MOVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collectives(trace: Trace, program: Program) -> tuple[Collective, ...]:
    """Return the collectives and sends of a program, with the bytes that a rank sends.

    Equal collectives of repeated blocks are one entry with their number and total bytes.
    """
    totals: dict[tuple[str, tuple[str, str, str, str]], list[int]] = defaultdict(lambda: [0, 0])
    for move in _moves(program):
        per = "step" if program.stages[move.stage].is_tail else "microbatch"
        entry = totals[per, (pattern_of(move.path) or "model", move.axis, move.forward, move.backward)]
        entry[0] += move.times
        entry[1] += move.bytes * move.times
    rows = [Collective(*key, count, moved, per) for (per, key), (count, moved) in totals.items()]
    return (*rows, *_sends(program), *_gradients(trace, program), *_zero_collectives(trace, program))


class _Move(NamedTuple):
    """One collective of a stage graph.

    Args:
        path: path of the module that runs it.
        axis: the mesh axis.
        forward, backward: the kind of collective in forward and in backward; empty if there is none.
        bytes: bytes that one rank sends, in forward and backward together.
        times: number of equal collectives in repeated blocks that this object represents.
    """

    stage: int
    path: str
    axis: str
    forward: str
    backward: str
    bytes: int
    times: int = 1


def _moves(program: Program) -> Iterator[_Move]:
    whole, storing = unsharded_for_step(program, program.stages), storing_axes(program)
    for stage in program.stages:
        for node in stage.graph.graph.nodes:
            name = operator_name(node).removeprefix("autopart::")
            if name not in DIRECTIONS:
                continue
            forward, backward = (kind if kind in _MOVES else "" for kind in DIRECTIONS[name])
            if not forward and not backward:
                continue
            axis = node.args[1]
            if gathers_stored(node, storing) and str(node.args[0].target) in whole:
                if program.zero == 2 and facts(node).get("needs_grad", True) and backward:
                    sent = _scattered_bytes(node, program)
                    yield _Move(stage.index, _module_of(node), axis, "", backward, sent, times(node))
                continue
            sides = (node, node.args[0]) if backward else (node,)
            size = summed = max(size_bytes(n) for n in sides)  # the larger of input and output is the full array
            if node.kwargs:  # a parameter in mixed precision
                elements, out_dtype = max(value(n).numel() for n in sides), value(node).dtype
                size, summed = (
                    elements * dtype.itemsize for dtype in (out_dtype, node.kwargs.get("grad_dtype") or out_dtype)
                )
            if forward == "all_to_all":  # input and output are shards: the full array has all ranks' shards
                size, summed = (one * program.mesh.size(axis) for one in (size, summed))
            grad = facts(node).get("needs_grad", True)
            moved = wire_bytes(forward, program.mesh.size(axis), size)
            moved += wire_bytes(backward, program.mesh.size(axis), summed) if grad else 0
            path = _module_of(node)
            yield _Move(stage.index, path, axis, forward, backward if grad else "", round(moved), times(node))
            is_weight = axis in storing and stored_source(node) is not None
            if is_weight and forward == "all_gather" and _is_saved(node):
                again = round(wire_bytes("all_gather", program.mesh.size(axis), size))
                yield _Move(stage.index, path, axis, "", "all_gather", again, times(node))


def _scattered_bytes(node: fx.Node, program: Program) -> int:
    """Return the bytes that a rank sends to reduce-scatter the gradient of a gathered weight."""
    dtype = node.kwargs.get("grad_dtype") or value(node).dtype
    ranks = program.mesh.size(node.args[1])
    return round(wire_bytes("reduce_scatter", ranks, value(node).numel() * dtype.itemsize))


def _is_saved(weight: fx.Node) -> bool:
    """Return True if the backward reads a gathered weight, to compute the gradient of another operand.

    Only then does the backward need the unsharded weight.
    """
    for user in weight.users:
        others = [n for n in user.all_input_nodes if n is not weight and isinstance(n.meta.get("val"), torch.Tensor)]
        if not others and _is_saved(user):
            return True
        if not cost_notes(user).looks_up and any(facts(n).get("needs_grad", True) for n in others):
            return True
    return False


def _module_of(node: fx.Node) -> str:
    """Return the path of the module to which a node of a stage graph belongs.

    If the node processes a parameter, this is the module that owns the parameter.
    """
    if "key" in facts(node):
        return facts(node)["key"].rsplit("/", 1)[0]
    source = node
    while source.op == "call_function" and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    return str(source.target).rpartition(".")[0] if source.op == "get_attr" else ""


def _sends(program: Program) -> list[Collective]:
    rows = []
    for stage in program.stages[1 : program.num_stages]:
        size = sum(b.size_bytes for b in stage.receives)
        rows.append(Collective(f"into stage {stage.index}", "pp", "send", "send", len(stage.receives), 2 * size))
    return rows


def crossings(trace: Trace, program: Program) -> list[BoundaryBytes]:
    """Return, for each stage but the first, the bytes that it receives per microbatch.

    Each entry has the bytes of all values, and the bytes of the values that can be sent as shards.

    Args:
        program: a program whose stages send full values, not shards.
    """
    nodes = {node.name: node for node in trace.graph.nodes}

    def alike(sent: Boundary) -> bool:
        return scatter_layout(nodes[sent.name], sent.layout, program.mesh) is not None

    return [
        BoundaryBytes(sum(b.size_bytes for b in stage.receives), sum(b.size_bytes for b in stage.receives if alike(b)))
        for stage in program.stages[1 : program.num_stages]
    ]


def _gradients(trace: Trace, program: Program) -> list[Collective]:
    rows = []
    sizes: dict[str, int] = defaultdict(int)
    for name, one in program.parameters.items():
        stored = one.unsharded_to_sync(program.mesh) or one
        parts = math.prod(program.mesh.size(axis) for axis, place in stored.layout.items() if place.is_shard)
        for axis in stored.reduced_over(program.mesh):
            sizes[axis] += (
                math.prod(stored.shape) * reduce_dtype_of(trace.parameters[name].dtype, program).itemsize // parts
            ) * trace.multiplicity_of(name)
    for axis, size in sizes.items():
        moved = round(wire_bytes("all_reduce", program.mesh.size(axis), size) / program.mesh.size("pp"))
        rows.append(Collective("gradients of parameters", axis, "", "all_reduce", 1, moved, "step"))
    return rows + _methods(trace, program)


def _methods(trace: Trace, program: Program) -> list[Collective]:
    """Return the collectives per step of `dp_sync` methods, which replace the gradient all-reduce.

    If a collective runs only in some steps, its bytes are averaged over all steps.
    """
    rows, trained = [], [name for name, parameter in trace.parameters.items() if parameter.requires_grad]
    axis = next(iter(program.mesh.along("rows")), "")
    for one in exchanged_by_method(trace, program, trained):
        where = f"{'gradients of ' * (one.method.changes == 'gradients')}parameters by {one.method}"
        for moved in exchanges(one, program.data_ranks):
            sent = round(moved.sent_bytes(program.data_ranks) / program.mesh.size("pp"))
            rows.append(Collective(where, axis, "", moved.kind, 1, sent, "step"))
    return rows


def _zero_collectives(trace: Trace, program: Program) -> list[Collective]:
    """Return the collectives that ZeRO runs once per step: all-gathers of parameters.

    Reduce-scatters of gradients are included only with ZeRO 1.
    """
    mesh, whole, trained = program.mesh, Counter[str](), Counter[str]()
    for name, way in unsharded_for_step(program, program.stages).items():
        stored, parameter, axis = program.parameters[name], trace.parameters[name], way.axis
        parts = math.prod(mesh.size(a) for a, place in stored.layout.items() if place.is_shard and a != axis)
        elements = parameter.numel() // parts * trace.multiplicity_of(name)
        whole[axis] += elements * (stored.compute_dtype or parameter.dtype).itemsize
        is_scattered = parameter.requires_grad and stored.unsharded_to_sync(mesh) is None
        trained[axis] += elements * reduce_dtype_of(parameter.dtype, program).itemsize * is_scattered
    rows = [("parameters", axis, "all_gather", "", size) for axis, size in whole.items()]
    rows += [("gradients of parameters", axis, "", "reduce_scatter", size)
             for axis, size in trained.items() if program.zero == 1]  # fmt: skip
    return [
        Collective(where, axis, forward, backward, 1,
                   round(wire_bytes(forward or backward, mesh.size(axis), size) / mesh.size("pp")), "step")
        for where, axis, forward, backward, size in rows if size
    ]  # fmt: skip


def stage_rows(trace: Trace, decisions: Decisions, program: Program) -> tuple[dict[str, Any], ...]:
    """Return one mapping per stage: first and last operator, FLOPs, parameters, received values, blocks.

    FLOPs are those of the forward on the global batch. The tail is the part of a model that runs once for all
    microbatches. If there is one, the mapping of the last stage has an entry `tail`: the tail's first operator, FLOPs
    and received values. The stage's FLOPs do not include the tail's.
    """
    rows, moves = [], list(_moves(program))
    for stage in program.stages[: program.num_stages]:
        nodes = [n for n in active_operators(trace.graph) if decisions.stage_of[n] == stage.index]
        own = [n for n in nodes if n not in decisions.tail]
        rows.append({
            "stage": stage.index,
            "first": facts(own[0])["key"],
            "last": facts(own[-1])["key"],
            "flops": int(sum(work(n) * times(n) for n in own)),
            "parameters": _num_parameters(trace, stage, program),
            "receives": [b.name for b in stage.receives],
            "blocks": _block_rows(nodes, [move for move in moves if move.stage == stage.index], trace.folds),
        })  # fmt: skip
    if program.tail is not None:
        nodes = [n for n in active_operators(trace.graph) if n in decisions.tail]
        rows[-1]["tail"] = {
            "first": facts(nodes[0])["key"],
            "flops": int(sum(work(n) * times(n) for n in nodes)),
            "receives": [b.name for b in program.tail.receives],
        }
    return tuple(rows)


def block_of(path: str) -> str:
    """Return the block that a module is part of, with `*` in place of layer numbers.

    The children of a repeated layer are blocks. Outside of repeated layers, a block has the first two names of the
    path.

    >>> block_of("transformer.h.3.attn.c_attn"), block_of("transformer.wte"), block_of("transformer.h.3")
    ('transformer.h.*.attn', 'transformer.wte', 'transformer.h.*')
    """
    parts = pattern_of(path).split(".")
    stars = [i for i, part in enumerate(parts) if part == "*"]
    return ".".join(parts[: stars[-1] + 2] if stars else parts[:2])


def _block_rows(nodes: list[fx.Node], moves: list[_Move], folds: DeduplicatedBlocks) -> list[dict[str, Any]]:
    """Return one mapping per block of a stage, in model order. Empty and zero entries are omitted.

    - `layers`: layer numbers, such as `"0-3"`
    - `modules`: number of modules, if layers have several
    - `flops`: FLOPs of the forward
    - `shared`: parameters of other blocks that the block reads
    - `forward`, `backward`: `{"tp all_reduce": count}`
    - `bytes`: bytes that the collectives send
    """
    paths: dict[str, dict[str, None]] = defaultdict(dict)
    flops: dict[str, int] = defaultdict(int)
    shared: dict[str, dict[str, None]] = defaultdict(dict)
    for node in nodes:
        path = facts(node)["key"].rsplit("/", 1)[0]
        block = block_of(path)
        paths[block][".".join(path.split(".")[: block.count(".") + 1])] = None
        flops[block] += int(work(node)) * times(node)
        read = [name for used in tensor_inputs(node) for name in parameters_of(used)]
        shared[block] |= {pattern_of(name): None for name in read if block_of(name.rpartition(".")[0]) != block}
    counts: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: {"forward": {}, "backward": {}})
    sent: dict[str, int] = defaultdict(int)
    for move in moves:
        block = block_of(move.path)
        paths[block] |= {".".join(move.path.split(".")[: block.count(".") + 1]): None}
        sent[block] += move.bytes * move.times
        for direction, kind in (("forward", move.forward), ("backward", move.backward)):
            if kind:
                tally = counts[block][direction]
                tally[f"{move.axis} {kind}"] = tally.get(f"{move.axis} {kind}", 0) + move.times
    rows = []
    for block, block_paths in paths.items():
        modules = [name for path in block_paths for name in names_of(folds, path)]
        layers = sorted({number for path in modules if (number := layer_of(path)) is not None})
        row: dict[str, Any] = {
            "block": block, "layers": _ranges(layers), "modules": len(modules) if len(modules) > len(layers) > 0 else 0,
            "flops": flops[block], "shared": list(shared[block]), **counts[block], "bytes": sent[block],
        }  # fmt: skip
        rows.append({key: value for key, value in row.items() if value or key == "block"})
    return rows


def _ranges(numbers: list[int]) -> str:
    """Format sorted layer numbers as ranges: [0, 1, 2, 5] becomes `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _num_parameters(trace: Trace, stage: Stage, program: Program) -> int:
    held = (p for p in program.parameters.values() if stage.index in p.stages)
    return sum(math.prod(p.shape) * trace.multiplicity_of(p.name) for p in held)


def cost(
    rows: tuple[Mapping[str, Any], ...], moved: tuple[Collective, ...], step: Simulation,
    device_memory: tuple[str, float], lower_bound: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the entries of `Plan.cost`: the simulated step, FLOPs, sent bytes, and device memory.

    Args:
        rows: one mapping per stage (`stage_rows`).
        moved: the collectives of the program.
        device_memory: the source of the memory limit (a profile's name or "memory="), and its bytes.
        lower_bound: lower bound of the most loaded stage's FLOPs; None with one stage.
    """
    flops = max(row["flops"] for row in rows)
    bound = float(flops) if lower_bound is None else lower_bound
    sent = {per: sum(c.bytes for c in moved if c.per == per) for per in ("microbatch", "step")}
    return {
        **step.figures(),
        "device_memory_bytes": device_memory[1],
        "device_memory_of": device_memory[0],
        "forward_flops": int(sum(row["flops"] + row.get("tail", {}).get("flops", 0) for row in rows)),
        "heaviest_stage_flops": int(flops),
        "stage_lower_bound_flops": int(bound),
        "imbalance": round(flops / bound - 1, 6) if bound else 0.0,
        "bytes_per_microbatch": sent["microbatch"],
        "bytes_per_step": sent["step"],
    }

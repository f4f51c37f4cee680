"""Checks that `dp_sync` methods support the program and the layouts of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopart.errors import OptionError
from autopart.ir.decisions import Decisions
from autopart.ir.layout import mesh_axes_of
from autopart.ir.program import Program
from autopart.ir.run.unshard_policy import unsharded_for_step
from autopart.ir.trace import Trace

if TYPE_CHECKING:
    from autopart.extras.dp_sync.sync_options import DpSync


def check_storage(sync: DpSync, trace: Trace, decisions: Decisions) -> None:
    """Raise OptionError if a `dp_sync` method does not support how parameters are sharded.

    Also raise it if the method averages models, but all data ranks compute the same samples.
    """
    mesh = decisions.mesh
    axis = sync.axis(mesh)
    trained = [name for name, parameter in trace.parameters.items() if parameter.requires_grad]
    with_method = [name for name in trained if sync.method_of(name) is not None]
    over = {name: mesh.stored_over(decisions.stored.get(name, {})) for name in with_method}
    sharded = [name for name, stored in over.items() if stored is not None and axis in mesh_axes_of(stored)]
    if axis and sharded and (sync.changes_models or decisions.zero != 1):
        why, less = "its gradient is reduce-scattered, and no rank has all of it", "zero=1"
        if sync.changes_models:
            why, less = "ranks store shards of one model, and no rank has a separate model", "zero=0"
        asked = f"zero={decisions.zero}" if decisions.zero else "by a pin"
        raise OptionError(
            f"dp_sync='{sync}' cannot be combined with sharded parameters ({asked})",
            why=f"'{min(sharded)}' is sharded over {axis}: {why}",
            hint=f"{less}, or a mesh with two data axes such as 'dpr2,dp4': parameters are sharded over dp, "
            "dp_sync uses dpr",
        )
    if sync.changes_models and decisions.copied:
        raise OptionError(
            f"dp_sync='{sync}' has nothing to synchronise over {axis}",
            why="the batch size is not divisible by the number of its ranks, so every rank computes all samples",
            hint="a batch size that is a multiple of the number of data ranks",
        )


def check_full_gradients(sync: DpSync, program: Program) -> None:
    """Raise OptionError if a `dp_sync` method needs a full gradient that no rank has.

    No rank has the full gradient of a sharded parameter that is used in more than one layout: each use gathers the
    parameter, and reduce-scatters its gradient.
    """
    needs_full_gradient = [name for name, one in program.parameters.items() if one.unsharded_to_sync(program.mesh)]
    if not needs_full_gradient:
        return
    graphs, gathers_for_step = (
        [stage.graph.graph for stage in program.stages],
        unsharded_for_step(program, program.stages),
    )
    read = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "get_attr"}
    gathered_per_use = [name for name in needs_full_gradient if name in read and name not in gathers_for_step]
    if gathered_per_use:
        rest = str(sync) if sync.only else f"*={sync}"
        raise OptionError(
            f"dp_sync='{sync}' cannot be combined with zero=1 for '{gathered_per_use[0]}'",
            why="it is used in more than one layout, and each use gathers its shards and reduces its gradient "
            "separately", hint=f"zero=0, or an exact reduction: dp_sync='{gathered_per_use[0]}=all_reduce,{rest}'",
        )  # fmt: skip

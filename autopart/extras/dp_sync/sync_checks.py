"""Assignment of data-parallel sync methods (`dp_sync`) to parameters, and unsupported cases."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.errors import OptionError
from autopart.extras.dp_sync.sync_options import EXACT, Method
from autopart.ir.decisions import Decisions
from autopart.ir.layout import Layout, mesh_axes_of
from autopart.ir.trace import Trace


def method_for(name: str, decisions: Decisions, layout: Layout, summed: Sequence[str]) -> Method | None:
    """Return the sync method that replaces a parameter's gradient reduction; None if reduced exactly.

    With `zero=1` the gradient is unsharded until the end of a step, so a method applies.

    Args:
        summed: axes on which the gradient ends as a partial sum.
    """
    sync, over = decisions.dp_sync, decisions.mesh.stored_over(layout)
    method = sync.of(name)
    scattered = mesh_axes_of(over) if over is not None and decisions.zero == 1 else ()
    return method if method != EXACT and sync.axis(decisions.mesh) in (*summed, *scattered) else None


def check_methods(trace: Trace, decisions: Decisions) -> None:
    """Raise OptionError for an unknown name in `dp_sync`, or a method that a parameter's storage excludes."""
    sync, mesh = decisions.dp_sync, decisions.mesh
    if sync.is_default:
        return
    trained = {name for name, parameter in trace.parameters.items() if parameter.requires_grad}
    sync.check_names(trace.parameters)
    axis = sync.axis(mesh)
    over = {name: mesh.stored_over(decisions.stored.get(name, {})) for name in trained if sync.of(name) != EXACT}
    cut = [name for name, stored in over.items() if stored is not None and axis in mesh_axes_of(stored)]
    if axis and cut and (sync.changes_models or decisions.zero != 1):
        why, less = "its gradient is reduce-scattered, and no rank has all of it", "zero=1"
        if sync.changes_models:
            why, less = "ranks store shards of one model, and no rank has a separate model", "zero=0"
        asked = f"zero={decisions.zero}" if decisions.zero else "by a pin"
        raise OptionError(
            f"dp_sync='{sync}' on parameters that are stored sharded ({asked})",
            why=f"'{min(cut)}' is sharded over {axis}: {why}",
            hint=f"{less}, or a mesh with both axes of data, 'dpr2,dp4': shards over dp, the method over dpr",
        )  # fmt: skip
    if sync.changes_models and decisions.copied:
        raise OptionError(
            f"dp_sync='{sync}' when every rank of {axis} computes all samples", why="the rows of the batch do "
            "not divide "
            "over them, so there is nothing to reduce", hint="a batch that divides over the data ranks",
        )  # fmt: skip

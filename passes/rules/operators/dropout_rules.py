"""Dropout whose noise is drawn where it is used."""

from __future__ import annotations

import zlib

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import operator_name
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ops.operators import autopart_ops
from autopart.passes.rules.local_forms import LocalCall


def can_draw(node: fx.Node) -> bool:
    """Whether a call may be given no noise: its local form draws it."""
    return operator_name(node) == "autopart::drop"


def drop(call: LocalCall) -> fx.Node | None:
    """Without its noise, dropout draws a mask where it is: shards of a value get independent ones, ranks that hold the
    same value the same one."""
    source, noise, probability = call.args
    if noise is not None:
        return None
    sharded = [a for a, place in call.output_layout().items() if place.is_shard and a != MICROBATCH_AXIS]
    indices = [call.emit(autopart_ops.axis_index.default, axis) for axis in sharded]
    salt = zlib.crc32(facts(call.node)["key"].encode())
    return call.emit(autopart_ops.dropout.default, source, probability, call.seed(), salt, indices)

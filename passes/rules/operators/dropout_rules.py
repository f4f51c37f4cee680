"""Dropout in the program of one rank (local form): each rank draws the mask of its shard."""

from __future__ import annotations

import zlib

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ops.operators import autopart_ops
from autopart.passes.rules.local_forms import LocalCall


def drop(call: LocalCall) -> fx.Node | None:
    """Emit dropout that draws its mask on the rank. Return None if the call has noise as an argument.

    Shards of a value get independent masks. Ranks that replicate the value get equal masks.
    """
    source, noise, probability = call.args
    if noise is not None:
        return None
    sharded = [a for a, placement in call.output_layout().items() if placement.is_shard and a != MICROBATCH_AXIS]
    indices = [call.emit(autopart_ops.axis_index.default, axis) for axis in sharded]
    salt = zlib.crc32(facts(call.node)["key"].encode())
    return call.emit(autopart_ops.dropout.default, source, probability, call.seed(), salt, indices)

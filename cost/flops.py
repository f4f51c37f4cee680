"""FLOPs of operators that no sharding rule counts, by torch's own counter."""

from __future__ import annotations

from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from autopart.graph import value


def counted_flops(node: fx.Node) -> int:
    """FLOPs of a call as `torch.utils.flop_counter` counts them, on fake tensors; 0 where it knows nothing of it.

    A user's operator is counted once it has a formula (`torch.utils.flop_counter.register_flop_formula`).
    """
    if "counted_flops" not in node.meta:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)
        node.meta["counted_flops"] = counter.get_total_flops()
    return node.meta["counted_flops"]

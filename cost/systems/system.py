"""Descriptions of other training systems: JSON files with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autopart.common.files import read_text
from autopart.common.json_text import parse_json
from autopart.cost.predict.operator_work import OPTIMIZER_TRAFFIC
from autopart.errors import OptionError

_MOST = {"overlap_tensor": 1.0}
"""{entry: its largest valid value}."""

_SYSTEMS = Path(__file__).parent / "descriptions"
_FORM = '"name", "source", and entries as in autopart/cost/systems/descriptions'


@dataclass(frozen=True)
class System:
    """Description of a training system that runs a plan. None means: as in autopart's runtime.

    Args:
        name: name of the system.
        source: where its entries are from.
        casts_weights: True if weights are cast to the compute dtype in every microbatch. False: the system stores
            weights in the compute dtype, and casts once a step.
        fused_sums: True if matrix products add weight gradients to those of earlier microbatches.
        overlap_gradients: True if gradients are reduced during the last backward.
        overlap_tensor: share of the seconds of all-gathers and reduce-scatters over `tp` that overlaps with matrix
            products.
        recompute_gathers: True if the backward gathers the inputs of products over `tp` again, instead of saving them.
        bucket_bytes: bytes of gradients or parameters that one collective reduces or gathers.
        zero_by_parameter: True if ZeRO 1 reduces the gradient, and gathers the weights, of each parameter by itself.
        fills_stages: True if a stage gets blocks until the FLOPs of all blocks so far exceed the share of the stages so
            far. False: stages are balanced. It applies if the plan has another number of stages.
        scatter_sends: True if `tp` ranks send shards of replicated values to the next stage.
        overlap_sends: True if sends between stages overlap with compute.
        allocates_receives: True if a step allocates receive buffers of all microbatches, as torch's pipelining does.
        optimizer_values: number of float32 values that the update of the weights reads or writes per parameter, with
            clipping and casts; 7 for AdamW alone.
        host_waits: True if the CPU waits for each receive of a pipeline before it issues the next operators.
        host_operator_s, host_collective_s: seconds of the CPU to issue a kernel and a collective, as in a hardware
            profile.
        host_collective_pipeline_s: seconds of the CPU per collective, if a pipeline crosses nodes.
        host_collective_rank_s: seconds of the CPU in addition, per rank of the collective's group, if a pipeline
            crosses nodes.
    """

    name: str
    source: str
    casts_weights: bool = True
    fused_sums: bool = False
    overlap_gradients: bool | None = None
    overlap_tensor: float = 0.0
    recompute_gathers: bool = False
    bucket_bytes: float | None = None
    zero_by_parameter: bool = False
    fills_stages: bool = False
    scatter_sends: bool | None = None
    overlap_sends: bool | None = None
    allocates_receives: bool = True
    optimizer_values: float = OPTIMIZER_TRAFFIC
    host_waits: bool = False
    host_operator_s: float | None = None
    host_collective_s: float | None = None
    host_collective_pipeline_s: float | None = None
    host_collective_rank_s: float = 0.0

    @staticmethod
    def load(system: str | Path) -> System:
        """Load a description by name, such as `megatron`, or from a JSON file.

        Raises OptionError if there is no such system, or an entry is invalid.
        """
        path = Path(system) if str(system).endswith(".json") else _SYSTEMS / f"{system}.json"
        if not path.exists():
            raise OptionError(f"there is no system '{system}'", why=f"the systems are {', '.join(system_names())}",
                              hint="one of these names, or the path of a JSON file in the same format")  # fmt: skip
        text = read_text(path, "a system", OptionError, _FORM)
        return _checked(parse_json(text, str(path), OptionError, _FORM), str(path))


AUTOPART = System("autopart", "its runtime")


def system_names() -> list[str]:
    """Return the names of the systems that come with autopart."""
    return sorted(path.stem for path in _SYSTEMS.glob("*.json"))


def _checked(data: Any, where: str) -> System:
    kinds: Mapping[str, Any] = {f.name: str(f.type) for f in fields(System)}
    if not isinstance(data, dict) or not {"name", "source"} <= data.keys() or not data.keys() <= kinds.keys():
        valid = ", ".join(kinds)
        raise OptionError("the system cannot be read", why=f"it needs name and source, and may have {valid}",
                          where=where, hint=_FORM)  # fmt: skip
    for name, value in data.items():
        kind = "bool" if isinstance(value, bool) else "float" if isinstance(value, int | float) else "str"
        if kind not in kinds[name] or (kind == "float" and not 0 <= value <= _MOST.get(name, 1e18)):
            raise OptionError(f"the system has {name} = {value!r}", why=f"it is not a {kinds[name]}", where=where,
                              hint=_FORM)  # fmt: skip
    return System(**data)

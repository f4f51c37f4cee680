"""Hardware profiles: JSON files with a unit and a source beside every number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autopart.errors import OptionError

_PROFILES = Path(__file__).parent / "profiles"
DEFAULT = "a100-80gb-sxm"


@dataclass(frozen=True)
class Hardware:
    """One device, the node it is in, and the links to other devices.

    `flops_per_s`: dense peak by dtype. `matmul_efficiency`: share of that peak by the FLOPs of one matrix product, as
    points between which it goes straight in the logarithm of the FLOPs. `launch_s`: what an operator takes however
    small it is. `memory_bytes`: capacity of a device. `link_`: inside a node, `node_link_`: between nodes; bytes/s per
    device and direction, latency per hop of a ring.

    The large end of the curve is measured where its `source` says so, the rest is assumed.
    """

    name: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: tuple[tuple[float, float], ...]
    launch_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    devices_per_node: int
    link_bytes_per_s: float
    link_latency_s: float
    node_link_bytes_per_s: float
    node_link_latency_s: float

    @staticmethod
    def load(profile: str | Path = DEFAULT) -> Hardware:
        """A profile by name (`a100-80gb-sxm`) or from a JSON file.

        Raises OptionError where there is no such profile, or a number is missing or cannot be.
        """
        path = Path(profile) if str(profile).endswith(".json") else _PROFILES / f"{profile}.json"
        if not path.exists():
            raise OptionError(f"there is no hardware profile '{profile}'", why=f"the profiles are {', '.join(names())}",
                              hint="a name of these, or the path of a JSON file of the same form")  # fmt: skip
        return _File(path).read()

    @property
    def matmul_flops_per_s(self) -> float:
        """The peak of matrix work in the dtype models are trained in: 16 bits where the device has them."""
        return next(self.flops_per_s[dtype] for dtype in _USUAL if dtype in self.flops_per_s)

    def known_dtype(self, dtype: str) -> str:
        """The dtype, or the slowest that there is a peak for."""
        return dtype if dtype in self.flops_per_s else min(self.flops_per_s, key=lambda known: self.flops_per_s[known])

    def efficiency(self, flops: float) -> float:
        """The share of the peak that one matrix product of so many FLOPs reaches."""
        points = self.matmul_efficiency
        if flops <= points[0][0]:
            return points[0][1]
        for (lower, low), (upper, high) in pairwise(points):
            if flops <= upper:
                return low + (high - low) * math.log(flops / lower) / math.log(upper / lower)
        return points[-1][1]

    def matmul_time_s(self, flops: float, size_bytes: float, dtype: str | torch.dtype) -> float:
        """Seconds of one matrix product that reads and writes `size_bytes`: its work or its memory traffic, whichever
        takes longer, and the launch.

        Raises OptionError where the profile has no peak for the dtype.
        """
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in self.flops_per_s:
            raise OptionError(f"hardware profile '{self.name}' has no peak for {dtype}",
                              why=f"it has {', '.join(self.flops_per_s)}",
                              hint="one of these, or a copy of the profile with that peak")  # fmt: skip
        work_s = flops / (self.flops_per_s[dtype] * self.efficiency(flops))
        return max(work_s, size_bytes / self.memory_bytes_per_s) + self.launch_s


_USUAL = ("bfloat16", "float16", "float32")


def names() -> list[str]:
    """The profiles that come with autopart."""
    return sorted(path.stem for path in _PROFILES.glob("*.json"))


@dataclass(frozen=True)
class _File:
    """A profile's file. Raises OptionError, with the number and the path, for what is no profile."""

    path: Path

    def read(self) -> Hardware:
        try:
            data = json.loads(self.path.read_text())
        except ValueError as error:
            raise self._error("cannot be read", f"it is no JSON: {error}") from error
        if not isinstance(data, dict):
            raise self._error("cannot be read", "it holds no names and numbers, as {...}")
        missing = [f.name for f in fields(Hardware) if f.name not in data]
        if missing:
            raise self._error(f"lacks {', '.join(missing)}")
        if not isinstance(data["name"], str):
            raise self._error("has no name", f"it is {data['name']!r}, not text")
        if not isinstance(data["flops_per_s"], dict) or not any(dtype in data["flops_per_s"] for dtype in _USUAL):
            raise self._error("has no peak of matrix work", f"flops_per_s has none of {', '.join(_USUAL)}")
        values: dict[str, Any] = {
            **{f.name: self._number(f.name, data[f.name]) for f in fields(Hardware) if f.type == "float"},
            "name": data["name"],
            "flops_per_s": {d: self._number(f"flops_per_s of {d}", entry) for d, entry in data["flops_per_s"].items()},
            "matmul_efficiency": self._curve(data["matmul_efficiency"]),
            "devices_per_node": self._count("devices_per_node", data["devices_per_node"]),
        }  # fmt: skip
        return Hardware(**values)

    def _value(self, name: str, entry: Any) -> Any:
        """What an entry says its value is, which has a unit and a source."""
        lacks = [key for key in ("value", "unit", "source") if not isinstance(entry, dict) or key not in entry]
        if lacks:
            raise self._error(f"says too little of {name}", f"it lacks {', '.join(lacks)}")
        return entry["value"]

    def _number(self, name: str, entry: Any) -> float:
        value = self._value(name, entry)
        if not _is_number(value):
            raise self._error(f"has {name} = {value!r}", "that is no number")
        if value <= 0:
            raise self._error(f"has {name} = {value!r}", "it is not above zero")
        return float(value)

    def _count(self, name: str, entry: Any) -> int:
        value = self._number(name, entry)
        if value != int(value):
            raise self._error(f"has {name} = {value!r}", "that is no whole number")
        return int(value)

    def _curve(self, entry: Any) -> tuple[tuple[float, float], ...]:
        value = self._value("matmul_efficiency", entry)
        if not isinstance(value, list) or not value or not all(map(_is_point, value)):
            raise self._error(f"has matmul_efficiency = {value!r}", "it is no list of points [FLOPs, share of peak]")
        points = tuple((float(flops), float(share)) for flops, share in value)
        outside = [list(point) for point in points if point[0] <= 0 or not 0 < point[1] <= 1]
        if outside:
            raise self._error(f"has the point {outside[0]} in matmul_efficiency",
                              "FLOPs are above zero, a share above 0 and at most 1")  # fmt: skip
        for (lower, low), (upper, high) in pairwise(points):
            if upper <= lower:
                raise self._error(f"has {upper:g} FLOPs after {lower:g} in matmul_efficiency", "FLOPs rise")
            if (high - low) / math.log(upper / lower) > low:  # the time of a product is FLOPs over the share
                why = f"from {lower:g} to {upper:g} FLOPs the share rises from {low:g} to {high:g}"
                raise self._error("has larger products that take less time", why)
        return points

    def _error(self, what: str, why: str = "") -> OptionError:
        hint = '"name": {"value": 1.0, "unit": "s", "source": "measured"} for each, as in autopart/cost/profiles'
        return OptionError(f"the hardware profile {what}", why=why, where=str(self.path), hint=hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))

"""Hardware profiles: JSON files of speeds and capacities, with a unit and a source for every number."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.common.files import read_text
from autopart.common.json_text import parse_json
from autopart.common.matrix_alignment import MOST_UNALIGNED
from autopart.errors import OptionError

if TYPE_CHECKING:
    import torch

_FORM = '"name": {"value": 1.0, "unit": "s", "source": "measured"} for each, as in autopart/cost/hardware/profiles'
_PROFILES = Path(__file__).parent / "profiles"
DEFAULT = "a100-80gb-sxm"


@dataclass(frozen=True)
class Hardware:
    """Speeds and capacities of one device, its node, and the links to other devices.

    An efficiency curve is a list of points (amount, share of a peak rate). Between points, the share is linear in the
    logarithm of the amount. The `source` of a curve tells whether its large end is measured; the rest is assumed.

    Args:
        flops_per_s: {dtype: dense peak FLOP/s}.
        matmul_efficiency: efficiency curve of one matrix product by its FLOPs, as a share of the peak FLOP/s.
        launch_s: minimum seconds of an operator.
        memory_bytes: capacity of a device.
        memory_bytes_per_s: memory bandwidth.
        devices_per_node: devices in a node.
        link_bytes_per_s, link_latency_s: links inside a node: bytes/s per device and direction, seconds per hop of a
            ring.
        node_link_bytes_per_s, node_link_latency_s: links between nodes, in the same units.
        matmul_half_depth: a product with inner dim `k` reaches `k / (k + matmul_half_depth)` of the rate that the curve
            gives; 0: no effect.
        matmul_sustained: rate of matrix products in a training step, as a share of the rate of an isolated product.
        matmul_unaligned: share of a 16-bit product's rate if rows of an operand or of the result have an odd number of
            values, such as a vocabulary of 50,257. If the number is even but no multiple of 8 (16 bytes), the share is
            raised to the power of two thirds.
        attention_half_width: fused attention with heads of width `w` reaches `w / (w + attention_half_width)` of the
            rate that the curve gives, because part of the work per score does not depend on the width.
        causal_block: causal attention of `s` queries takes `(s + causal_block) / 2s` of the time of full attention. It
            is the number of queries in a kernel's tile, or more if the work of tiles is uneven.
        overlap: share of a collective that costs no time if the collective overlaps with compute. It is below 1 because
            collectives use a part of a GPU, and 0 if the processor that computes also sends.
        memory_efficiency: efficiency curve of an operator by the bytes that it reads and writes, as a share of
            `memory_bytes_per_s`. The share is above 1 for bytes that are in a cache, and lower for newly allocated
            memory.
        in_order_efficiency: curve that replaces `memory_efficiency` for pointwise operators on contiguous tensors and
            for operands of matrix products. Empty: `memory_efficiency`.
        optimizer_efficiency: share of `memory_bytes_per_s` that the parameter update reaches.
        collectives: {kind of collective: {link field: its value for these collectives}}.
        rates_by_nodes: {kind of collective: points (nodes, bus bandwidth in bytes/s per rank)} of collectives between
            nodes, if measured. They include what links share and lose if many nodes communicate.
        host_operator_s: seconds of the CPU to issue one kernel of eager PyTorch, with its share of autograd; 0: the CPU
            is not counted.
        host_compiled_s: seconds of the CPU to issue one kernel of a compiled graph.
        host_collective_s: seconds of the CPU to issue one collective.
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
    matmul_half_depth: float = 0.0
    matmul_sustained: float = 1.0
    matmul_unaligned: float = 1.0
    attention_half_width: float = 0.0
    causal_block: float = 128.0
    overlap: float = 1.0
    memory_efficiency: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    in_order_efficiency: tuple[tuple[float, float], ...] = ()
    optimizer_efficiency: float = 1.0
    collectives: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    rates_by_nodes: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict, hash=False)
    host_operator_s: float = 0.0
    host_compiled_s: float = 0.0
    host_collective_s: float = 0.0

    @staticmethod
    def load(profile: str | Path = DEFAULT) -> Hardware:
        """Load a profile by name, such as `a100-80gb-sxm`, or from a JSON file.

        A profile that this process has loaded from a file can also be named. Raises OptionError if there is no such
        profile, or a number is missing or invalid.
        """
        path = Path(profile) if str(profile).endswith(".json") else _PROFILES / f"{profile}.json"
        if not path.exists() and profile in _USER_PROFILES:
            return _USER_PROFILES[str(profile)]
        if not path.exists():
            raise OptionError(f"there is no hardware profile '{profile}'", why=f"the profiles are {', '.join(names())}",
                              hint="one of these names, or the path of a JSON file in the same format")  # fmt: skip
        hardware = _File(str(path)).read()
        if path.parent != _PROFILES:
            _USER_PROFILES[hardware.name] = hardware
        return hardware

    @staticmethod
    def parse(data: Mapping[str, Any], where: str = "") -> Hardware:
        """Create a profile from the content of its JSON file.

        Args:
            where: the path, for error messages.

        Raises OptionError if a number is missing or invalid.
        """
        return _File(where).checked(data)

    @property
    def matmul_flops_per_s(self) -> float:
        """Peak FLOP/s of matrix products in the usual training dtype: 16 bits if the device has them."""
        return next(self.flops_per_s[dtype] for dtype in USUAL_DTYPES if dtype in self.flops_per_s)

    def known_dtype(self, dtype: str) -> str:
        """Return `dtype` if the profile has its peak FLOP/s, otherwise the dtype with the lowest peak."""
        return dtype if dtype in self.flops_per_s else min(self.flops_per_s, key=lambda known: self.flops_per_s[known])

    def peak_of(self, flops: Mapping[str, float]) -> tuple[float, str]:
        """Return the peak FLOP/s for a mix of dtypes, and a text that names the dtypes.

        For several dtypes, the peak is all FLOPs divided by the total seconds at each dtype's own peak, so that no
        utilisation exceeds 1. Peaks of float32 are those without TF32, which is torch's default.

        Args:
            flops: {dtype: matrix FLOPs}.

        >>> Hardware.load().peak_of({"bfloat16": 3.0}), Hardware.load().peak_of({"float32": 3.0})
        ((312000000000000.0, 'bfloat16'), (19500000000000.0, 'float32 without TF32'))
        """
        by_peak: dict[str, float] = {}
        for dtype, amount in flops.items():
            known = self.known_dtype(dtype)
            by_peak[known] = by_peak.get(known, 0.0) + amount
        total = sum(by_peak.values())
        if not total:
            return self.matmul_flops_per_s, ""
        shares = {dtype: amount / total for dtype, amount in by_peak.items() if amount > 0}
        peak = 1 / sum(share / self.flops_per_s[dtype] for dtype, share in shares.items())
        if len(shares) == 1:
            (only,) = shares
            peak = self.flops_per_s[only]
            return peak, self._describe_dtype(only, {dtype for dtype, amount in flops.items() if amount} - {only})
        largest = sorted(shares, key=lambda dtype: -shares[dtype])
        return peak, ", ".join(f"{100 * shares[dtype]:.3g} % {self._describe_dtype(dtype)}" for dtype in largest)

    def _describe_dtype(self, dtype: str, others: Collection[str] = ()) -> str:
        """Format the dtype whose peak FLOP/s is used: `float32 without TF32`.

        Args:
            others: dtypes without a peak in this profile, for which the peak of `dtype` is used.
        """
        tensor_cores = any(name in self.flops_per_s for name in USUAL_DTYPES[:2])
        words = f"{dtype} without TF32" if dtype == "float32" and tensor_cores else dtype
        return f"{words}, as there is none for {', '.join(sorted(others))}" if others else words

    def efficiency(self, flops: float, dtype: str = "") -> float:
        """Return the share of the peak that one matrix product of `flops` FLOPs reaches.

        The efficiency curve is for the usual training dtype. In a dtype with half the peak, a product takes as long as
        a product of twice the FLOPs in the usual dtype. So the function reads the curve at twice the FLOPs.
        """
        return _share(self.matmul_efficiency, flops * self.slowness(dtype)) * self.matmul_sustained

    def slowness(self, dtype: str) -> float:
        """Return the peak FLOP/s of the usual dtype (`USUAL_DTYPES`) divided by the peak of `dtype`.

        A small product, or one with a small inner dim, has a fixed overhead in seconds. In a slower dtype, the overhead
        is a smaller share of the product's seconds.
        """
        return self.matmul_flops_per_s / self.flops_per_s.get(dtype, self.matmul_flops_per_s)

    def causal_share(self, queries: float) -> float:
        """Return the duration of causal attention divided by the duration of attention without a mask.

        Args:
            queries: number of queries.
        """
        return min(1.0, (queries + self.causal_block) / (2 * queries))

    def traffic_time_s(self, size_bytes: float, in_order: bool = False) -> float:
        """Return the seconds to read and write `size_bytes` bytes in total, without the launch of the kernel.

        Args:
            in_order: True for pointwise arithmetic on contiguous tensors.
        """
        return size_bytes / (self.memory_bytes_per_s * self.memory_share(size_bytes, in_order))

    def memory_share(self, size_bytes: float, in_order: bool = False) -> float:
        """Return the share of memory bandwidth that an operator with this memory traffic reaches.

        Args:
            size_bytes: bytes that it reads and writes.
            in_order: True for pointwise arithmetic on contiguous tensors.
        """
        return _share(self.memory_points(in_order), size_bytes)

    def memory_points(self, in_order: bool) -> tuple[tuple[float, float], ...]:
        return self.in_order_efficiency if in_order and self.in_order_efficiency else self.memory_efficiency

    def links(self, kind: str) -> tuple[float, float, float, float]:
        """Return the link rates of one kind of collective.

        Returns (bytes/s inside a node, seconds per hop inside a node, bytes/s between nodes, seconds per hop between
        nodes).

        Args:
            kind: name of the collective.
        """
        of_kind = self.collectives.get(kind, {})
        rates = [of_kind.get(name, getattr(self, name)) for name in LINK_NUMBERS]
        return rates[0], rates[1], rates[2], rates[3]

    def rate_between_nodes(self, kind: str, nodes: int) -> float | None:
        """Return the measured bus bandwidth of a collective over nodes in bytes/s per rank, or None.

        Between measured numbers of nodes, it is linear in the logarithm of the number. Beyond them, it is constant.
        """
        points = self.rates_by_nodes.get(kind)
        return None if points is None or nodes == 1 else _share(points, nodes)

    def half_depth(self, kind: str, dtype: str = "") -> float:
        """Return the inner dim of a product (or head width of attention) at which its rate is half.

        Args:
            kind: "matmul" or "attention".
        """
        half = self.attention_half_width if kind == "attention" else self.matmul_half_depth
        return half / self.slowness(dtype)

    def aligned_share(self, unaligned: int) -> float:
        """Return the share of its rate that a 16-bit product reaches if its rows are not aligned to 16 bytes.

        Args:
            unaligned: penalty for the row lengths, 0 for aligned rows (`autopart.common.matrix_alignment.unaligned`).
        """
        return self.matmul_unaligned ** (unaligned / MOST_UNALIGNED)

    def matmul_time_s(
        self, flops: float, size_bytes: float, dtype: str | torch.dtype, depth: float = 0.0, kind: str = "matmul",
        unaligned: int = 0,
    ) -> float:  # fmt: skip
        """Return the seconds of one matrix product, including the kernel launch.

        The product takes the time of its compute or of its memory traffic, whichever is longer.

        Args:
            flops: FLOPs of the product.
            size_bytes: bytes read and written.
            depth: inner dim of the product, or head width if `kind` is "attention"; 0: unknown.
            kind: "matmul" or "attention".
            unaligned: penalty for the row lengths (`autopart.common.matrix_alignment.unaligned`).

        Raises OptionError if the profile has no peak for the dtype.
        """
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in self.flops_per_s:
            raise OptionError(
                f"hardware profile '{self.name}' has no peak FLOP/s for {dtype}",
                why=f"it has peaks for {', '.join(self.flops_per_s)}",
                hint="use one of these dtypes, or a copy of the profile with a peak for this one",
            )
        work_s = flops / (self.flops_per_s[dtype] * self.efficiency(flops, dtype))
        if depth:
            work_s *= 1 + self.half_depth(kind, dtype) / depth
        if unaligned:
            work_s /= self.aligned_share(unaligned)
        return max(work_s, self.traffic_time_s(size_bytes, in_order=True)) + self.launch_s


_USER_PROFILES: dict[str, Hardware] = {}
"""{name that plans store: profile that was loaded from a user's file}."""


def _share(points: tuple[tuple[float, float], ...], amount: float) -> float:
    """Return the share of a rate that an efficiency curve has at an amount.

    The share is linear in the logarithm of the amount, and constant outside the points of the curve.
    """
    if amount <= points[0][0]:
        return points[0][1]
    for (lower, low), (upper, high) in pairwise(points):
        if amount <= upper:
            return low + (high - low) * math.log(amount / lower) / math.log(upper / lower)
    return points[-1][1]


BY_NODES = "bytes_per_s_by_nodes"
"""Key of a profile's `rates_by_nodes` in its entry for a kind of collective."""
LINK_NUMBERS = ("link_bytes_per_s", "link_latency_s", "node_link_bytes_per_s", "node_link_latency_s")
USUAL_DTYPES = ("bfloat16", "float16", "float32")


def names() -> list[str]:
    """Return the names of the hardware profiles that come with autopart."""
    return sorted(path.stem for path in _PROFILES.glob("*.json"))


OPTIONAL = (
    "memory_efficiency", "collectives", "matmul_half_depth", "matmul_sustained", "matmul_unaligned",
    "attention_half_width", "causal_block", "overlap", "in_order_efficiency", "optimizer_efficiency",
    "host_operator_s", "host_compiled_s", "host_collective_s", "rates_by_nodes",
)  # fmt: skip
"""Fields that a profile may omit."""

_SHARES = "overlap", "matmul_unaligned"


@dataclass(frozen=True)
class _File:
    """Reader of the JSON file of a hardware profile.

    Its methods raise OptionError if the file is not a valid profile. The error names the invalid entry and the path.
    """

    where: str

    def read(self) -> Hardware:
        text = read_text(Path(self.where), "a hardware profile", OptionError, _FORM)
        data = parse_json(text, self.where, OptionError, _FORM)
        return self.checked(self.extended(data) if isinstance(data, dict) else data)

    def extended(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a profile and those of the profile that it `extends`."""
        name = data.get("extends")
        if name is None:
            return dict(data)
        path = _PROFILES / f"{name}.json"
        if name not in names():
            raise self._error(f"extends {name!r}", f"the profiles that can be extended are {', '.join(names())}")
        base = parse_json(path.read_text(), str(path), OptionError, _FORM)
        return {**_File(str(path)).extended(base), **data}

    def checked(self, data: Any) -> Hardware:
        if not isinstance(data, dict):
            raise self._error("cannot be read", "it is not a JSON object {...}")
        missing = [f.name for f in fields(Hardware) if f.name not in (*data, *OPTIONAL)]
        if missing:
            raise self._error(f"lacks {', '.join(missing)}")
        if not isinstance(data["name"], str):
            raise self._error("has no name", f"it is {data['name']!r}, not text")
        peaks = data["flops_per_s"]
        if not isinstance(peaks, dict) or not any(dtype in peaks for dtype in USUAL_DTYPES):
            raise self._error("has no peak of matrix products", f"flops_per_s has none of {', '.join(USUAL_DTYPES)}")
        values: dict[str, Any] = {
            **{f.name: self._number(f.name, data[f.name], f.name in _SHARES) for f in fields(Hardware)
               if f.type == "float" and f.name in data},
            "name": data["name"],
            "flops_per_s": {d: self._number(f"flops_per_s of {d}", entry) for d, entry in peaks.items()},
            "matmul_efficiency": self._curve("matmul_efficiency", "FLOPs", data["matmul_efficiency"]),
            "devices_per_node": self._count("devices_per_node", data["devices_per_node"]),
        }  # fmt: skip
        for name in ("memory_efficiency", "in_order_efficiency"):
            if name in data:
                values[name] = self._curve(name, "bytes", data[name], math.inf)
        if "collectives" in data:
            values["collectives"] = self._collectives(data["collectives"])
            values["rates_by_nodes"] = {
                kind: self._rates_by_nodes(kind, row[BY_NODES])
                for kind, row in data["collectives"].items()
                if BY_NODES in row
            }
        return Hardware(**values)

    def _collectives(self, entry: Any) -> dict[str, dict[str, float]]:
        rows = entry if isinstance(entry, dict) else {"": entry}
        for kind, row in rows.items():
            if not isinstance(row, dict) or not row.keys() <= {*LINK_NUMBERS, BY_NODES}:
                raise self._error(
                    f"has invalid link rates for collectives {kind!r}",
                    f"valid fields are {', '.join((*LINK_NUMBERS, BY_NODES))}",
                )
        return {
            kind: {name: self._number(f"{name} of {kind}", number) for name, number in row.items() if name != BY_NODES}
            for kind, row in rows.items()
        }

    def _rates_by_nodes(self, kind: str, entry: Any) -> tuple[tuple[float, float], ...]:
        """Return the points (nodes, bytes/s) of a collective."""
        value = self._value(f"{BY_NODES} of {kind}", entry)
        if not isinstance(value, list) or not value or not all(map(_is_point, value)):
            raise self._error(f"has {BY_NODES} of {kind} = {value!r}", "it is not a list of points [nodes, B/s]")
        points = tuple((float(nodes), float(rate)) for nodes, rate in value)
        if any(rate <= 0 for _, rate in points) or any(b <= a for (a, _), (b, _) in pairwise([(0, 0), *points])):
            raise self._error(f"has {BY_NODES} of {kind} = {value!r}", "nodes must rise, and rates be above zero")
        return points

    def _value(self, name: str, entry: Any) -> Any:
        """Return the value of an entry, which must also have a unit and a source."""
        lacks = [key for key in ("value", "unit", "source") if not isinstance(entry, dict) or key not in entry]
        if lacks:
            raise self._error(f"has an incomplete entry for {name}", f"it lacks {', '.join(lacks)}")
        return entry["value"]

    def _number(self, name: str, entry: Any, is_share: bool = False) -> float:
        value = self._value(name, entry)
        if not _is_number(value):
            raise self._error(f"has {name} = {value!r}", "that is not a number")
        if is_share and not 0 <= value <= 1:
            raise self._error(f"has {name} = {value!r}", "it is a share, from 0 to 1")
        if value <= 0 and not is_share:
            raise self._error(f"has {name} = {value!r}", "it is not above zero")
        return float(value)

    def _count(self, name: str, entry: Any) -> int:
        value = self._number(name, entry)
        if value != int(value):
            raise self._error(f"has {name} = {value!r}", "that is not an integer")
        return int(value)

    def _curve(self, name: str, unit: str, entry: Any, most: float = 1.0) -> tuple[tuple[float, float], ...]:
        """Return the points (amount, share of a rate) of an efficiency curve.

        Args:
            unit: unit of the amount.
            most: the largest valid share.
        """
        value = self._value(name, entry)
        if not isinstance(value, list) or not value or not all(map(_is_point, value)):
            raise self._error(f"has {name} = {value!r}", f"it is not a list of points [{unit}, share of peak]")
        points = tuple((float(amount), float(share)) for amount, share in value)
        outside = [list(point) for point in points if point[0] <= 0 or not 0 < point[1] <= most]
        if outside:
            limit = " and at most 1" if most == 1 else ""
            raise self._error(
                f"has the point {outside[0]} in {name}", f"{unit} must be above zero, a share above 0{limit}"
            )
        for (lower, low), (upper, high) in pairwise(points):
            if upper <= lower:
                raise self._error(f"has {upper:g} {unit} after {lower:g} in {name}", f"{unit} must rise")
            if (high - low) / math.log(upper / lower) > low:  # time = amount / share must not fall
                why = f"from {lower:g} to {upper:g} {unit} the share rises from {low:g} to {high:g}"
                larger = "larger products" if unit == "FLOPs" else "operators of more bytes"
                raise self._error(f"has {larger} that take less time", why)
        return points

    def _error(self, what: str, why: str = "") -> OptionError:
        return OptionError(f"the hardware profile {what}", why=why, where=self.where, hint=_FORM)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))

"""The cases of `test_errors.py` about hardware profiles: the call, and the exact text it must give."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo import skip_mlp

import autopart
from autopart.cost.hardware import profile
from autopart.cost.hardware.profile import Hardware

FILE = Path(tempfile.gettempdir()) / f"autopart-{os.getpid()}.json"
A100 = json.loads((Path(profile.__file__).parent / "profiles" / "a100-80gb-sxm.json").read_text())
TRY = (
    '\n  try    "name": {"value": 1.0, "unit": "s", "source": "measured"} for each, as in '
    "autopart/cost/hardware/profiles"
)
WHERE = f"\n  where  {FILE}{TRY}"


def text(content: str) -> Callable[[], Any]:
    """A case: plan by a profile whose file holds this."""

    def case() -> Any:
        FILE.write_text(content)
        model, batch = skip_mlp()
        try:
            return autopart.plan(model, "tp2", example_kwargs=batch, hardware=str(FILE))
        finally:
            FILE.unlink()

    return case


def edited(**entries: Any) -> Callable[[], Any]:
    """A case: a profile in which these entries are others; None: left out."""
    return text(json.dumps({name: entry for name, entry in {**A100, **entries}.items() if entry is not None}))


def value(name: str, number: Any) -> Callable[[], Any]:
    """A case: a profile in which a number is another."""
    return edited(**{name: {**A100[name], "value": number}})


def curve(*points: Any) -> Callable[[], Any]:
    return value("matmul_efficiency", list(points))


def measurements(data: Any) -> Callable[[], Any]:
    """A case: a profile of measurements that are none."""

    def case() -> Any:
        FILE.write_text(json.dumps(data))
        try:
            return autopart.calibrate(of=FILE)
        finally:
            FILE.unlink()

    return case


PROFILE = "OptionError: the hardware profile "
A_DEVICE = {"name": "", "kind": "cpu", "software": "", "memory_bytes": 1, "local_ranks": 1, "num_ranks": 1}
NO_MEASUREMENTS = (
    f"OptionError: {FILE} contains no measurements\n  why    it has no 'device' and 'measured' of that form\n  try    "
    "a file that autopart calibrate --raw has written"
)


def no_profile(name: str) -> str:
    return (
        f"OptionError: there is no hardware profile '{name}'\n  why    the profiles are {', '.join(profile.names())}\n"
        "  try    one of these names, or the path of a JSON file in the same format"
    )


HARDWARE_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "hardware: no file": (lambda: Hardware.load("none.json"),
        no_profile("none.json")),
    "hardware: no JSON": (text("{"),
        f"OptionError: {FILE} is not JSON\n  why    Expecting property name enclosed in double quotes\n  where  line 1"
        f"{TRY}"),
    "hardware: a list": (text("[]"),
        f"{PROFILE}cannot be read\n  why    it is not a JSON object {{...}}{WHERE}"),
    "hardware: missing numbers": (edited(launch_s=None, node_link_latency_s=None),
        f"{PROFILE}lacks launch_s, node_link_latency_s{WHERE}"),
    "hardware: a number for a name": (edited(name=3),
        f"{PROFILE}has no name\n  why    it is 3, not text{WHERE}"),
    "hardware: no dtypes": (edited(flops_per_s={"fp8": A100["flops_per_s"]["bfloat16"]}),
        f"{PROFILE}has no peak of matrix products\n  why    flops_per_s has none of bfloat16, float16, float32{WHERE}"),
    "hardware: one peak for all": (edited(flops_per_s=A100["launch_s"]),
        f"{PROFILE}has no peak of matrix products\n  why    flops_per_s has none of bfloat16, float16, float32{WHERE}"),
    "hardware: no unit": (edited(launch_s={"value": 1e-6}),
        f"{PROFILE}has an incomplete entry for launch_s\n  why    it lacks unit, source{WHERE}"),
    "hardware: a bare number": (edited(launch_s=1e-6),
        f"{PROFILE}has an incomplete entry for launch_s\n  why    it lacks value, unit, source{WHERE}"),
    "hardware: text": (value("link_bytes_per_s", "300 GB/s"),
        f"{PROFILE}has link_bytes_per_s = '300 GB/s'\n  why    that is not a number{WHERE}"),
    "hardware: true": (value("link_bytes_per_s", True),
        f"{PROFILE}has link_bytes_per_s = True\n  why    that is not a number{WHERE}"),
    "hardware: infinite": (value("link_bytes_per_s", float("inf")),
        f"OptionError: {FILE} cannot be read\n  why    Infinity is not a JSON number{TRY}"),
    "hardware: zero": (value("node_link_latency_s", 0),
        f"{PROFILE}has node_link_latency_s = 0\n  why    it is not above zero{WHERE}"),
    "hardware: negative": (value("memory_bytes", -80e9),
        f"{PROFILE}has memory_bytes = -80000000000.0\n  why    it is not above zero{WHERE}"),
    "hardware: zero of a dtype": (
        edited(flops_per_s={**A100["flops_per_s"], "float32": {**A100["flops_per_s"]["float32"], "value": 0.0}}),
        f"{PROFILE}has flops_per_s of float32 = 0.0\n  why    it is not above zero{WHERE}"),
    "hardware: half a device": (value("devices_per_node", 8.5),
        f"{PROFILE}has devices_per_node = 8.5\n  why    that is not an integer{WHERE}"),
    "hardware: no curve": (curve(),
        f"{PROFILE}has matmul_efficiency = []\n  why    it is not a list of points [FLOPs, share of peak]{WHERE}"),
    "hardware: no points": (curve([1e9, 0.5], [1e12]),
        f"{PROFILE}has matmul_efficiency = [[1000000000.0, 0.5], [1000000000000.0]]\n  why    it is not a list of "
        f"points [FLOPs, share of peak]{WHERE}"),
    "hardware: per cent": (curve([1e9, 0.5], [1e12, 87.0]),
        f"{PROFILE}has the point [1000000000000.0, 87.0] in matmul_efficiency\n  why    FLOPs must be above zero, a "
        f"share above 0 and at most 1{WHERE}"),
    "hardware: points in disorder": (curve([1e12, 0.5], [1e9, 0.8]),
        f"{PROFILE}has 1e+09 FLOPs after 1e+12 in matmul_efficiency\n  why    FLOPs must rise{WHERE}"),
    "hardware: too steep": (curve([1e9, 0.1], [2e9, 0.9]),
        f"{PROFILE}has larger products that take less time\n  why    from 1e+09 to 2e+09 FLOPs the share rises from "
        f"0.1 to 0.9{WHERE}"),
    "hardware: memory rates too steep": (
        edited(memory_efficiency={**A100["matmul_efficiency"], "value": [[1e3, 0.1], [2e3, 2.0]]}),
        f"{PROFILE}has operators of more bytes that take less time\n  why    from 1000 to 2000 bytes the share rises "
        f"from 0.1 to 2{WHERE}"),
    "hardware: collectives without names": (edited(collectives=A100["launch_s"]),
        f"{PROFILE}has invalid link rates for collectives 'value'\n  why    valid fields are link_bytes_per_s, "
        f"link_latency_s, node_link_bytes_per_s, node_link_latency_s, bytes_per_s_by_nodes{WHERE}"),
    "hardware: a collective's rate of zero": (
        edited(collectives={"send": {"link_bytes_per_s": {**A100["launch_s"], "value": 0}}}),
        f"{PROFILE}has link_bytes_per_s of send = 0\n  why    it is not above zero{WHERE}"),
    "calibrate: no JSON file": (lambda: autopart.calibrate("here.yaml"),
        "OptionError: a profile cannot be written to here.yaml\n  why    its name must end in .json\n  try    "
        "here.json"),
    "calibrate: no folder": (lambda: autopart.calibrate("/no/such/folder/here.json"),
        "OptionError: a profile cannot be written to /no/such/folder/here.json\n  why    there is no folder "
        "/no/such/folder\n  try    a path in an existing folder"),
    "calibrate: no base": (lambda: autopart.calibrate(base="none.json"),
        no_profile("none.json")),
    "calibrate: no measurements": (measurements({"rows": []}), NO_MEASUREMENTS),
    "calibrate: measurements of something else": (
        measurements({"device": A_DEVICE, "measured": [{"rows": 1}]}), NO_MEASUREMENTS),
    "hardware: a dtype it has not": (lambda: Hardware.load("v100-32gb-sxm").matmul_time_s(1e9, 1e6, "bfloat16"),
        "OptionError: hardware profile 'v100-32gb-sxm' has no peak FLOP/s for bfloat16\n  why    it has peaks for "
        "float16, float32, "
        "float64\n  try    use one of these dtypes, or a copy of the profile with a peak for this one"),
}  # fmt: skip

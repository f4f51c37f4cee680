"""Calibration: measure this machine as a hardware profile, and report its prediction errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from autopart.common.files import read_text
from autopart.common.json_text import parse_json
from autopart.common.text import ShownAsText
from autopart.cost.hardware.profile import DEFAULT, Hardware
from autopart.errors import OptionError
from autopart.extras.calibrate.calibration import mean_error, predicted_s, profile
from autopart.extras.calibrate.machine_speed import measure
from autopart.extras.calibrate.measurement import ISSUE, Device, Measured

_FORM = "a file that autopart calibrate --raw has written"
_KINDS = {"matmul": "product", "memory": "pointwise", "memory in place": "in place", "launch": "launch"}


@dataclass(frozen=True, repr=False)
class Calibration(ShownAsText):
    """Result of `calibrate`. Print it for a table of predictions and measurements.

    Attributes:
        profile: content of the profile's file, each number with its unit and source.
        device: the measured device.
        measured: every measurement.
        hardware: the profile as an object.
    """

    profile: Mapping[str, Any]
    device: Device
    measured: Sequence[Measured] = field(repr=False)
    hardware: Hardware = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the profile. Raises OptionError if the file cannot be written."""
        check_path(path)
        _write(Path(path), _as_text(self.profile))

    def rows(self) -> list[dict[str, Any]]:
        """Return predictions and measurements for JSON, one mapping per predicted measurement.

        A mapping is `{"kind", "of", "measured_s", "predicted_s", "error", "is_held_out"}`: `kind` is an operator or a
        collective, and `of` describes its arguments. `is_held_out` is True if no number of the profile is fitted to the
        measurement.
        """
        predictions = [(row, predicted_s(row, self.hardware)) for row in self.measured if row.kind != ISSUE]
        return [
            {"kind": row.kind, "of": row.label, "measured_s": row.time_s, "predicted_s": seconds,
             "error": seconds / row.time_s - 1, "is_held_out": row.is_held_out}
            for row, seconds in predictions
        ]  # fmt: skip

    def errors(self, held_out: bool = False) -> dict[str, dict[str, float]]:
        """Return the mean and the largest relative error of predictions, for each kind of measurement.

        Args:
            held_out: True to count only measurements to which no number of the profile is fitted.
        """
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows():
            if row["is_held_out"] or not held_out:
                by_kind.setdefault(row["kind"], []).append((row["predicted_s"], row["measured_s"]))
        return {kind: dict(zip(("mean", "worst"), mean_error(rows), strict=True)) for kind, rows in by_kind.items()}

    def as_data(self) -> dict[str, Any]:
        return {
            "profile": self.profile,
            "rows": self.rows(),
            "errors": self.errors(),
            "held_out": self.errors(held_out=True),
        }

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(row["of"]) for row in rows)
        lines = [f"{self.profile['name']}: {self.device.name}, {self.device.software}"]
        lines.append(f"{'':<16} {'':<{width}} {'measured us':>12} {'predicted':>12} {'error':>7}")
        for row in rows:
            measured, predicted = (f"{row[key] * 1e6:,.1f}" for key in ("measured_s", "predicted_s"))
            kind = _KINDS.get(row["kind"], row["kind"])
            lines.append(f"{kind:<16} {row['of']:<{width}} {measured:>12} {predicted:>12} {row['error']:>+7.0%}")
        lines += [f"the host issues an operator in {row.time_s * 1e6:.1f} us" for row in self.measured
                  if row.kind == ISSUE]  # fmt: skip
        held_out = self.errors(held_out=True)
        for kind, error in self.errors().items():
            text = f"{_KINDS.get(kind, kind)}: off by {error['mean']:.0%} on average, {error['worst']:.0%} at worst"
            if kind in held_out:
                text += f"; those kept out of the fit by {held_out[kind]['mean']:.0%} on average"
            lines.append(text)
        return "\n".join(lines)


def calibrate(
    path: str | Path | None = None, *, name: str | None = None, base: str | Path | None = None, quick: bool = False,
    progress: bool = False, raw: str | Path | None = None, of: str | Path | None = None,
) -> Calibration:  # fmt: skip
    """Measure this machine as a hardware profile.

    It measures matrix products by size, shape and dtype, memory bandwidth, and the launch of an operator. Under
    `torchrun` it also measures collectives inside a node and between nodes. All ranks measure at the same time, as in a
    training step, because they share memory and caches. All ranks return equal figures, and the first rank writes the
    profile. Use as many ranks as the training that you want to predict.

    Args:
        path: file of the profile (`.json`); then `hardware=path` names it.
        name: name of the profile.  [default: the name of the file, or of the device]
        base: profile that supplies values that cannot be measured here, such as links between nodes. [default: cpu-gloo
            on a CPU, a100-80gb-sxm on a GPU]
        quick: measure only a few sizes, once. It takes seconds and is less exact.
        progress: show a bar on standard error, if that is a terminal.
        raw: file for every measurement (`.json`).
        of: a file written by `raw`. The profile is computed from it, without new measurements.

    Raises OptionError, before the measurement, if a file cannot be written.

    Example:
        >>> report = autopart.calibrate("here.json")                                         # doctest: +SKIP
        >>> autopart.plan(model, "tp2", example_kwargs=batch, hardware="here.json")          # doctest: +SKIP
    """
    for written in (path, raw):
        if written is not None:
            check_path(written)
    base_profile = Hardware.load(base) if base is not None else None
    shown = progress and os.environ.get("RANK", "0") == "0"

    def bar(tasks: list[Any]) -> Any:
        # None: no bar if stderr is not a terminal.
        return tqdm(tasks, desc="measuring", disable=None if shown else True)

    device, measured = read_measurements(of) if of is not None else measure(quick, bar)
    if raw is not None and device.rank == 0:
        _write(Path(raw), _measurements_as_text(device, measured))
    other = base_profile or Hardware.load(DEFAULT if device.kind == "cuda" else "cpu-gloo")
    called = name or (Path(path).stem if path is not None else "-".join(device.name.lower().split()))
    data = profile(called, device, measured, datetime.now(UTC).date().isoformat(), other)
    calibration = Calibration(data, device, measured, Hardware.parse(data))
    if path is not None and device.rank == 0:
        calibration.save(path)
    return calibration


def check_path(path: str | Path) -> None:
    """Raise OptionError if a profile cannot be written to a path."""
    path = Path(path)
    if path.suffix != ".json":
        raise OptionError(f"a profile cannot be written to {path}", why="its name must end in .json",
                          hint=str(path.with_suffix(".json")))  # fmt: skip
    if not path.parent.is_dir() or path.is_dir():
        why = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise OptionError(f"a profile cannot be written to {path}", why=why, hint="a path in an existing folder")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise OptionError(f"a profile cannot be written to {path}", why=error.strerror or str(error)) from None


def _as_text(data: Mapping[str, Any]) -> str:
    """Return JSON with one entry per line."""
    lines = []
    for key, entry in data.items():
        if key in ("flops_per_s", "collectives"):
            inner = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items())
            lines.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _measurements_as_text(device: Device, measured: Sequence[Measured]) -> str:
    """Return JSON with one measurement per line."""
    rows = ",\n".join(f"    {json.dumps(_without_defaults(row))}" for row in measured)
    return f'{{\n  "device": {json.dumps(asdict(device))},\n  "measured": [\n{rows}\n  ]\n}}\n'


def _without_defaults(row: Measured) -> dict[str, Any]:
    usual = asdict(Measured(row.kind))
    return {name: value for name, value in asdict(row).items() if name == "kind" or value != usual[name]}


def read_measurements(path: str | Path) -> tuple[Device, list[Measured]]:
    """Read a file that `calibrate(raw=path)` wrote. Raises OptionError for any other file."""
    text = read_text(Path(path), "measurements", OptionError, _FORM)
    data = parse_json(text, str(path), OptionError, _FORM)
    try:
        device, rows = Device(**data["device"]), data["measured"]
        return device, [Measured(**{**row, "shape": tuple(row.get("shape", ()))}) for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = "it has no 'device' and 'measured' of that form"
        raise OptionError(f"{path} contains no measurements", why=why, hint=_FORM) from error

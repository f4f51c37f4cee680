"""Hardware profiles: JSON files with a unit and a source beside every number."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from autopart.errors import OptionError

_PROFILES = Path(__file__).parent / "profiles"
DEFAULT = "a100-80gb-sxm"


@dataclass(frozen=True)
class Hardware:
    """What one device and its links do at their peak.

    `matmul_flops_per_s`: dense 16-bit matrix work. `memory_bytes_per_s`: device memory. `link_bytes_per_s`: to the
    other devices, per direction. `link_latency_s`: per hop of a ring.
    """

    name: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float

    @staticmethod
    def load(profile: str | Path = DEFAULT) -> Hardware:
        """A profile by name (`a100-80gb-sxm`) or from a JSON file.

        Raises OptionError where there is no such profile or the file lacks a number.
        """
        path = Path(profile) if str(profile).endswith(".json") else _PROFILES / f"{profile}.json"
        names = ", ".join(sorted(p.stem for p in _PROFILES.glob("*.json")))
        if not path.exists():
            raise OptionError(f"there is no hardware profile '{profile}'", why=f"the profiles are {names}",
                              hint="a name of these, or the path of a JSON file of the same form")  # fmt: skip
        data = json.loads(path.read_text())
        missing = [f.name for f in fields(Hardware) if f.name not in data]
        if missing:
            raise OptionError(f"hardware profile {path} lacks {', '.join(missing)}", hint="see cost/profiles")
        return Hardware(data["name"], *(data[f.name]["value"] for f in fields(Hardware)[1:]))

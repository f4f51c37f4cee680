"""Report on this machine: versions, backends, devices, memory, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autopart.proof.verify_estimate import available_bytes

OLDEST, NEWEST = (2, 11), (2, 13)
"""The versions of torch that are tested."""


@dataclass(frozen=True)
class Finding:
    """One line of the report on this machine.

    Args:
        ok: False if autopart needs something that is missing.
        hint: how to get what is missing.
    """

    name: str
    value: str
    ok: bool = True
    hint: str = ""


def findings() -> list[Finding]:
    """Return the lines of the report in the order of printing."""
    return [*_software(), *_backends(), *_machine()]


def as_data(results: list[Finding]) -> dict[str, Any]:
    return {"ok": all(finding.ok for finding in results), "findings": [asdict(finding) for finding in results]}


def table(results: list[Finding]) -> str:
    """Return one line per finding: `ok` or `MISSING`, its name, its value, and its hint."""
    width = max(len(finding.name) for finding in results)
    lines = []
    for finding in results:
        mark = "ok" if finding.ok else "MISSING"
        lines.append(f"{mark:<8} {finding.name:<{width}}  {finding.value}")
        if finding.hint:
            lines.append(f"{'':<8} {'':<{width}}  {finding.hint}")
    return "\n".join(lines)


def _software() -> Iterator[Finding]:
    import autopart

    yield Finding("autopart", f"{autopart.__version__} in {os.path.dirname(autopart.__file__)}")
    yield Finding("python", platform.python_version())
    yield _torch()
    transformers = _version("transformers")
    hint = "" if transformers else "pip install transformers, or name models by --model package.module:callable"
    yield Finding("transformers", transformers or "not installed: --hf-config needs it", hint=hint)


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _torch() -> Finding:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tested = f"autopart is tested with {_dotted(OLDEST)} to {_dotted(NEWEST)}"
    if version < OLDEST:
        hint = f"pip install 'torch>={_dotted(OLDEST)}'"
        return Finding("torch", f"{torch.__version__} is too old", ok=False, hint=hint)
    return Finding("torch", torch.__version__, hint=tested if version > NEWEST else "")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _backends() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("distributed", "this torch has none", ok=False, hint="a torch built with USE_DISTRIBUTED=1")
        return
    gloo = dist.is_gloo_available()
    yield Finding("gloo", "available" if gloo else "not in this torch", gloo, "" if gloo else "CPU processes need it")
    nccl, gpus = dist.is_nccl_available(), torch.cuda.is_available()
    wanted = gpus and not nccl
    yield Finding("nccl", "available" if nccl else "not in this torch", not wanted, "GPUs need it" if wanted else "")


def _machine() -> Iterator[Finding]:
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = sorted({torch.cuda.get_device_name(i) for i in range(number)})
    yield Finding("GPUs", f"{number} ({', '.join(names)})" if number else "none: ranks run on the CPU")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    several = "OMP_NUM_THREADS=1 if the machine runs as many ranks as it has cores" if threads > 1 else ""
    yield Finding("cores", f"{cores}, {threads} thread{'s' * (threads > 1)} a process", hint=several)
    yield Finding("memory", f"{available_bytes() / 1e9:.1f} GB free")

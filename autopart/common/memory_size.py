"""Parsing of sizes of memory and files, such as `80GB`."""

from __future__ import annotations

import re
from typing import Any

from autopart.errors import OptionError

_SIZE = r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(size: Any, option: str = "memory") -> int:
    """Convert a memory size, such as `"24GB"`, to bytes.

    Accepts text with a decimal unit (`"800MB"`: 10^6 bytes each) or a binary unit (`"24GiB"`: 2^30 bytes each), and
    integers, which are bytes. Raises OptionError, which names the option, for anything else.

    >>> parse_size("24GB"), parse_size("1.5 GiB"), parse_size(4096)
    (24000000000, 1610612736, 4096)
    """
    why, bytes_ = "", 0
    match = re.fullmatch(_SIZE, size, re.IGNORECASE) if isinstance(size, str) else None
    if match is not None and (match[2] or not match[3]):
        bytes_ = round(float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2].lower()])
        why = "it is not above zero"
    elif isinstance(size, int) and not isinstance(size, bool):
        bytes_, why = size, "it is not above zero"
    if bytes_ <= 0:
        hint = f"{option}='80GB', {option}='24GiB', or an integer number of bytes"
        raise OptionError(f"{option}={size!r} is not a size", why=why, hint=hint)
    return bytes_

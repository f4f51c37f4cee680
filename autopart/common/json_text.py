"""Strict parsing of JSON files that a user names.

Every fault raises an error class that the caller chooses.
"""

from __future__ import annotations

import json
import math
from typing import Any

from autopart.errors import AutopartError


def parse_json(text: str, name: str, error: type[AutopartError], hint: str = "") -> Any:
    """Parse JSON text.

    Args:
        name: what the text is, for messages, such as a path.
        error: class of the exception that is raised for text that is not JSON, for two entries with one key, for NaN
            and infinite numbers, and for too many digits or nested brackets.
        hint: advice for the message.
    """
    try:
        data = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_number, parse_int=_integer
        )
        if "\\ud" in text.lower():  # a lone surrogate, which is not valid UTF-8
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except json.JSONDecodeError as problem:
        raise error(f"{name} is not JSON", why=problem.msg, where=f"line {problem.lineno}", hint=hint) from None
    except RecursionError:
        raise error(f"{name} cannot be read", why="its brackets are nested too deeply", hint=hint) from None
    except ValueError as problem:
        raise error(f"{name} cannot be read", why=str(problem), hint=hint) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"it has two entries {shortened(key)!r}")
        entries[key] = value
    return entries


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {shortened(text)} is too large")
    return number


def _integer(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"the number {shortened(text)} is too large")
    return int(text)


def shortened(text: str) -> str:
    """Return at most 40 characters of a text, without control characters."""
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable if len(printable) <= 40 else f"{printable[:37]}..."

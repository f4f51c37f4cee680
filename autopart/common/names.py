"""Names of parameters, modules and operators, and name patterns with `*` for block numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def parents(name: str) -> list[str]:
    """Return the modules that contain a parameter or an operator, outermost first.

    >>> parents("model.layers.3.mlp/mul"), parents("lm_head.weight")
    (['model', 'model.layers', 'model.layers.3', 'model.layers.3.mlp'], ['lm_head'])
    """
    path = name.rsplit("/", 1)[0] if "/" in name else name.rpartition(".")[0]
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def first_of(names: Sequence[str]) -> str:
    """Return the first four names as text for messages, with `...` if there are more: `a, b, c, d, ...`."""
    return ", ".join(names[:4]) + ", ..." * (len(names) > 4)


def layer_of(name: str) -> int | None:
    """Return the first number in an operator's module path; None if there is none.

    >>> layer_of("transformer.h.3.attn/mul#1")
    3
    """
    return next((int(part) for part in name.split("/")[0].split(".") if part.isdigit()), None)


def pattern_of(path: str) -> str:
    """Return a path with block numbers replaced by `*`: `model.layers.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def near_names(name: str, names: Iterable[str]) -> str:
    """Return the names, as patterns, that are most similar to an unknown name.

    >>> near_names("model.atn", ["model.layers.0", "model.attn", "lm_head"])
    'model.attn'
    """
    patterns = list(dict.fromkeys(map(pattern_of, names)))
    return ", ".join(difflib.get_close_matches(pattern_of(name), patterns, 4, 0.5) or patterns[:6])

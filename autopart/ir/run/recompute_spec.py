"""Activation checkpointing: one mode for all repeated blocks, or modes by block name.

```python
recompute = "full"
recompute = {"transformer.h.[0-3]": "full", "transformer.h.*": "selective"}  # other blocks: "none"
recompute = "transformer.h.[0-3]=full,transformer.h.*=selective"  # the same as text
```

Names are patterns as in `fnmatch`; the first match applies. `"*"` also matches operators outside of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from autopart.errors import OptionError

RecomputeMode = Literal["none", "selective", "full"]
"""Part of a block that the backward recomputes: nothing, the attention core, or the full block.

An attention core has the operators from one product of activations (queries and keys) to the next (attention weights
and values). The nodes of a stage graph that are recomputed together share a number, their `region`. Regions are
numbered from 0 in every stage. All other nodes have no region.
"""

Recompute = RecomputeMode | Mapping[str, RecomputeMode]

FORM = "recompute={'model.layers.[0-3]': 'full', '*': 'none'}"
RECOMPUTE_MODES = "'none', 'selective' (the core of attention) or 'full' (every repeated block)"


def parse_recompute(recompute: Any) -> Recompute:
    """Parse the value of `recompute=`: a mode, or modes by name pattern, as a mapping or as text.

    Raises OptionError for anything else.
    """
    if recompute in get_args(RecomputeMode):
        return recompute
    if isinstance(recompute, str) and "=" in recompute:
        recompute = dict(part.strip().rpartition("=")[::2] for part in recompute.split(","))
    if not isinstance(recompute, Mapping) or not recompute:
        raise OptionError(f"unknown recompute={recompute!r}", hint=f"recompute={RECOMPUTE_MODES}")
    for name, word in recompute.items():
        if not isinstance(name, str) or not name or word not in get_args(RecomputeMode):
            raise OptionError(
                f"unknown recompute mode {word!r} for '{name}'", why=f"the modes are {RECOMPUTE_MODES}", hint=FORM
            )
    return dict(recompute)


def recompute_mode_of(recompute: Recompute, block: str) -> RecomputeMode:
    """Return the recompute mode of a block by its name; pass "" for operators outside of blocks.

    >>> recompute_mode_of({"h.[0-3]": "full", "*": "selective"}, "h.4")
    'selective'
    """
    if isinstance(recompute, str):
        return recompute
    return next((word for name, word in recompute.items() if fnmatchcase(block, name)), "none")


def recompute_modes_of(recompute: Recompute) -> set[RecomputeMode]:
    """Return all recompute modes that occur in a value of `recompute=`."""
    return {recompute} if isinstance(recompute, str) else set(recompute.values())


def text_of(recompute: Recompute) -> str:
    """Format a value of `recompute=` as text that `parse_recompute` accepts."""
    return recompute if isinstance(recompute, str) else ",".join(f"{name}={word}" for name, word in recompute.items())


def check_names(recompute: Recompute, blocks: Iterable[str], where: str = "") -> None:
    """Raise OptionError for a pattern that matches no block."""
    block_names = list(dict.fromkeys(filter(None, blocks)))
    for name in recompute if isinstance(recompute, Mapping) else ():
        if name != "*" and not any(fnmatchcase(block, name) for block in block_names):
            why = f"its blocks are {', '.join(_runs(block_names))}" if block_names else "it has no repeated blocks"
            hint = "" if block_names else "'none', 'selective' or 'full' for the whole model"
            raise OptionError(f"recompute of '{name}' matches no block of the model", why=why, where=where, hint=hint)


def _runs(blocks: Iterable[str]) -> list[str]:
    """Shorten consecutive block names to the first and last one: `transformer.h.0 to transformer.h.11`."""
    by_container: dict[str, list[str]] = {}
    for block in blocks:
        by_container.setdefault(block.rpartition(".")[0], []).append(block)
    return [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in by_container.values()]

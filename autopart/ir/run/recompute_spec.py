"""What the backward computes again, said of all repeated blocks in one word or of some by name.

```python
recompute = "full"
recompute = {"transformer.h.[0-3]": "full", "transformer.h.*": "selective"}  # other blocks: "none"
recompute = "transformer.h.[0-3]=full,transformer.h.*=selective"  # the same as text
```

Names are patterns as in `fnmatch`; what matches a block first holds for it. `"*"` also stands for what is in no block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from autopart.errors import OptionError

Word = Literal["none", "selective", "full"]
"""What the backward computes again in place of keeping it: nothing, the core of attention (what is between two products
of activations), the whole block. The nodes of a stage graph that are run again together have the same number as
`region`, from 0 in every stage; all others have none."""

Recompute = Word | Mapping[str, Word]

FORM = "recompute={'model.layers.[0-3]': 'full', '*': 'none'}"
WORDS = "'none', 'selective' (the core of attention) or 'full' (every repeated block)"


def parse_recompute(recompute: Any) -> Recompute:
    """A word, or words by pattern, as a mapping or as text. Raises OptionError for anything else."""
    if recompute in get_args(Word):
        return recompute
    if isinstance(recompute, str) and "=" in recompute:
        recompute = dict(part.strip().rpartition("=")[::2] for part in recompute.split(","))
    if not isinstance(recompute, Mapping) or not recompute:
        raise OptionError(f"unknown recompute={recompute!r}", hint=f"recompute={WORDS}")
    for name, word in recompute.items():
        if not isinstance(name, str) or not name or word not in get_args(Word):
            raise OptionError(f"recompute of '{name}' is {word!r}", why=f"it is {WORDS}", hint=FORM)
    return dict(recompute)


def word_of(recompute: Recompute, block: str) -> Word:
    """What holds for a block, by its name; for what is in no block, with "".

    >>> word_of({"h.[0-3]": "full", "*": "selective"}, "h.4")
    'selective'
    """
    if isinstance(recompute, str):
        return recompute
    return next((word for name, word in recompute.items() if fnmatchcase(block, name)), "none")


def words_of(recompute: Recompute) -> set[Word]:
    """All the words that are said."""
    return {recompute} if isinstance(recompute, str) else set(recompute.values())


def text_of(recompute: Recompute) -> str:
    """In the form that `parse_recompute` reads."""
    return recompute if isinstance(recompute, str) else ",".join(f"{name}={word}" for name, word in recompute.items())


def check_names(recompute: Recompute, blocks: Iterable[str], where: str = "") -> None:
    """Raises OptionError for a pattern that is for none of the blocks."""
    known = list(dict.fromkeys(filter(None, blocks)))
    for name in recompute if isinstance(recompute, Mapping) else ():
        if name != "*" and not any(fnmatchcase(block, name) for block in known):
            why = f"its blocks are {', '.join(_runs(known))}" if known else "it has no repeated blocks"
            hint = "" if known else "'none', 'selective' or 'full' for the whole model"
            raise OptionError(f"recompute of '{name}' matches no block of the model", why=why, where=where, hint=hint)


def _runs(blocks: Iterable[str]) -> list[str]:
    """`transformer.h.0 to transformer.h.11`: the first and last of every container."""
    by_container: dict[str, list[str]] = {}
    for block in blocks:
        by_container.setdefault(block.rpartition(".")[0], []).append(block)
    return [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in by_container.values()]

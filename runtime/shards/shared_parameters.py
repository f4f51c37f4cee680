"""Parameters that other parts of the user's program hold too: two modules of one model, each partitioned on its own,
and what stays as it was around them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopart.errors import LayoutError, UsageError
from autopart.ir.layout import Layout, format_layout


@dataclass(frozen=True)
class _Held:
    """This rank's part of a parameter, made for `model` (of class `kind`), and its layout."""

    model: weakref.ref[nn.Module]
    kind: str
    local: weakref.ref[nn.Parameter]
    mesh: str
    layout: Layout


_HELD: Any = WeakIdKeyDictionary()
"""{a model's own parameter: this rank's parts of it}; it keeps neither alive."""


def part_of_another(model: nn.Module, name: str, full: nn.Parameter, mesh: str, layout: Layout) -> nn.Parameter | None:
    """This rank's part of `full` where another module that was partitioned on its own has one: the two stay tied.

    A module inside `model`, or around it, is not another. Raises LayoutError where the two cannot be one.
    """
    for held in _HELD.get(full, ()):
        other, local = held.model(), held.local()
        if local is None or (other is not None and _related(model, other)):
            continue
        if (held.mesh, dict(held.layout)) != (mesh, dict(layout)) or "pp" in mesh:
            raise LayoutError(
                f"'{name}' of {type(model).__name__} is shared with a {held.kind} that was parallelized on its own",
                why=f"there it is {_spoken(held.layout)} on {held.mesh}, here {_spoken(layout)} on {mesh}",
                hint="parallelize the module that holds both, or use plans that store it alike on one mesh without pp",
            )
        return local
    return None


def remember(model: nn.Module, full: nn.Parameter, local: nn.Parameter, mesh: str, layout: Layout) -> None:
    """Note who has a part of a model's parameter."""
    held = [h for h in _HELD.get(full, ()) if h.local() is not None]
    _HELD[full] = [*held, _Held(weakref.ref(model), type(model).__name__, weakref.ref(local), mesh, layout)]


def check_not_originals(parameters: Iterable[Tensor], caller: str) -> None:
    """Raise UsageError if these are a model's own parameters, of which shards are trained, and none has a gradient."""
    originals = [p for p in parameters if any(held.local() is not None for held in _HELD.get(p, ()))]
    if originals and all(parameter.grad is None for parameter in originals):
        kind = next(held.kind for held in _HELD[originals[0]])
        raise UsageError(
            f"{caller} on the model's own parameters would change nothing: {kind} is partitioned",
            why="the partitioned model has parameters of its own, and only they have gradients",
            hint="make the optimizer after parallelize(): torch.optim.AdamW(pm.parameters())",
        )


def _spoken(layout: Layout) -> str:
    text = format_layout(layout)
    return "whole" if text == "{}" else text


def _related(one: nn.Module, other: nn.Module) -> bool:
    return any(m is other for m in one.modules()) or any(m is one for m in other.modules())


class Originals:
    """The model's own parameters, of which parts were copied: notices when they change afterwards, and keeps none."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[weakref.ref[Tensor], int, Callable[[Tensor], bool]]] = {}

    def add(self, name: str, full: Tensor, is_equal: Callable[[Tensor], bool]) -> None:
        """Watch a parameter. `is_equal`: whether the local one has its values, as after loading `full_state_dict()`."""
        if not full.is_inference():
            self._versions[name] = weakref.ref(full), full._version, is_equal

    def warn_of_changes(self) -> None:
        """Warn, once, of a parameter that was written after it was copied."""
        for name, (of, version, is_equal) in list(self._versions.items()):
            full = of()
            if full is not None and full._version != version:
                if is_equal(full):
                    self._versions[name] = of, full._version, is_equal
                    continue
                warnings.warn(
                    f"the model's own '{name}' was changed after autopart had copied it, and the partitioned one was "
                    "not: give the optimizer the parameters of what parallelize() returned; load weights before; and "
                    "parallelize the module that holds all that shares this parameter.", stacklevel=4,
                )  # fmt: skip
                self._versions = {}
                return

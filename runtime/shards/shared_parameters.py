"""Checks of parameters that a partitioned module shares with another one, or copied from its original.

Two modules of one model can share a parameter, and the user can partition each of them separately. The user can also
change the original model after it was partitioned.
"""

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
class _SharedShard:
    """Record of an original parameter's shard that a partitioned module stores on this rank.

    Attributes:
        model: original of the partitioned module.
        kind: class name of `model`.
        local: the shard.
    """

    model: weakref.ref[nn.Module]
    kind: str
    local: weakref.ref[nn.Parameter]
    mesh: str
    layout: Layout


_SHARED_SHARDS: Any = WeakIdKeyDictionary()
"""{parameter of an original model: this rank's shards of it}. The dict keeps no tensor alive."""


def tied_shard_of(model: nn.Module, name: str, full: nn.Parameter, mesh: str, layout: Layout) -> nn.Parameter | None:
    """Return this rank's shard of `full` if another partitioned module has created one; else None.

    Only modules outside of `model` that do not contain it count. Raises LayoutError if the other shard has another mesh
    or layout, or if the mesh has `pp`.
    """
    for shard in _SHARED_SHARDS.get(full, ()):
        owner, local = shard.model(), shard.local()
        if local is None or (owner is not None and _related(model, owner)):
            continue
        if (shard.mesh, dict(shard.layout)) != (mesh, dict(layout)) or "pp" in mesh:
            raise LayoutError(
                f"'{name}' of {type(model).__name__} is shared with a {shard.kind} that was parallelized on its own",
                why=f"its layout there is {_layout_text(shard.layout)} on {shard.mesh}, and here "
                f"{_layout_text(layout)} on {mesh}",
                hint="parallelize the module that holds both, or store it identically on one mesh without pp",
            )
        return local
    return None


def register_local(model: nn.Module, full: nn.Parameter, local: nn.Parameter, mesh: str, layout: Layout) -> None:
    """Register `local` as this rank's shard of the original model's parameter `full`."""
    alive = [h for h in _SHARED_SHARDS.get(full, ()) if h.local() is not None]
    _SHARED_SHARDS[full] = [
        *alive,
        _SharedShard(weakref.ref(model), type(model).__name__, weakref.ref(local), mesh, layout),
    ]


def check_not_originals(parameters: Iterable[Tensor], caller: str) -> None:
    """Raise UsageError if the user passed parameters of the original model, and none has a gradient.

    The user should pass the partitioned model's parameters, because only those get gradients.

    Args:
        caller: name of the function that received the parameters, for the message.
    """
    originals = [p for p in parameters if any(shard.local() is not None for shard in _SHARED_SHARDS.get(p, ()))]
    if originals and all(parameter.grad is None for parameter in originals):
        kind = next(shard.kind for shard in _SHARED_SHARDS[originals[0]])
        raise UsageError(
            f"{caller} on the model's own parameters would change nothing: {kind} is partitioned",
            why="the partitioned model has its own copies of the parameters, and only the copies have gradients",
            hint="make the optimizer after parallelize(): torch.optim.AdamW(pm.parameters())",
        )


def _layout_text(layout: Layout) -> str:
    text = format_layout(layout)
    return "replicated" if text == "{}" else text


def _related(one: nn.Module, other: nn.Module) -> bool:
    return any(m is other for m in one.modules()) or any(m is one for m in other.modules())


class OriginalParams:
    """Detects changes of the original model's parameters after they were copied to the partitioned model."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[weakref.ref[Tensor], int, Callable[[Tensor], bool]]] = {}

    def add(self, name: str, full: Tensor, is_equal: Callable[[Tensor], bool]) -> None:
        """Record a parameter of the original model, to detect later changes of it.

        Args:
            is_equal: function that returns True if the local parameter equals its shard of a full tensor. Then a change
                needs no warning. For example, the user may load `full_state_dict()` into the original model.
        """
        if not full.is_inference():
            self._versions[name] = weakref.ref(full), full._version, is_equal

    def warn_of_changes(self) -> None:
        """Warn once if a parameter of the original model was written after it was copied."""
        for name, (of, version, is_equal) in list(self._versions.items()):
            full = of()
            if full is not None and full._version != version:
                if is_equal(full):
                    self._versions[name] = of, full._version, is_equal
                    continue
                warnings.warn(
                    f"the model's own '{name}' was changed after autopart had copied it, and the partitioned "
                    "model was not. Pass the optimizer the parameters of the partitioned model. Load weights before "
                    "parallelize(). "
                    "Parallelize the module that contains all users of this parameter.", stacklevel=4,
                )  # fmt: skip
                self._versions = {}
                return

"""Modes and plain attributes of single layers that a trace depends on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from autopart.common.scoped import attributes
from autopart.tracing.python.recorded_reads import PLAIN


class LayerSetting(NamedTuple):
    """A plain attribute of the layer at `path`.

    `text` is its `repr`: 1, 1.0 and True are different settings.
    """

    path: str
    name: str
    text: str
    value: Any


class Settings(NamedTuple):
    """The layers of a model that differ from the mode or the attributes of the model.

    Args:
        layers: paths of the layers that are in the other mode than the model.
        values: attributes that differ from the model's own.
    """

    layers: tuple[str, ...] = ()
    values: tuple[LayerSetting, ...] = ()


NO_SETTINGS = Settings()
"""All layers are in the model's mode, with the model's attributes."""


def is_plain(value: Any) -> bool:
    """Return True for immutable data: numbers, strings, similar values, and tuples of them."""
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def plain_attributes(layer: nn.Module) -> dict[str, Any]:
    """Return {name: value} of the plain attributes of a layer, its mode included."""
    return {name: value for name, value in vars(layer).items() if is_plain(value)}


def digest(settings: Settings) -> str:
    """Return a short text that is equal for equal settings only."""
    return f"layers {zlib.crc32(repr(settings).encode()):08x}"


def settings_of(model: nn.Module) -> Settings:
    """Return the current settings of a model's layers."""
    others = [path for path, layer in model.named_modules() if layer.training != model.training]
    return Settings(tuple(sorted(others)))


def with_values(model: nn.Module, settings: Settings) -> AbstractContextManager[None]:
    """Set attributes of layers, and restore the earlier ones at the end. Modes do not change."""
    return attributes({(model.get_submodule(path), name): value for path, name, _, value in settings.values})


@contextmanager
def in_modes(model: nn.Module, training: bool, settings: Settings) -> Iterator[None]:
    """Set modes and attributes of a model's layers, and restore the earlier ones at the end."""
    others = set(settings.layers)
    modes = {(layer, "training"): training != (path in others) for path, layer in model.named_modules()}
    with with_values(model, settings), attributes(modes):
        yield


def restore_attributes(layer: nn.Module, before: dict[str, Any]) -> None:
    """Undo changes of the plain attributes of a layer since `before`, which `plain_attributes` returned."""
    own = vars(layer)
    for name in plain_attributes(layer).keys() - before.keys():
        del own[name]
    own.update(before)

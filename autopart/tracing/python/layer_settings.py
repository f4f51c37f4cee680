"""Train or eval mode and plain attributes (numbers, strings) of layers, on which a trace depends."""

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
    """The value of one plain attribute of the layer at `path`.

    `text` is the value's `repr`. It distinguishes 1, 1.0 and True, which are equal in Python.
    """

    path: str
    name: str
    text: str
    value: Any


class Settings(NamedTuple):
    """Train or eval modes and attributes of single layers that differ from the model's.

    Args:
        layers: paths of the layers in eval mode if the model is in train mode, or in train mode if it is in eval mode.
        values: attributes whose values in the partitioned model differ from those in the user's model.
    """

    layers: tuple[str, ...] = ()
    values: tuple[LayerSetting, ...] = ()


NO_SETTINGS = Settings()
"""Settings if all layers have the model's mode, and the attributes of the user's model."""


def is_plain(value: Any) -> bool:
    """Return True for immutable data: numbers, strings, dtypes and the like, and tuples of these."""
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def plain_attributes(layer: nn.Module) -> dict[str, Any]:
    """Return {name: value} of a layer's attributes with immutable values, including `training`."""
    return {name: value for name, value in vars(layer).items() if is_plain(value)}


def digest(settings: Settings) -> str:
    """Return a short hash of settings, for names and comparisons."""
    return f"layers {zlib.crc32(repr(settings).encode()):08x}"


def settings_of(model: nn.Module) -> Settings:
    """Return `Settings` that list the layers whose train/eval mode differs from the model's."""
    others = [path for path, layer in model.named_modules() if layer.training != model.training]
    return Settings(tuple(sorted(others)))


def with_values(model: nn.Module, settings: Settings) -> AbstractContextManager[None]:
    """Set attributes of layers (not train/eval modes) in a `with` block; restore them at its end."""
    return attributes({(model.get_submodule(path), name): value for path, name, _, value in settings.values})


@contextmanager
def in_modes(model: nn.Module, training: bool, settings: Settings) -> Iterator[None]:
    """Set train or eval modes and attributes of layers in a `with` block; restore them at its end."""
    others = set(settings.layers)
    modes = {(layer, "training"): training != (path in others) for path, layer in model.named_modules()}
    with with_values(model, settings), attributes(modes):
        yield


def restore_attributes(layer: nn.Module, before: dict[str, Any]) -> None:
    """Reset a layer's plain attributes to `before`, an earlier result of `plain_attributes`."""
    own = vars(layer)
    for name in plain_attributes(layer).keys() - before.keys():
        del own[name]
    own.update(before)

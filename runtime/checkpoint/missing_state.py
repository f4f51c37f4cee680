"""Optimizer state that a checkpoint lacks, because its parameter had never had a gradient when it was saved.

torch's `get_state_dict` makes state for every parameter before a load, and its distributed checkpoint then asks for
all of it. Here a parameter whose state is not in the checkpoint at all is left out of the load, and has no state after
`optimizer.load_state_dict`, as when it was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_OWNERS: Any = WeakIdKeyDictionary()
"""{tensor: the name of the parameter whose state it is}."""
_ABSENT: Any = WeakIdKeyDictionary()
"""{tensor: whether the last checkpoint that was read for it did not have it}."""
_STATE = "state"


def belongs_to(value: Tensor, name: str) -> None:
    """Note whose state a tensor is, if no `ShardTensor` says so."""
    _OWNERS[value] = name


def never_saved(state_dict: Mapping[str, Any], saved: Collection[str]) -> set[str]:
    """Return the keys of optimizer state of the parameters of which a checkpoint has none, and mark their tensors.

    Args:
        state_dict: what is to be loaded, flat.
        saved: the keys of the checkpoint. One without any state of an optimizer is another mistake, and torch's.
    """
    by_head: dict[tuple[str, str], dict[str, Any]] = {}
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            _ABSENT.pop(value, None)
            if (head := _head(key, value)) is not None:
                by_head.setdefault(head, {})[key] = value
    left_out = set[str]()
    for (optimizer, prefix), values in by_head.items():
        if any(key.startswith(prefix) for key in saved) or not any(key.startswith(optimizer) for key in saved):
            continue
        for value in values.values():
            _ABSENT[value] = True
        left_out |= values.keys()
    return left_out


def _head(key: str, value: Tensor) -> tuple[str, str] | None:
    """Return (`optimizer.state.`, `optimizer.state.layer.weight.`) of `optimizer.state.layer.weight.exp_avg`."""
    name = _OWNERS.get(value) or getattr(getattr(value, "place", None), "name", None)
    marker = f"{_STATE}.{name}."
    if name is None or f".{marker}" not in f".{key}":
        return None
    start = f".{key}".index(f".{marker}")
    return key[: start + len(_STATE) + 1], key[: start + len(marker)]


def without_absent(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's state without that of parameters that the checkpoint lacked."""
    return {index: values for index, values in state.items() if not _is_absent(values)}


def _is_absent(values: Any) -> bool:
    tensors = values.values() if isinstance(values, Mapping) else ()
    return any(value in _ABSENT for value in tensors if isinstance(value, Tensor))

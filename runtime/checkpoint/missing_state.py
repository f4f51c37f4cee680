"""Parameters without optimizer state in a checkpoint, because they had no gradient before the save.

Before a load, torch's `get_state_dict` creates state for every parameter. Then `torch.distributed.checkpoint` fails if
the checkpoint lacks the state of a parameter. This module excludes such parameters from the load. After
`optimizer.load_state_dict` they have no state, as at the save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_OWNERS: Any = WeakIdKeyDictionary()
"""{tensor of optimizer state: name of its parameter}."""
_ABSENT: Any = WeakIdKeyDictionary()
"""{tensor: True} for state tensors that are absent from the checkpoint that was loaded last."""
_STATE = "state"


def record_parameter_of(value: Tensor, name: str) -> None:
    """Record that the tensor `value` of optimizer state belongs to the parameter `name`."""
    _OWNERS[value] = name


def keys_without_state(state_dict: Mapping[str, Any], saved: Collection[str]) -> set[str]:
    """Return the optimizer state keys of all parameters that have no state in a checkpoint.

    Also marks the tensors under these keys, so that `without_absent` removes them after the load.

    Args:
        state_dict: the flat state dict to load.
        saved: the keys of the checkpoint. If the checkpoint has no optimizer state at all, the result is empty, and
            torch reports the error.
    """
    by_head: dict[tuple[str, str], dict[str, Any]] = {}
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            _ABSENT.pop(value, None)
            if (head := _split_key(key, value)) is not None:
                by_head.setdefault(head, {})[key] = value
    left_out = set[str]()
    for (optimizer, prefix), values in by_head.items():
        if any(key.startswith(prefix) for key in saved) or not any(key.startswith(optimizer) for key in saved):
            continue
        for value in values.values():
            _ABSENT[value] = True
        left_out |= values.keys()
    return left_out


def _split_key(key: str, value: Tensor) -> tuple[str, str] | None:
    """Return the prefixes of an optimizer state key: (prefix of the optimizer, prefix of the parameter).

    For example, `optimizer.state.layer.weight.exp_avg` gives (`optimizer.state.`, `optimizer.state.layer.weight.`).
    """
    name = _OWNERS.get(value) or getattr(getattr(value, "place", None), "name", None)
    marker = f"{_STATE}.{name}."
    if name is None or f".{marker}" not in f".{key}":
        return None
    start = f".{key}".index(f".{marker}")
    return key[: start + len(_STATE) + 1], key[: start + len(marker)]


def without_absent(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's state without the parameters whose state the loaded checkpoint lacked."""
    return {index: values for index, values in state.items() if not _is_absent(values)}


def _is_absent(values: Any) -> bool:
    tensors = values.values() if isinstance(values, Mapping) else ()
    return any(value in _ABSENT for value in tensors if isinstance(value, Tensor))

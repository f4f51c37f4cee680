"""Optimizer groups in state dicts by parameter names, if the mesh has pipeline stages.

A state dict has each group once, with the names of all stages' parameters. A group may have no parameter on a stage.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopart.runtime.checkpoint.optimizer_groups import (
    PARAMS,
    ParameterGroup,
    merge_by_index,
    options_of,
)
from autopart.runtime.comm.process_mesh import of_all_stages
from autopart.runtime.shards.shard_owners import process_among, shard_info_of

Names = Mapping[Tensor, Collection[str]]
"""{parameter of a model: its names in the model}."""

_GROUP_NAMES: Any = WeakIdKeyDictionary()
"""{optimizer: names of each group's parameters, of all stages} when torch last got its state dict."""
_GROUPS = "param_groups"


def save_by_names(call: Callable[[], Any], names: Names, optimizers: Iterable[Optimizer]) -> Any:
    """Get a state dict by parameter names, whose groups contain the names of all stages.

    A collective call along `pp`.

    Args:
        call: torch's function, which returns the state dict.
        names: the parameters of the model on this rank.
    """
    process = process_among(names)
    if process is None or "pp" not in process.groups:
        return call()
    for optimizer in optimizers:
        groups = [_by_model_names(group, names) for group in optimizer.param_groups]
        merged = merge_by_index(of_all_stages(groups, process))
        _GROUP_NAMES[optimizer] = [group.names for group in merged]
    return call()


def with_all_stages(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return groups that list the parameters of all stages, once torch has replaced indices by names.

    Returns the groups unchanged if `save_by_names` has not exchanged the names.
    """
    names = _names_of_all_stages(optimizer)
    return list(groups) if names is None else [StageGroup(*pair) for pair in zip(groups, names, strict=True)]


def _names_of_all_stages(optimizer: Optimizer) -> list[list[str]] | None:
    """Return the names of each group's parameters; None if `save_by_names` has not exchanged them."""
    names = _GROUP_NAMES.get(optimizer)
    return names if names is not None and len(names) == len(optimizer.param_groups) else None


def load_by_names(
    call: Callable[[], dict[str, Any]], names: Names, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Select one optimizer's state from a state dict by parameter names.

    A stage may have groups without parameters, which torch rejects. This function leaves them out of torch's call. Then
    it adds them with the options, such as the learning rate, that other stages load for the group.

    Args:
        call: torch's function, which returns the state of the optimizer.
        names: the parameters of the model on this rank.
        state_dict: the state dict that is loaded, flat or nested.
    """
    groups = optimizer.param_groups
    if process_among(names) is None or all(group[PARAMS] for group in groups):
        return call()
    selected: dict[str, Any] = {"state": {}, _GROUPS: []}
    if any(group[PARAMS] for group in groups):
        with _without_empty_groups(optimizer):
            selected = call()
    if selected is state_dict:  # there is no state, and torch returns all groups
        return selected
    of_all_stages = _names_of_all_stages(optimizer)
    for index, group in enumerate(groups):
        if not group[PARAMS]:
            others = of_all_stages[index] if of_all_stages is not None else []
            saved = _saved_options(others, index, len(groups), state_dict)
            selected[_GROUPS].insert(index, {**options_of(group), **saved, PARAMS: []})
    return selected


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group[PARAMS]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _saved_options(names: Sequence[str], index: int, num_groups: int, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options of a group without parameters on this stage. Empty if they are unknown.

    Args:
        names: names of the group's parameters on the other stages, if any.
        index: index of the group, among the `num_groups` groups of its optimizer.
    """
    if _GROUPS not in state_dict:  # a flat state dict has the options of each parameter
        prefixes = tuple(f"{_GROUPS}.{name}." for name in names)
        return {key[len(prefix) :]: value for key, value in state_dict.items()
                for prefix in prefixes if key.startswith(prefix)}  # fmt: skip
    saved = state_dict[_GROUPS]
    matching = next((group for group in saved if not set(names).isdisjoint(group[PARAMS])), None)
    if matching is None and len(saved) == num_groups:
        matching = saved[index]
    return {} if matching is None else options_of(matching)


def _by_model_names(group: Mapping[str, Any], names: Names) -> ParameterGroup:
    return ParameterGroup(
        [name for parameter in group[PARAMS] if (name := _name(parameter, names))], None, options_of(group)
    )


def _name(parameter: Tensor, names: Names) -> str:
    """Return a name that is equal on all stages, or "" for a parameter of another model.

    A tied parameter has several names. The partitioned model may be a submodule, so that its names have a prefix.
    """
    shard_info = shard_info_of(parameter)
    if shard_info is None:
        return ""
    for full in names.get(parameter, ()):
        for alias in (shard_info.name, *shard_info.stored.aliases):
            if f".{full}".endswith(f".{alias}"):
                return full[: len(full) - len(alias)] + shard_info.name
    return shard_info.name


class StageGroup(dict[str, Any]):
    """Parameter group in the state dict of a rank that stores only some pipeline stages.

    `torch.distributed.checkpoint.state_dict` assigns the names of the rank's parameters to the group. A checkpoint has
    each group only once, so this class adds the names of other stages' parameters.
    """

    def __init__(self, group: Mapping[str, Any], names: Sequence[str]):
        super().__init__(group)
        self._names = names

    def __setitem__(self, key: str, value: Any) -> None:
        if key == PARAMS and not any(isinstance(name, str) for name in self.get(PARAMS, ())):
            value = [*value, *(name for name in self._names if name not in value)]
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

"""Parameter groups of an optimizer by parameter names, merged over all pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopart.errors import CheckpointError
from autopart.runtime.shards.shard_owners import shard_info_of

PARAMS, PARAM_NAMES = "params", "param_names"


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of an optimizer.

    Attributes:
        names: names of the parameters in the model.
        user_names: names that the user passed to the optimizer, if any.
        options: learning rate and other options of the group.
    """

    names: list[str]
    user_names: list[str] | None
    options: dict[str, Any]


def group_of(group: Mapping[str, Any], first_name: Callable[[str], str] = str) -> ParameterGroup:
    """Return names and options of a parameter group of an optimizer on this rank.

    Raises CheckpointError for a parameter that belongs to another module.
    """
    names, labels = [], []
    for index, parameter in enumerate(group[PARAMS]):
        shard_info = shard_info_of(parameter)
        if shard_info is None and parameter.numel():
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that does not belong to this "
                "module",
                hint="one optimizer for the partitioned module, torch.optim.AdamW(pm.parameters())",
            )
        if shard_info is not None:
            names.append(first_name(shard_info.name))
            labels.append(group[PARAM_NAMES][index] if PARAM_NAMES in group else "")
    return ParameterGroup(names, labels if PARAM_NAMES in group else None, options_of(group))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, such as its learning rate."""
    return {key: _on_host(value) for key, value in group.items() if key not in (PARAMS, PARAM_NAMES)}


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def merge_by_index(stages: Sequence[Sequence[ParameterGroup]]) -> list[ParameterGroup]:
    """Merge the optimizer groups of all stages: groups with equal index become one.

    Raises CheckpointError if their options differ."""
    counts = [len(groups) for groups in stages]
    are_equal = len(set(counts)) == 1 and all(
        _same_options(group, first) for groups in stages for group, first in zip(groups, stages[0], strict=True)
    )
    if not are_equal:
        raise CheckpointError(
            "the optimizer's groups differ between pipeline stages",
            why="groups by stage: " + "; ".join(", ".join(map(_group_text, groups)) or "none" for groups in stages),
            hint="create every group on every rank, even if empty; or use pm.full_optimizer_state_dict",
        )
    return [_merged(groups) for groups in zip(*stages, strict=True)]


def merge_by_options(stages: Sequence[Sequence[ParameterGroup]]) -> list[ParameterGroup]:
    """Merge groups of all stages by index.

    If stages have different numbers of groups, merge groups with equal options instead. Raises CheckpointError if that
    is ambiguous, because a stage has two groups with equal options.
    """
    if len({len(groups) for groups in stages}) == 1 or any(
        _same_options(a, b) for groups in stages for i, a in enumerate(groups) for b in groups[:i]
    ):
        return merge_by_index(stages)
    merged: list[list[ParameterGroup]] = []
    for groups in stages:
        for group in groups:
            row = next((row for row in merged if _same_options(row[0], group)), None)
            if row is None:
                merged.append([group])
            else:
                row.append(group)
    return [_merged(row) for row in merged]


def _same_options(one: ParameterGroup, other: ParameterGroup) -> bool:
    if one.options.keys() != other.options.keys():
        return False
    pairs = ((value, other.options[key]) for key, value in one.options.items())
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def _merged(groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """Merge the groups of several stages into one group. A tied parameter appears once."""
    labels: dict[str, str] = {}
    for group in groups:
        for name, label in zip(group.names, group.user_names or [""] * len(group.names), strict=True):
            labels.setdefault(name, label)
    return ParameterGroup(
        list(labels), None if groups[0].user_names is None else list(labels.values()), groups[0].options
    )


def _group_text(group: ParameterGroup) -> str:
    options = {key: value for key, value in group.options.items() if key in ("lr", "weight_decay", "momentum")}
    return f"{len(group.names)} parameters with {options}"

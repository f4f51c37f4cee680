"""Find the tensors of a transformers model in a checkpoint, with transformers' own conversion table.

`from_pretrained` renames and converts the tensors of a checkpoint. For example, it stacks experts, or fuses gate and up
projections. This module calls transformers' conversion functions with lazy tensors.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from autopart.errors import CheckpointError
from autopart.runtime.weights.lazy_tensors import LazyTensor, UnsupportedByLazyTensor

_OLD_BUFFERS = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"
"""Buffers that earlier versions saved, and that from_pretrained ignores."""


def is_transformers(model: nn.Module) -> bool:
    """Return True for a model of transformers 5 or later, which has a table of checkpoint conversions."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel) and hasattr(model, "is_custom_code")


def matched(model: Any, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return ({name in the model's state dict: lazy tensor}, checkpoint names that the model lacks).

    Names that `from_pretrained` ignores are left out of the second result. Raises CheckpointError if a conversion
    changes values instead of only moving elements.
    """
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions: Any = importlib.import_module("transformers.conversion_mapping")
    table = conversions.get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, loading.WeightRenaming)]
    converters = {
        pattern: entry for entry in table if isinstance(entry, loading.WeightConverter)
        for pattern in entry.source_patterns
    }  # fmt: skip
    wanted, prefix = model.state_dict(), model.base_model_prefix
    # A conversion with several targets has one entry, under its first target, as in from_pretrained.
    transforms: dict[str, Any] = {}
    extra = []
    for name in sorted(tensors, key=loading.dot_natural_key):
        unique = list(dict.fromkeys(converters.values()))
        target, pattern = loading.rename_source_key(name, renamings, unique, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = loading.rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            extra.append(name)
            continue
        new = loading.WeightRenaming(name, target) if pattern is None else deepcopy(converters[pattern])
        transform = transforms.setdefault(target, new)
        transform.add_tensor(target, name, name if pattern is None else pattern, tensors[name])
    return _converted(model, transforms), _without_ignored(model, extra, "_keys_to_ignore_on_load_unexpected")


def may_not_be_missing(model: Any, names: Iterable[str]) -> list[str]:
    """Return the names in `names` that `from_pretrained` requires a checkpoint to have."""
    return _without_ignored(model, names, "_keys_to_ignore_on_load_missing")


@torch.no_grad()
def initialised(model: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Return {name: value} for parameters in `names`, initialised as by `from_pretrained`.

    Random values are drawn from torch's CPU generator, in the order in which `from_pretrained` initialises parameters
    that are not in the files. Returns {} if transformers does not define the model.
    """
    if not is_transformers(model):
        return {}
    wanted, values = set(names), {}
    for path, module, owner in _in_order("", model, model):
        own = {name: f"{path}.{name}".removeprefix(".") for name in module._parameters}
        own = {name: full for name, full in own.items() if full in wanted}
        if not own:
            continue
        filled = copy(module)
        filled._parameters = dict(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                twin = nn.Parameter(torch.empty_like(parameter, device="cpu" if name in own else "meta"))
                twin._is_hf_initialized = name not in own  # type: ignore[attr-defined]
                filled._parameters[name] = twin
        owner._init_weights(filled)
        values.update({full: filled._parameters[name].detach() for name, full in own.items()})
    return values


def _in_order(path: str, module: nn.Module, owner: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (path, module, model whose `_init_weights` initialises the module), children before parents."""
    library: Any = sys.modules["transformers.modeling_utils"]
    for name, child in module.named_children():
        inner = child if isinstance(child, library.PreTrainedModel) else owner
        yield from _in_order(f"{path}.{name}".removeprefix("."), child, inner)
    yield path, module, owner


def _converted(model: Any, transforms: Mapping[str, Any]) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    problems: dict[str, str] = {}
    for target, transform in transforms.items():
        sources = sorted(source for names in transform.layer_targets.values() for source in names)
        try:
            converted = transform.convert(target, model=model, config=model.config)
        except UnsupportedByLazyTensor as error:
            problems[target] = f"{error} of '{sources[0]}'"
            continue
        except Exception as error:  # transformers' functions may raise anything for tensors that do not fit together
            problems[target] = f"{type(error).__name__}: {error}, of '{sources[0]}'"
            continue
        tensors.update({name: value[0] if isinstance(value, list) else value for name, value in converted.items()})
    if problems:
        shown = [f"'{name}' ({why})" for name, why in list(problems.items())[:8]]
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the checkpoint cannot be read shard by shard for {', '.join(shown)}{more}",
            why=f"transformers converts it for {type(model).__name__} by computing values, not only by moving elements",
            hint="load the full model once with from_pretrained(folder), call .save_pretrained(other, "
            "save_original_format=False), and pass weights=other",
        )
    return tensors


def _without_ignored(model: Any, names: Iterable[str], patterns_attribute: str) -> list[str]:
    """Return the names in `names` that `from_pretrained` does not ignore.

    Args:
        patterns_attribute: class attribute of the model with regular expressions of names to ignore.
    """
    patterns = [_OLD_BUFFERS, *(getattr(model, patterns_attribute, None) or ())]
    passed_over = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [name for name in names if passed_over.search(name) is None]

"""Where the tensors of a transformers model lie in a checkpoint: by transformers' own table of names and conversions.

`from_pretrained` renames what is in a checkpoint and converts it (experts to a stack, gate and up to one matrix). Here
the same table and the same functions are called with tensors that stay in their files.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from autopart.errors import CheckpointError
from autopart.runtime.weights.lazy_tensors import CannotFollow, Unread

_OLD_BUFFERS = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"
"""What earlier versions saved, and from_pretrained leaves out."""


def is_transformers(model: nn.Module) -> bool:
    """Whether the model is one of transformers, of a version that converts checkpoints by a table (5 and later)."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel) and hasattr(model, "is_custom_code")


def matched(model: Any, tensors: Mapping[str, Unread]) -> tuple[dict[str, Unread], list[str]]:
    """{name in the model's state dict: its tensor}, and the names in the checkpoint that the model has no place for.

    Raises CheckpointError where a conversion needs more than moving elements.
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
    # An entry for each tensor of the model that its conversion names first: from_pretrained collects them so.
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
    return _converted(model, transforms), _meant(model, extra, "_keys_to_ignore_on_load_unexpected")


def may_not_be_missing(model: Any, names: Iterable[str]) -> list[str]:
    """Those of the names that from_pretrained asks a checkpoint for."""
    return _meant(model, names, "_keys_to_ignore_on_load_missing")


def _converted(model: Any, transforms: Mapping[str, Any]) -> dict[str, Unread]:
    unread: dict[str, Unread] = {}
    refused: dict[str, str] = {}
    for target, transform in transforms.items():
        sources = sorted(source for names in transform.layer_targets.values() for source in names)
        try:
            converted = transform.convert(target, model=model, config=model.config)
        except CannotFollow as error:
            refused[target] = f"{error} of '{sources[0]}'"
            continue
        except Exception as error:  # of the library's own functions, for tensors that do not fit together
            refused[target] = f"{type(error).__name__}: {error}, of '{sources[0]}'"
            continue
        unread.update({name: value[0] if isinstance(value, list) else value for name, value in converted.items()})
    if refused:
        shown = [f"'{name}' ({why})" for name, why in list(refused.items())[:8]]
        more = f" and {len(refused) - 8} more" if len(refused) > 8 else ""
        raise CheckpointError(
            f"the checkpoint cannot be read in parts for {', '.join(shown)}{more}",
            why=f"transformers converts it for {type(model).__name__} by more than moving parts of tensors",
            hint="from_pretrained(folder).save_pretrained(other, save_original_format=False), once where the model "
            "fits, and weights=other",
        )
    return unread


def _meant(model: Any, names: Iterable[str], attribute: str) -> list[str]:
    """The names without those that the model's class says to pass over."""
    patterns = [_OLD_BUFFERS, *(getattr(model, attribute, None) or ())]
    passed_over = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [name for name in names if passed_over.search(name) is None]

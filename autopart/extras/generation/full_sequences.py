"""Inputs of generation without a cache: the full sequence, padded on the right.

Lengths are padded to multiples of `LENGTH_STEP`, so that one program serves several lengths. In a causal model no token
attends to later tokens, so padding on the right does not change earlier logits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.extras.generation.caches import padded_length

_PADDED_WITH_ZEROS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def with_padded_tokens(
    inputs: dict[str, Any], tokens: str, config: Any, accepts: Collection[str]
) -> dict[str, Any]:  # fmt: skip
    """Return the inputs of a call with sequences padded to a multiple of `LENGTH_STEP` tokens.

    Args:
        tokens: name of the input with the tokens.
        config: config of the text model. Tokens are not padded beyond its `max_position_embeddings`.
        accepts: names of the model's inputs.
    """
    ids: Tensor = inputs[tokens]
    length = ids.shape[1]
    most = max(getattr(config, "max_position_embeddings", None) or padded_length(length), length)
    num_new = min(padded_length(length), most) - length
    prefix = "decoder_" if tokens.startswith("decoder_") else ""
    mask, positions = f"{prefix}attention_mask", f"{prefix}position_ids"
    padded = dict(inputs)
    padded[tokens] = F.pad(ids, (0, num_new) if ids.dim() == 2 else (0, 0, 0, num_new))
    given = inputs.get(mask)
    if given is None and mask in accepts:
        given = ids.new_ones(ids.shape[:2], dtype=torch.int64)
    if given is not None:
        padded[mask] = F.pad(given, (0, num_new), value=1)
    if isinstance(inputs.get(positions), Tensor):
        last = inputs[positions][..., -1:]
        padded[positions] = torch.cat([inputs[positions], last.expand(*last.shape[:-1], num_new)], dim=-1)
    for name in _PADDED_WITH_ZEROS:
        if isinstance(inputs.get(name), Tensor):
            padded[name] = F.pad(inputs[name], (0, num_new))
    if inputs.get("logits_to_keep") is not None:
        padded["logits_to_keep"] = torch.tensor([length - 1], device=ids.device)
    return padded

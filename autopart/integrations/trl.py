"""TRL's trainers for partitioned models: a language model head on vocabulary-parallel logits.

TRL replaces `model.forward` by a function that multiplies hidden states by the head's weight, in tiles. For a
partitioned model, this module computes TRL's values from the model's logits, which stay sharded over `tp`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autopart.runtime.module import ParallelModule

IGNORED = -100
NAME = "add_fused_lm_head"


def connect_trainer(kind: type) -> None:
    """Replace TRL's `add_fused_lm_head` by a function that accepts partitioned models.

    It is replaced in the Python modules that define the trainer class `kind` and its base classes.
    """
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        original = getattr(module, NAME, None)
        if original is not None and not hasattr(original, "for_partitioned"):
            setattr(module, NAME, _adding(original))


def _adding(original: Callable[..., None]) -> Callable[..., None]:
    def add(model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, ParallelModule):
            inner = model._source.model
            add_parallel_head(inner.get_base_model() if hasattr(inner, "get_base_model") else inner, *args, **kwargs)
        else:
            original(model, *args, **kwargs)

    add.for_partitioned = True  # type: ignore[attr-defined]
    return add


def add_parallel_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:  # fmt: skip
    """Replace TRL's `add_fused_lm_head`: compute the same outputs with plain operators on the logits.

    Args:
        model: the model before it was partitioned. Calls with `fused_lm_head=True` are traced with the new forward.
        temperature, outputs: arguments of TRL's `add_fused_lm_head`.
        cast_lm_head_to_fp32: True to compute probabilities in float32. The product with the head's weight stays in the
            dtype of the model.
    """
    forward = model.forward

    def with_log_probs(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None,
        num_items_in_batch: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head:
            return forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        result = forward(*args, **{**kwargs, "use_cache": False})
        logits, targets = (
            (result.logits[:, :-1], labels[:, 1:]) if shift_labels is None else (result.logits, shift_labels)
        )
        logits = (logits.float() if cast_lm_head_to_fp32 else logits) / temperature
        values = per_token(logits, targets, outputs)
        count = values["label_mask"].sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss, aux_loss = -values["log_probs"].sum() / count, getattr(result, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        output: Any = sys.modules["trl.trainer.utils"]
        return output.FusedCausalLMOutput(loss=loss, aux_loss=aux_loss, **values)

    model.forward = types.MethodType(with_log_probs, model)


def per_token(logits: torch.Tensor, labels: torch.Tensor, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the fields of TRL's `FusedCausalLMOutput` for each token.

    They are zero for tokens with an ignored label (-100).
    """
    mask, flat = labels != IGNORED, logits.flatten(0, 1)
    loss = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none").view(labels.shape)
    values = {"log_probs": -loss, "label_mask": mask}
    log_p = F.log_softmax(logits, -1) if {"entropy", "log_sum_sq_probs"} & set(outputs) else logits
    if "entropy" in outputs:
        values["entropy"] = -(log_p.exp() * log_p).sum(-1).masked_fill(~mask, 0)
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            values["log_sum_sq_probs"] = torch.logsumexp(2 * log_p.detach(), -1).masked_fill(~mask, 0)
        if "mean_logits" in outputs:
            values["mean_logits"] = logits.detach().mean(-1).masked_fill(~mask, 0)
        if "is_top1" in outputs:
            values["is_top1"] = (logits.detach().argmax(-1) == labels) & mask
    return values

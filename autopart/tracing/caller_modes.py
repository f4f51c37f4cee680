"""Modes of the caller that a trace must not run under: inference mode, and saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopart.compat.export_internals import without_saved_tensors_hooks
from autopart.compat.torch_internals import tree_map


@contextmanager
def isolated_trace() -> Iterator[None]:
    """Leave inference mode, and disable the caller's saved-tensor hooks.

    `torch.utils.checkpoint` counts the tensors that its function saves. A trace saves other tensors than the call
    itself.
    """
    with torch.inference_mode(False), without_saved_tensors_hooks():
        yield


def without_inference(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with copies of the tensors that were made in inference mode."""
    with torch.inference_mode(False):
        return dict(tree_map(_normal, dict(arguments)))


def _normal(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

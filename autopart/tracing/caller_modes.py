"""Modes of the caller that must be off during a trace: inference mode, and saved-tensor hooks."""

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
    """Leave inference mode, and disable the caller's saved-tensor hooks, inside a `with` block.

    `torch.utils.checkpoint` counts the tensors that autograd saves while its function runs. Tracing inside it would
    change this number.
    """
    with torch.inference_mode(False), without_saved_tensors_hooks():
        yield


def without_inference(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with tensors that were created in inference mode replaced by copies."""
    with torch.inference_mode(False):
        return dict(tree_map(_normal, dict(arguments)))


def _normal(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

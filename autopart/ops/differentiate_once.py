"""Check for operators whose gradient cannot be differentiated again."""

from __future__ import annotations

import torch

from autopart.errors import UsageError


def check_differentiated_once(of: str, why: str, hint: str) -> None:
    """Raise UsageError in a backward that records a graph for second derivatives (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise UsageError(f"create_graph=True with {of}", why=why, hint=hint)

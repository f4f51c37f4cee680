"""Check for operators whose gradient cannot be differentiated again."""

from __future__ import annotations

import torch

from autopart.errors import UsageError


def check_differentiated_once(of: str, why: str, hint: str) -> None:
    """Raise UsageError if the current backward runs with `create_graph=True`.

    Args:
        of: the operation whose gradient cannot be differentiated, as a noun.
        why, hint: further lines of the error.
    """
    if torch.is_grad_enabled():
        raise UsageError(f"create_graph=True is not supported with {of}", why=why, hint=hint)

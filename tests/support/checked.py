"""Checks of values as people write them, in a module whose `assert` pytest does not rewrite."""

from __future__ import annotations

import torch
from torch import Tensor


def asserts(h: Tensor) -> None:
    assert not torch.isnan(h).any()


def asserts_with_text(h: Tensor) -> None:
    assert torch.isfinite(h).all(), f"the model computes {h}"


def asserts_several(h: Tensor) -> None:
    assert not torch.isnan(h).any() and h.abs().max() < 1e9, (
        "too large"
    )  # fmt: skip


def asserts_a_name(h: Tensor) -> None:
    fine = h.isfinite().all()
    assert fine


def asserts_by_torch(h: Tensor) -> None:
    torch._assert(h.isfinite().all(), "not finite")


def raises(h: Tensor) -> None:
    if torch.isnan(h).any() or torch.isinf(h).any():
        raise ValueError(
            "not finite",
        )


def raises_after_a_call(h: Tensor) -> None:
    if not bool(h.isfinite().all()):
        print("not finite")
        raise ValueError


def raises_by_an_item(h: Tensor) -> None:
    if torch.isnan(h).any().item():
        raise ValueError


def raises_by_comparison(h: Tensor) -> None:
    if torch.allclose(h, torch.full_like(h, 1e9)):
        raise ValueError


def raises_at_last(h: Tensor) -> None:
    if h.isfinite().all():
        pass
    else:
        raise ValueError


def asserts_in_the_graph(h: Tensor) -> None:
    torch._assert_async(h.isfinite().all())


def asserts_a_number(h: Tensor) -> None:
    assert h.max().item() <= 1e9
    assert h.numel() >= (h > 0).sum().item() and h.min().item() != 2


def raises_by_a_number(h: Tensor) -> None:
    if h.min().item() < -1e9:
        raise ValueError


CHECKS = (
    asserts,
    asserts_a_number,
    raises_by_a_number,
    asserts_with_text,
    asserts_several,
    asserts_a_name,
    asserts_by_torch,
    raises,
    raises_after_a_call,
    raises_by_an_item,
    raises_by_comparison,
    raises_at_last,
    asserts_in_the_graph,
)


def fails(h: Tensor) -> None:
    assert torch.arange(4).sum() > 6, "six"

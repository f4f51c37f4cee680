"""The cases of `test_errors.py` about mixed precision: the call, and the exact text it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopart

WORDS = "'bf16' (bfloat16), 'fp16' (float16), 'fp32' (float32), or None: the model's own dtypes"
OTHER = "leave precision out, or edit the plan"


class Phases(nn.Module):
    """A model of complex numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, input: Tensor) -> Tensor:
        return (input * self.phase).abs().sum()


def planned(build: Callable[[], nn.Module] = lambda: nn.Linear(4, 4), **options: Any) -> Callable[[], Any]:
    """A case: plan a model under these options."""
    return lambda: autopart.plan(build(), "dp2", example_kwargs={"input": torch.ones(8, 4)}, **options)


def under_autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return planned(precision="bf16")()


def followed() -> Any:
    """A plan without a precision, asked for one."""
    plan = planned()()
    return autopart.verify(
        nn.Linear(4, 4), "dp2", example_kwargs={"input": torch.ones(8, 4)}, plan=plan, precision="fp16"
    )


PRECISION_CASES = {
    "precision": (planned(precision="int8"), f"OptionError: unknown precision='int8'\n  try    {WORDS}"),
    "reduce_dtype": (planned(precision="bf16", reduce_dtype="fp8"),
        f"OptionError: unknown reduce_dtype='fp8'\n  try    {WORDS}"),
    "reduce_dtype alone": (planned(reduce_dtype="bf16"),
        "OptionError: reduce_dtype='bf16' without precision=\n  why    without precision=, gradients are reduced "
        "in the dtype of their parameters\n  try    precision='bf16', or leave reduce_dtype out"),
    "precision: nothing to cast": (planned(Phases, precision="bf16"),
        "OptionError: precision='bf16' has nothing to cast\n  why    Phases has no floating-point parameter\n"
        "  try    leave precision out"),
    "precision: autocast": (under_autocast,
        "OptionError: precision='bf16' cannot be used inside torch.autocast(bfloat16)\n  why    both set the dtype "
        "in which "
        "operators compute\n  try    use one of the two; autocast regions inside the model keep their effect"),
    "precision: a plan": (followed,
        f"OptionError: precision='fp16' contradicts the plan, which has None\n  try    {OTHER}"),
}  # fmt: skip

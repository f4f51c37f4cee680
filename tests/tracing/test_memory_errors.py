"""A trace for which there is not enough memory says so, and not that the model is at fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "host": RuntimeError(f"{ALLOCATOR} 80000000000 bytes. Error code 12 (Cannot allocate memory)"),
    "python": MemoryError(),
}


class Large(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(4, 4), error

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        raise self.error
        return h


@pytest.mark.parametrize("kind", ERRORS)
def test_memory_is_named(kind):
    with pytest.raises(TraceError) as error:
        autopart.plan(Large(ERRORS[kind]), "dp2", example_kwargs={"x": torch.ones(4, 4)})
    what, why, where, hint = str(error.value).splitlines()
    assert what == "there is not enough memory to trace Large"
    assert why == f"  why    {str(ERRORS[kind]) or 'MemoryError'}"
    assert "test_memory_errors.py" in where and "raise self.error" in where
    assert hint == (
        "  try    use fewer samples or a shorter sequence in the example, or free memory: a model built on meta is "
        "traced "
        "without weights"
    )

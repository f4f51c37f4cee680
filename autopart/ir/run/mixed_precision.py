"""Mixed precision: the dtypes of compute and of gradient reduction.

Mixed precision (Micikevicius et al. 2018, arXiv:1710.03740) works as FSDP2's `MixedPrecisionPolicy(param_dtype,
reduce_dtype, output_dtype=float32, cast_forward_inputs=True)`. A parameter is stored and trained in its own dtype. Each
use casts the parameter to the compute dtype. A ZeRO shard is cast before its all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Precision:
    """Dtypes of mixed precision: `compute` for parameters and inputs, `reduce` for gradient reduction."""

    compute: torch.dtype
    reduce: torch.dtype = torch.float32

    @staticmethod
    def parse(name: str | None, reduce_name: str | None = None) -> Precision | None:
        """Return the precision with these names. Without a name, return None: the model's own dtypes.

        >>> Precision.parse("bf16")
        Precision(compute=torch.bfloat16, reduce=torch.float32)
        """
        return None if name is None else Precision(DTYPES[name], DTYPES[reduce_name or "fp32"])

    @property
    def name(self) -> str:
        return _NAMES[self.compute]

    @property
    def reduce_name(self) -> str:
        return _NAMES[self.reduce]

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter or input of dtype `dtype` is used.

        Integers and complex numbers keep their dtype.
        """
        return self.compute if dtype.is_floating_point else dtype

    def cast(self, value: Tensor) -> Tensor:
        """Cast an input of the model to the compute dtype, if it is floating point."""
        return value.to(self.computed(value.dtype))


def as_output(value: Tensor) -> Tensor:
    """Cast a floating-point output of the model to float32, as FSDP2's `output_dtype=float32` does."""
    return value.float() if value.is_floating_point() else value

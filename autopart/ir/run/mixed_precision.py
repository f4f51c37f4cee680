"""In which precision a model computes and its gradients are summed, where that is not the one its parameters have.

Mixed precision (Micikevicius et al. 2018, arXiv:1710.03740) as FSDP2's `MixedPrecisionPolicy(param_dtype,
reduce_dtype, output_dtype=float32, cast_forward_inputs=True)` has it: a parameter is stored, trained and summed as it
is, and cast where it is read, before it is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Precision:
    """`compute`: what parameters and inputs are cast to. `reduce`: what gradients are cast to before ranks sum them."""

    compute: torch.dtype
    reduce: torch.dtype = torch.float32

    @staticmethod
    def parse(name: str | None, reduce_name: str | None = None) -> Precision | None:
        """Of options or a plan; None where the model's own dtypes are computed in.

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
        """What a parameter or an input of this dtype is computed in: integers and complex numbers stay."""
        return self.compute if dtype.is_floating_point else dtype

    def cast(self, value: Tensor) -> Tensor:
        """An input as the model gets it."""
        return value.to(self.computed(value.dtype))


def as_output(value: Tensor) -> Tensor:
    """An output as the caller gets it: float32."""
    return value.float() if value.is_floating_point() else value

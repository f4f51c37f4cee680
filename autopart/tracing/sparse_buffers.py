"""Check of sparse tensors: only tensors that every rank has in full, such as buffers, may be sparse."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopart.errors import Refusal, TraceError


def check_layouts(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raise TraceError for sparse or nested inputs, sparse parameters, and layouts such as CSR."""
    for name, tensor in inputs.items():
        if tensor.is_nested:
            raise TraceError(
                f"the input '{name}' is a nested tensor", refusal=Refusal.PART,
                why="inputs are split by sample, which is not supported for nested tensors",
                hint=f"{name}.values() and {name}.offsets() as inputs, and torch.nested.nested_tensor_from_jagged in "
                "forward(); or padded rows and their lengths",
            )  # fmt: skip
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"the input '{name}' is a sparse tensor", refusal=Refusal.PART,
                why="inputs are split by sample, which is not supported for sparse tensors",
                hint=f"a buffer of the model (register_buffer), which every rank has in full; or {name}.to_dense()",
            )  # fmt: skip
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout not in (torch.strided, torch.sparse_coo) or (tensor.is_sparse and tensor.requires_grad):
            layout = str(tensor.layout).removeprefix("torch.")
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise TraceError(
                f"the {kind} '{name}' of {type(model).__name__} has the layout {layout}", refusal=Refusal.PART,
                why="the only sparse tensors that can be traced are buffers in coordinate layout (sparse_coo)",
                hint=f"register_buffer('{name.rpartition('.')[2]}', tensor.to_sparse_coo()), or to_dense()",
            )  # fmt: skip

"""Calls of every operator that writes to its first argument, and of every view, on small tensors of float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rule_samples import SAMPLES, Sample, bools, call, ints, x
from torch import Tensor, nn

aten = torch.ops.aten


def writers() -> set[str]:
    """Names of torch's operators that write to their first argument alone: `mul_`."""
    names = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if namespace != "aten" or not name.endswith("_") or name.startswith("__i"):
            continue
        schema = torch._C._get_schema(f"aten::{name}", overload)
        first = schema.arguments[0] if schema.arguments else None
        if first is not None and str(first.type) == "Tensor" and first.alias_info and first.alias_info.is_write:
            names.add(name)
    return names


SIGNED = {"low": -0.9, "high": 0.9}
WRITES = [
    call("absolute_", x(4, 6, **SIGNED)),
    call("addmm_", x(4, 6), x(4, 5), x(5, 6)),
    call("addr_", x(4, 6), x(4), x(6)),
    call("float_power_.Scalar", x(4, 6), 1.5),
    call("pow_.Tensor", x(4, 6), x(4, 6)),
    *(call(f"arc{name}_", x(4, 6)) for name in ("cos", "sin", "tan")),
    call("arctan2_", x(4, 6), x(4, 6)),
    call("divide_.Tensor", x(4, 6), x(4, 6)),
    call("fill_diagonal_", x(4, 6), 0.5),
    call("fill_diagonal_", x(4, 3), 0.5, True),
    call("fill_diagonal_", x(4, 4, 4), 0.5),
    call("fix_", x(4, 6, low=-3, high=3)),
    *(call(f"{name}_.Tensor", x(4, 6), x(4, 6)) for name in
      ("greater", "greater_equal", "less", "less_equal", "not_equal", "subtract")),
    call("index_reduce_", x(4, 6), 0, torch.tensor([2, 0, 3]), x(3, 6), "amax"),
    call("ldexp_", x(4, 6), ints(4, 6, below=3)),
    call("masked_scatter_", x(4, 6), bools(4, 6), x(24)),
    call("mvlgamma_", x(4, 6, low=2, high=3), 2),
    call("negative_", x(4, 6)),
    call("nextafter_", x(4, 6).detach(), x(4, 6).detach()),
    call("put_", x(4, 6), torch.tensor([3, 20, 7]), x(3)),
    call("put_", x(4, 6), torch.tensor([3, 3, 7]), x(3), True),
    call("renorm_", x(4, 6), 2, 0, 0.5),
    call("zero_", x(4, 6)),
    call("copy_", x(4, 6), x(6)),
    call("copy_", x(4, 6), ints(4, 6)),
    call("index_put_", x(4, 6), [torch.tensor([2, 0]), torch.tensor([1, 5])], x(2)),
    call("index_put_", x(4, 6), [bools(4, 6)], x()),
    call("masked_fill_.Tensor", x(4, 6), bools(6), x()),
]  # fmt: skip
"""Calls that `rule_samples` has no operator for, and further forms of those that it has."""

NOT_WRITTEN = {
    "no floats": """bitwise_and_ bitwise_left_shift_ bitwise_not_ bitwise_or_ bitwise_right_shift_ bitwise_xor_ gcd_
        lcm_""",
    "random, which test_random_exact.py compares": """alpha_dropout_ bernoulli_ cauchy_ dropout_ exponential_
        feature_alpha_dropout_ feature_dropout_ geometric_ log_normal_ normal_ random_ rrelu_ rrelu_with_noise_
        uniform_ _philox_normal_ _philox_uniform_ _sobol_engine_ff_ _sobol_engine_initialize_state_
        _sobol_engine_scramble_ _fill_mem_eff_dropout_mask_""",
    "the shape or the memory of a tensor, and not its values": """as_strided_ detach_ requires_grad_ resize_ resize_as_
        resize_as_sparse_ set_ sparse_resize_ sparse_resize_and_clear_ squeeze_ swapaxes_ swapdims_ t_ transpose_
        unsqueeze_ _coalesced_ _resize_output_ copy_sparse_to_sparse_""",
    "of optimizers, scalers and backends": """_add_relu_ _amp_update_scale_ _mkldnn_transpose_ embedding_renorm_""",
    "inside another operator": "_index_put_impl_",
    "without a derivative in eager PyTorch": """acosh_ arccosh_ arcsinh_ arctanh_ asinh_ atanh_ floor_divide_ igamma_
        igammac_""",
    "rejected: eager PyTorch keeps the gradient of the value before": """logical_and_ logical_not_ logical_or_
        logical_xor_""",
    "rejected: torch does not functionalize it": "polygamma_",
}
"""Operators without a call here, and why. The list may only shrink."""


def samples() -> dict[str, Sample]:
    """{name of a case: a call whose first argument can be written}, from the rules' samples and from `WRITES`."""
    cases: dict[str, Sample] = {}
    names = writers().difference(*(listed.split() for listed in NOT_WRITTEN.values()))
    for sample in (*SAMPLES, *WRITES):
        name, _, overload = sample.operator.partition(".")
        name = name if name.endswith("_") else f"{name}_"
        overload = getattr(getattr(aten, name, None), overload or "default", None)
        if name in names and overload is not None and _can_be_written(overload, sample):
            cases[str(Sample(f"{name}.{overload._overloadname}", sample.args, sample.kwargs))] = sample
    return cases


def _can_be_written(overload: Callable[..., Tensor], sample: Sample) -> bool:
    """Return True if torch itself can write a float64 tensor so, and keeps its shape."""
    target = sample.args[0]
    if not isinstance(target, Tensor) or target.dtype != torch.float64:
        return False
    try:
        return bool(overload(target.detach().clone(), *sample.args[1:], **sample.kwargs).shape == target.shape)
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return False


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a value": lambda base: base,
    "a transposed value": lambda base: base.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0),
    "a slice of a value": lambda base: torch.stack([base, base], -1)[..., 1],
}
"""Values that are written, as functions of a tensor with the shape of a sample."""

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alias": lambda v: aten.alias(v),
    "as_strided": lambda v: v.as_strided((3,), (sum(v.stride()),), v.storage_offset()),
    "as_strided of two dims": lambda v: v.as_strided((2, 2), (v.stride(0), v.stride(1)), v.storage_offset()),
    "broadcast_to": lambda v: v.broadcast_to(4, 6),
    "chunk": lambda v: v.chunk(2, 1)[0],
    "conj": lambda v: v.conj(),
    "contiguous": lambda v: v.contiguous(),
    "detach of the detached": lambda v: v,
    "diagonal": lambda v: v.diagonal(1),
    "expand": lambda v: v.expand(4, 6),
    "expand_as": lambda v: v.expand_as(v),
    "flatten": lambda v: v[None].flatten(0, 1),
    "hsplit": lambda v: v.hsplit(2)[1],
    "index": lambda v: v[None, 1:, ..., ::2],
    "linalg_diagonal": lambda v: torch.linalg.diagonal(v),
    "mH": lambda v: v.mH,
    "mT": lambda v: v.mT,
    "moveaxis": lambda v: v.moveaxis(0, 1),
    "movedim": lambda v: v.movedim(1, 0),
    "narrow": lambda v: v.narrow(1, 2, 3),
    "numpy_T": lambda v: v.T,
    "permute": lambda v: v.permute(1, 0),
    "ravel": lambda v: v[0].ravel(),
    "reshape": lambda v: v.reshape(4, 3, 2),
    "select": lambda v: v.select(1, 2),
    "slice": lambda v: v[1:, ::2],
    "split": lambda v: v.split(2, 1)[1],
    "split_with_sizes": lambda v: v.split([1, 5], 1)[1],
    "squeeze": lambda v: v.unsqueeze(1).squeeze(1),
    "swapaxes": lambda v: v.swapaxes(0, 1),
    "swapdims": lambda v: v.swapdims(0, 1),
    "t": lambda v: v.t(),
    "tensor_split": lambda v: v.tensor_split(3)[0],
    "transpose": lambda v: v.transpose(0, 1),
    "unbind": lambda v: v.unbind(1)[3],
    "unflatten": lambda v: v.unflatten(1, (3, 2)),
    "unfold": lambda v: v.unfold(1, 2, 3),
    "unsqueeze": lambda v: v.unsqueeze(1),
    "view": lambda v: v.view(4, 3, 2),
    "view_as": lambda v: v.view_as(v),
    "view_as_complex": lambda v: torch.view_as_complex(v.view(4, 3, 2)),
    "vsplit": lambda v: v.vsplit(2)[1],
    "a view of a view": lambda v: v.t()[1:4].diagonal(),
    "windows of a view": lambda v: v.t().unfold(0, 2, 2)[1:, 2:],
}
"""Views of a value [4, 6] that can be written, by the operator that makes them."""

NOT_VIEWED = {
    "sparse or nested tensors": """_indices _nested_get_values _nested_view_from_buffer _nested_view_from_jagged
        _sparse_broadcast_to _values ccol_indices coalesce col_indices crow_indices indices row_indices values""",
    "forward-mode and inside torch": """_autocast_to_full_precision _autocast_to_reduced_precision _conj _fw_primal
        _make_dual _neg_view _reshape_alias _test_autograd_multiple_dispatch_view _unpack_dual lift_fresh slice_inverse
        """,
    "copies of a value, or the value itself": "pin_memory to positive resolve_conj resolve_neg real imag view_as_real",
    "several in one case": "matrix_H adjoint dsplit reshape_as detach",
}
"""Views without a function here, and why. The list may only shrink."""


def views() -> set[str]:
    """Names of torch's operators whose result may lie in the memory of an argument that they do not write."""
    names = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if namespace == "aten":
            schema = torch._C._get_schema(f"aten::{name}", overload)
            if not schema.is_mutable and any(result.alias_info is not None for result in schema.returns):
                names.add(name)
    return names


class Written(nn.Module):
    """Values, each written in place by a function: the results are the values themselves.

    Floats are parameters, other tensors are buffers.
    """

    def __init__(self, function: Callable[..., list[Tensor]], tensors: list[Tensor]):
        super().__init__()
        self.function, self.tensors = function, len(tensors)
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self.register_parameter(f"t{i}", nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(f"t{i}", tensor.clone())

    def forward(self, one: Tensor) -> tuple[Tensor, ...]:
        tensors = [getattr(self, f"t{i}") for i in range(self.tensors)]
        return tuple(self.function(*[t * one if t.requires_grad else t for t in tensors]))

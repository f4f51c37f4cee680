"""The custom operators `torch.ops.autopart.*`: their schemas, and implementations of the local ones.

Each conversion between placements (`autopart.ir.layout.CONVERSIONS`) is one operator. Its forward is one collective or
local operation, and so is its backward. `own` returns the value on the first rank of the axis, and zeros on the others:

    all_reduce, sum_grad, own, own_grad, own_both, all_reduce_both, all_reduce_max (x, axis)
    slice, slice_pad, all_gather, all_gather_sum, reduce_scatter                   (x, axis, dim, size, sections)
    all_to_all                              (x, axis, source_dim, target_dim, source_sections, target_sections)
    axis_index                                                    (axis) -> int

Expert parallelism dispatches rows to the ranks of their experts and combines them (`expert_dispatch.py`):

    exchange_counts (expert, axis, num_experts, num_ranks) -> [2, ranks], on the CPU
    dispatch        (x, axis, expert, counts, times, num_experts)
    combine         (x, axis, expert, counts, times, num_experts)

Ring attention rotates keys and values around the ranks (`runtime/comm/ring_attention.py`):

    ring_attention  (query, axis, key, value, mask, size, sections, scale, runs)

In mixed precision, conversions of parameters have two more arguments. `x` is cast to `dtype` before it is communicated,
and its gradient is cast to `grad_dtype` before it is reduced. The gradient of `x` has the dtype of `x`. `cast`
(x, dtype) is the operator for a parameter that is not communicated.

`size` is the size of dim `dim` before it is sharded over this axis. In a program `axis` is the name of a mesh axis.
`runtime/comm/collectives.py` implements these operators on process groups.

The other operators are local:

    embedding_shard, pick_class, expert_linear   compute on a shard, given the global index of its first element
    dropout, attention_dropout                   draw the dropout mask of a shard
    window_attention, attention_runs             skip masked keys
    positions                                    computes the indices of a mask's true elements
    update_cache                                 writes keys or values to the cache of a text generation
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopart.ir import selection
from autopart.ir.collective_nodes import MOVES, OPERATORS, ROTATING, WITHOUT_BACKWARD, autopart_operator
from autopart.ir.layout import CONVERSIONS, DISPATCH_CONVERSIONS
from autopart.ops import attention_dropout, ctc_loss, grouped_matmul, key_value_cache
from autopart.ops.blockwise_attention import attention_runs
from autopart.ops.masked_attention import window_attention
from autopart.ops.seeded_random import dropout_mask, seeded

CUTTING = ("slice", "slice_pad", "all_gather", "all_gather_sum", "reduce_scatter")


def embedding_shard(weight: Tensor, ids: Tensor, start: int, padding_idx: int = -1, num_rows: int = -1) -> Tensor:
    """Look up rows in this rank's shard of an embedding table.

    The shard consists of the rows `start` to `start + weight.size(0) - 1`.

    Args:
        weight: the local shard, of shape [local rows, width].
        ids: global row indices, of any shape.
        start: global index of the first local row.
        padding_idx: global index of a row that gets no gradient. -1: no such row.
        num_rows: rows of the full table. -1: ids are not checked.
    Returns:
        Embeddings, of shape [*ids.shape, width]. Rows of other ranks are zeros, so the result is a partial sum.

    An id outside of the full table fails as in `F.embedding`: IndexError, on a GPU an assertion.
    """
    local = ids - start
    is_local = (local >= 0) & (local < weight.size(0))
    if weight.size(0) == 0:  # a rank with an empty shard runs the same operators
        weight = F.pad(weight, (0, 0, 0, 1))
    fallback: Tensor | int = 0
    if num_rows >= 0:
        fallback = torch.where((ids >= 0) & (ids < num_rows), 0, weight.size(0))
    rows = F.embedding(torch.where(is_local, local, fallback), weight) * is_local.unsqueeze(-1)
    if padding_idx < 0:
        return rows
    # The padding row keeps its value and loses its gradient.
    return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)


def dropout(x: Tensor, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Tensor:
    """Apply dropout with a reproducible mask.

    The mask depends only on the seed, the salt, the shard and the shape of `x`. So it is equal on ranks that replicate
    `x`, and independent on ranks that shard `x`.

    Args:
        x: the value.
        p: probability to drop an element.
        seed: one number, the microbatch's seed; or two numbers from `with_salt`.
        salt: number of the operator in the model. None: `seed` contains the salt.
        shard: coordinates that identify the local shard.
    """
    if type(x) is Tensor:
        return _seeded_dropout(x, p, seed, salt, shard)[0]
    # A compiler's fake tensor: `draw_mask` is opaque to the compiler, the product can be fused.
    mask = torch.ops.autopart.draw_mask(x.detach(), p, seed, salt, shard)
    return (x * mask).mul_(1 / (1 - p) if p < 1 else 0.0)


def with_salt(seed: Tensor, salt: int) -> Tensor:
    """Return a tensor of two numbers: the seed, and the salt (the number of the operator in the model)."""
    return torch.tensor([int(seed), salt])


def draw_mask(x: Tensor, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Tensor:
    """Draw the mask of `dropout` for a value with the shape of `x`; true for elements to keep.

    `torch.compile` treats this operator as opaque.
    """
    return _seeded_dropout(x, p, seed, salt, shard)[1]


def _seeded_dropout(x: Tensor, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the value after dropout, and its mask. On a GPU this is torch's single dropout kernel."""
    if not x.numel():
        return x.clone(), torch.empty_like(x, dtype=torch.bool)  # torch would return `x` itself
    if x.device.type != "cpu":
        with seeded(x.device, seed, salt, shard):
            return torch.native_dropout(x, p, True)
    mask = dropout_mask(x.detach(), p, seed, salt, shard)
    return (x * mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask


def drop(x: Tensor, noise: Tensor, p: float) -> Tensor:
    """Apply dropout with the given `noise`, which is 0 or 1 / (1 - p) for each element of `x`.

    In a 16-bit dtype the factor 1 / (1 - p) in `noise` is rounded. Torch's dropout uses this rounded factor on a CPU,
    and a float32 factor on a GPU. So on a GPU this function computes the factor again in float32.
    """
    if not _multiplies_in_float(x) or p >= 1:
        return x * noise
    return (x.float() * (noise != 0) * (1 / ctypes.c_float(1 - p).value)).to(x.dtype)


def _multiplies_in_float(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def pick_class(logits: Tensor, target: Tensor, start: int, num_classes: int = -1, ignored: int = -100) -> Tensor:
    """Return the logit of each target from this rank's shard of the classes.

    Args:
        logits: the last dim is the local classes.
        target: global class indices, of the shape of `logits` without the last dim.
        start: global index of the first local class.
        num_classes: number of all classes. -1: targets are not checked.
        ignored: target to ignore.
    Returns:
        One logit per target; 0 if the target is on another rank or is `ignored`.

    An invalid target raises IndexError as on a single device; on a GPU it is an assertion.
    """
    local = target - start
    is_local = (local >= 0) & (local < logits.size(-1))
    fallback: Tensor | int = 0
    if num_classes >= 0:  # such a target is outside every shard too, so `gather` rejects it on every rank
        in_range = (target >= 0) & (target < num_classes) | (target == ignored)
        fallback = torch.where(in_range, 0, target)
    # One class more, so that a rank with an empty shard runs the same operators.
    padded = F.pad(logits, (0, 1)) if logits.size(-1) == 0 else logits
    try:
        picked = padded.gather(-1, torch.where(is_local, local, fallback).unsqueeze(-1)).squeeze(-1)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        bad = target[~in_range].flatten()[0].item()
        raise IndexError(f"Target {bad} is out of bounds: there are {num_classes} classes.") from error
    return torch.where(is_local, picked, torch.zeros_like(picked))


def _define_operators() -> torch.library.Library:
    library = torch.library.Library("autopart", "DEF")

    def define(name: str, arguments: str, implementation: Callable[..., Any]) -> None:
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, implementation, "CompositeImplicitAutograd")

    for operator in OPERATORS:
        arguments = "Tensor x, str axis"
        if operator in CUTTING:
            arguments += ", int dim, int size, int[] sections=[]"
        elif operator == "all_to_all":
            arguments += ", int source_dim, int target_dim, int[] source_sections=[], int[] target_sections=[]"
        arguments += ", *, ScalarType? dtype=None, ScalarType? grad_dtype=None"
        library.define(f"{operator}({arguments}) -> Tensor")
    library.define("all_reduce_max(Tensor x, str axis) -> Tensor")
    for operator in DISPATCH_CONVERSIONS:
        library.define(
            f"{operator}(Tensor x, str axis, Tensor expert, Tensor counts, int times, int num_experts) -> Tensor"
        )
    library.define("exchange_counts(Tensor expert, str axis, int num_experts, int num_ranks) -> Tensor")
    library.define(
        "ring_attention(Tensor query, str axis, Tensor key, Tensor value, Tensor? mask, int size, int[] sections, "
        "float? scale=None, int[] runs=[]) -> Tensor"
    )
    library.define("axis_index(str axis) -> int")
    define("cast", "Tensor x, ScalarType dtype", Tensor.to)
    define(
        "embedding_shard", "Tensor weight, Tensor ids, int start, int padding_idx=-1, int num_rows=-1", embedding_shard
    )
    mask = "Tensor x, float p, Tensor seed, int? salt, int[] shard"
    define("dropout", mask, dropout)
    library.define(f"draw_mask({mask}) -> Tensor")
    library.impl("draw_mask", draw_mask, "CompositeExplicitAutograd")
    torch.library.register_fake("autopart::draw_mask", lambda x, *_: torch.empty_like(x, dtype=torch.bool), lib=library)
    library.define("update_cache(Tensor x, Tensor positions, str name, int length) -> Tensor")
    library.impl("update_cache", key_value_cache.update_cache, "CompositeExplicitAutograd")
    torch.library.register_fake("autopart::update_cache", key_value_cache.full_cache, lib=library)
    define("drop", "Tensor x, Tensor noise, float p", drop)
    define("pick_class", "Tensor logits, Tensor target, int start, int num_classes=-1, int ignored=-100", pick_class)
    window = "Tensor query, Tensor key, Tensor value, int before, int after, float? scale=None, bool enable_gqa=False"
    define("window_attention", window, window_attention)
    runs = "Tensor query, Tensor key, Tensor value, int[] runs, float? scale=None, bool enable_gqa=False"
    define("attention_runs", runs, attention_runs)
    dropped = (
        "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, Tensor seed, int? salt, "
        "int[] shard, bool is_causal=False, float? scale=None, bool enable_gqa=False"
    )
    define("attention_dropout", dropped, attention_dropout.attention_dropout)
    return library


LIBRARY = _define_operators()  # keep this object: torch unregisters the operators when it is freed

autopart_ops = torch.ops.autopart
"""The operators. Import them from this file, so that they are registered."""


def all_operators() -> list[str]:
    """Return the names of all custom operators in the namespace `torch.ops.autopart`."""
    local = ["cast", "draw_mask", "drop", "dropout", "embedding_shard", "pick_class", "window_attention",
             "attention_runs"]  # fmt: skip
    families = (grouped_matmul, selection, ctc_loss, attention_dropout, key_value_cache)
    return [
        *MOVES,
        *WITHOUT_BACKWARD,
        *ROTATING,
        "axis_index",
        *local,
        *(name for family in families for name in family.OPERATORS),
    ]


_OF_GRADIENTS = frozenset(c.operator for c in CONVERSIONS.values() if c.forward == "identity")


def stored_source(node: fx.Node) -> fx.Node | None:
    """Return the parameter that a gather or cast reads; None if the call reads no parameter.

    The call may read the parameter through conversions that only affect the gradient.
    """
    source = node.args[0]
    while isinstance(source, fx.Node) and autopart_operator(source) in _OF_GRADIENTS:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and source.op == "get_attr" else None


def is_cast(node: fx.Node) -> bool:
    """Return True if a node only casts a parameter to its compute dtype."""
    return autopart_operator(node) == "cast" and stored_source(node) is not None

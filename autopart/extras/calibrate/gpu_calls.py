"""Calls that are measured only on a GPU: matrix products, attention, norms, optimizers and others.

Each call has a description (`Measured`) and a maker. A maker is a function that creates the operands on a device and
returns the callable to time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.compat.torch_internals import product_of_float8
from autopart.extras.calibrate.measurement import Measured

Shape = tuple[int, int, int]
Call = Callable[[], object]
Maker = Callable[[torch.device], Call]

HIDDEN = (2048, 4096, 5120, 8192, 12288, 16384)
TENSOR_RANKS = (1, 2, 4, 8)
TOKENS = (1024, 4096, 16384)
SKINNY = (8, 16, 32, 64, 128, 256)
ODD = (1000, 2047, 2050, 3000, 3002, 4095, 4097, 4100, 4104, 4160, 5000, 5004, 7168)
VOCABULARIES = (30522, 32000, 50257, 50304, 128256)
MOST_FLOPS = 2e13
"""FLOPs of the largest product to measure. Larger ones would take as long as all others together."""

BYTES_PER_FLOP = 1e-3
"""Bytes that elementwise operators read and write per FLOP of matrix products, in eager steps of GPT-2 and Llama."""

HELD_OUT = 3
"""One in this many measurements is excluded from all fits, to estimate the prediction error."""

WEIGHT_GRADIENT, INPUT_GRADIENT, CAUSAL, DROPPED = "weight gradient", "input gradient", "causal", "dropped"


def shapes() -> list[Shape]:
    """Return more than 300 shapes (m, k, n) of matrix products.

    They include linear layers of several hidden sizes, also sharded over `tp`, products with one small dim, sizes near
    those of kernel tiles, and vocabulary heads.
    """
    layers = [
        shape for tokens in TOKENS for hidden in HIDDEN for ranks in TENSOR_RANKS
        for shape in ((tokens, hidden, 3 * hidden // ranks), (tokens, hidden // ranks, hidden),
                      (tokens, hidden, 4 * hidden // ranks), (tokens, 4 * hidden // ranks, hidden))
    ]  # fmt: skip
    skinny = [shape for size in SKINNY for shape in one_dim(size)]
    odd = [shape for size in ODD for shape in one_dim(size)]
    squares = [(size, size, size) for size in (*SKINNY, 512, 1024, 1536, 2048, 3072, *ODD, 8192)]
    heads = [(tokens, hidden, size) for tokens in TOKENS for hidden in HIDDEN[:4] for size in VOCABULARIES]
    all_shapes = dict.fromkeys([*layers, *skinny, *odd, *squares, *heads])
    return [shape for shape in all_shapes if 2 * shape[0] * shape[1] * shape[2] <= MOST_FLOPS]


def one_dim(size: int, others: int = 4096) -> Iterator[Shape]:
    """Yield the three shapes (m, k, n) in which one dim is `size` and both other dims are `others`."""
    yield from ((size, others, others), (others, size, others), (others, others, size))


def calls() -> Iterator[tuple[Measured, Maker]]:
    for index, (what, maker) in enumerate([*products(), *attention(), *pointwise(), *optimizers()]):
        yield Measured(**{**vars(what), "is_held_out": index % HELD_OUT == HELD_OUT - 1}), maker
    yield Measured("sustained", dtype="bfloat16", shape=(8192, 8192, 8192)), product((8192, 8192, 8192), torch.bfloat16)


def between() -> Iterator[tuple[Measured, Maker, Maker]]:
    """Yield matrix products to measure in alternation with a memory-bound operator.

    Back-to-back matrix products reach the GPU's power limit, which lowers its clock. In a model, memory-bound operators
    between the products use less power. Each item is (description of the product, maker of the product, maker of the
    memory-bound operator). A maker creates the operands on a device and returns the callable to time.
    """
    for tokens in (8192, 16384):
        for hidden in (1024, 2048, 4096, 8192):
            for shape in ((tokens, hidden, 4 * hidden), (tokens, 4 * hidden, hidden)):
                rows = max(1, round(2 * math.prod(shape) * BYTES_PER_FLOP / 4 / 4096))
                other = of_matrix(rows, torch.bfloat16, scaled)
                yield Measured("between", dtype="bfloat16", shape=shape), product(shape, torch.bfloat16), other


def in_turn(first: Maker, second: Maker) -> Maker:
    def make(device: torch.device) -> Call:
        calls = first(device), second(device)
        return lambda: [call() for call in calls]

    return make


def products() -> Iterator[tuple[Measured, Maker]]:
    all_shapes = shapes()
    for shape in all_shapes:
        yield Measured("matmul", dtype="bfloat16", shape=shape), product(shape, torch.bfloat16)
    for dtype, form in ((torch.float16, ""), (torch.bfloat16, INPUT_GRADIENT), (torch.bfloat16, WEIGHT_GRADIENT)):
        for shape in all_shapes[::3]:
            name = str(dtype).removeprefix("torch.")
            yield Measured("matmul", dtype=name, shape=shape, form=form), product(shape, dtype, form)
    for shape in all_shapes[1::3]:
        if not any(size % 16 for size in shape):
            yield Measured("matmul", dtype="float8_e4m3fn", shape=shape), scaled_product(shape)


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def product(shape: Shape, dtype: torch.dtype, form: str = "") -> Maker:
    """Return a maker for the matrix product of a linear layer, in its forward or backward.

    A maker is a function that creates the operands on a device and returns the callable to time.

    Args:
        shape: (m, k, n) of the product.
        dtype: dtype of the operands.
        form: "" for the forward; `INPUT_GRADIENT` or `WEIGHT_GRADIENT` for the backward, with operands stored as in a
            backward (partly transposed).
    """
    m, k, n = shape

    def make(device: torch.device) -> Call:
        if form == INPUT_GRADIENT:
            gradient, weight = random(device, dtype, m, k), random(device, dtype, k, n)
            return lambda: gradient @ weight
        if form == WEIGHT_GRADIENT:
            gradient, values = random(device, dtype, k, m), random(device, dtype, k, n)
            return lambda: gradient.t() @ values
        values, weight = random(device, dtype, m, k), random(device, dtype, n, k)
        return lambda: F.linear(values, weight)

    return make


def scaled_product(shape: Shape) -> Maker:
    """Return a maker for a float8 matrix product with one scale per operand.

    A maker is a function that creates the operands on a device and returns the callable to time.
    """
    m, k, n = shape

    def make(device: torch.device) -> Call:
        first, second = (random(device, torch.bfloat16, size, k).to(torch.float8_e4m3fn) for size in (m, n))
        scale = torch.ones((), device=device)
        return lambda: product_of_float8(first, second.t(), scale)

    return make


def attention() -> Iterator[tuple[Measured, Maker]]:
    """Yield (description, maker) for calls of attention, forward and backward.

    The calls have about 16,384 tokens and 2,048 features. A maker creates the operands and returns the callable to
    time.
    """
    for width in (64, 128):
        for tokens in (1024, 2048, 4096, 8192, 16384, 32768):
            for form in (CAUSAL, ""):
                rows, heads = max(1, 16384 // tokens), 2048 // width
                shape = rows * heads, tokens, width
                for kind in ("attention", "attention backward"):
                    what = Measured(kind, dtype="bfloat16", shape=shape, form=form)
                    yield what, attend((rows, heads, tokens, width), form == CAUSAL, kind != "attention")
    for width in (64, 128):
        for tokens in (1024, 4096):
            for kind in ("attention", "attention backward"):
                rows, heads = 16384 // tokens, 2048 // width
                what = Measured(kind, dtype="bfloat16", shape=(rows * heads, tokens, width), form=DROPPED)
                yield what, attend((rows, heads, tokens, width), False, kind != "attention", 0.1)


def attend(shape: tuple[int, int, int, int], is_causal: bool, is_backward: bool, dropout: float = 0.0) -> Maker:
    def make(device: torch.device) -> Call:
        q, k, v = (random(device, torch.bfloat16, *shape).requires_grad_(is_backward) for _ in range(3))
        if not is_backward:
            return lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return make


def pointwise() -> Iterator[tuple[Measured, Maker]]:
    """Yield (description, maker) for memory-bound operators in bfloat16 and float32.

    The description has the bytes that the operator reads and writes. Elementwise operators and transpositions have the
    kind "copy", operators with reductions over rows the kind "norm".
    """
    bf16, f32 = torch.bfloat16, torch.float32
    for elements in (2**16, 2**20, 2**22, 2**24, 2**26, 2**28):
        rows, size = elements // 4096, float(elements)
        for form, factor, maker in (
            ("cast", 6, of_matrix(rows, f32, Tensor.bfloat16)),
            ("cast up", 6, of_matrix(rows, bf16, Tensor.float)),
            ("scaled", 4, of_matrix(rows, bf16, scaled)),
            ("added", 6, of_matrix(rows, bf16, torch.add, 2)),
            ("gelu", 4, of_matrix(rows, bf16, F.gelu)),
            ("gelu backward", 6, of_matrix(rows, bf16, torch.ops.aten.gelu_backward.default, 2)),
            ("dropped", 5, of_matrix(rows, bf16, lambda x: torch.native_dropout(x, 0.1, True))),
            ("heads", 4, of_matrix(rows, bf16, heads_in_front)),
            ("transposed", 4, of_matrix(rows, bf16, lambda x: x.t().contiguous())),
        ):
            yield Measured("copy", size_bytes=factor * size, form=form), maker
        for form, factor, maker in (
            ("layer norm", 4, of_matrix(rows, bf16, lambda x: F.layer_norm(x, (4096,)))),
            ("layer norm backward", 6, norm_backward(rows)),
            ("softmax", 4, of_matrix(rows, bf16, lambda x: x.softmax(-1))),
            ("log softmax", 8, of_matrix(max(1, rows // 8), f32, lambda x: x.log_softmax(-1), columns=32768)),
            ("log softmax backward", 12, of_matrix(max(1, rows // 8), f32, log_softmax_backward, 2, 32768)),
            ("mean over features", 4, of_matrix(rows, f32, lambda x: x.mean(-1))),
            ("summed over rows", 2, of_matrix(rows, bf16, lambda x: x.sum(0))),
        ):
            yield Measured("norm", size_bytes=factor * size, form=form), maker


def scaled(x: Tensor) -> Tensor:
    return x * 0.5


def of_matrix(
    rows: int, dtype: torch.dtype, function: Callable[..., object], count: int = 1, columns: int = 4096
) -> Maker:
    """Return a maker for a call of `function` on `count` random matrices of shape [rows, columns]."""

    def make(device: torch.device) -> Call:
        matrices = [random(device, dtype, rows, columns) for _ in range(count)]
        return lambda: function(*matrices)

    return make


def heads_in_front(x: Tensor) -> Tensor:
    """Transpose a matrix whose rows are 32 heads of 128 features, so that the head dim comes first."""
    return x.view(-1, 32, 128).transpose(0, 1).contiguous()


def norm_backward(rows: int) -> Maker:
    """Return a maker for the backward of a layer norm with weight and bias."""

    def make(device: torch.device) -> Call:
        x = random(device, torch.bfloat16, rows, 4096).requires_grad_()
        weight, bias = (random(device, torch.bfloat16, 4096).requires_grad_() for _ in range(2))
        out = F.layer_norm(x, (4096,), weight, bias)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (x, weight, bias), gradient, retain_graph=True)

    return make


def log_softmax_backward(gradient: Tensor, out: Tensor) -> Tensor:
    return torch.ops.aten._log_softmax_backward_data.default(gradient, out, -1, torch.float32)


def optimizers() -> Iterator[tuple[Measured, Maker]]:
    """Yield fused AdamW updates of several numbers of parameters, each of shape 2,048 x 2,048."""
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 8, 64):
            size, name = float(count * 2**22 * dtype.itemsize), str(dtype).removeprefix("torch.")
            yield Measured("optimizer", size_bytes=size, dtype=name), updated(count, dtype)


def updated(count: int, dtype: torch.dtype) -> Maker:
    def make(device: torch.device) -> Call:
        parameters = [torch.nn.Parameter(random(device, dtype, 2048, 2048)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return torch.optim.AdamW(parameters, fused=True, capturable=True).step

    return make

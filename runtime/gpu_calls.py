"""What `measure` times on a GPU beside what it times everywhere: products of the shapes that models have, attention,
copies, norms and optimizers. A call is a description, and a function that makes what is to be timed on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from autopart.compat import product_of_float8
from autopart.ir.measurement import Measured

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
"""Larger ones are left out: they take as long as all others."""

HELD_OUT = 3
"""One in so many of these measurements is kept out of every fit."""

WEIGHT_GRADIENT, INPUT_GRADIENT, CAUSAL = "weight gradient", "input gradient", "causal"


def shapes() -> list[Shape]:
    """(m, k, n) of products, over 300: the linear layers of hidden sizes as ranks of `tp` cut them, products that are
    skinny in each dim, sizes beside those of a kernel's tiles, and heads of vocabularies."""
    layers = [
        shape for tokens in TOKENS for hidden in HIDDEN for ranks in TENSOR_RANKS
        for shape in ((tokens, hidden, 3 * hidden // ranks), (tokens, hidden // ranks, hidden),
                      (tokens, hidden, 4 * hidden // ranks), (tokens, 4 * hidden // ranks, hidden))
    ]  # fmt: skip
    skinny = [shape for size in SKINNY for shape in around(size)]
    odd = [shape for size in ODD for shape in around(size)]
    squares = [(size, size, size) for size in (*SKINNY, 512, 1024, 1536, 2048, 3072, *ODD, 8192)]
    heads = [(tokens, hidden, size) for tokens in TOKENS for hidden in HIDDEN[:4] for size in VOCABULARIES]
    every = dict.fromkeys([*layers, *skinny, *odd, *squares, *heads])
    return [shape for shape in every if 2 * shape[0] * shape[1] * shape[2] <= MOST_FLOPS]


def around(size: int, usual: int = 4096) -> Iterator[Shape]:
    """Each dim once of this size, the others as usual."""
    yield from ((size, usual, usual), (usual, size, usual), (usual, usual, size))


def calls() -> Iterator[tuple[Measured, Maker]]:
    for index, (what, maker) in enumerate([*products(), *attention(), *pointwise(), *optimizers()]):
        yield Measured(**{**vars(what), "is_held_out": index % HELD_OUT == HELD_OUT - 1}), maker
    yield Measured("sustained", dtype="bfloat16", shape=(8192, 8192, 8192)), product((8192, 8192, 8192), torch.bfloat16)


def products() -> Iterator[tuple[Measured, Maker]]:
    every = shapes()
    for shape in every:
        yield Measured("matmul", dtype="bfloat16", shape=shape), product(shape, torch.bfloat16)
    for dtype, form in ((torch.float16, ""), (torch.bfloat16, INPUT_GRADIENT), (torch.bfloat16, WEIGHT_GRADIENT)):
        for shape in every[::3]:
            name = str(dtype).removeprefix("torch.")
            yield Measured("matmul", dtype=name, shape=shape, form=form), product(shape, dtype, form)
    for shape in every[1::3]:
        if not any(size % 16 for size in shape):
            yield Measured("matmul", dtype="float8_e4m3fn", shape=shape), scaled_product(shape)


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def product(shape: Shape, dtype: torch.dtype, form: str = "") -> Maker:
    """A linear layer's, or those of its backward, which have the transposed operands of one."""
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
    """In float8, with one scale a tensor."""
    m, k, n = shape

    def make(device: torch.device) -> Call:
        first, second = (random(device, torch.bfloat16, size, k).to(torch.float8_e4m3fn) for size in (m, n))
        scale = torch.ones((), device=device)
        return lambda: product_of_float8(first, second.t(), scale)

    return make


def attention() -> Iterator[tuple[Measured, Maker]]:
    """Forward, and backward, of some 16,384 tokens and 2,048 features."""
    for width in (64, 128):
        for tokens in (1024, 2048, 4096, 8192, 16384, 32768):
            for form in (CAUSAL, ""):
                rows, heads = max(1, 16384 // tokens), 2048 // width
                shape = rows * heads, tokens, width
                for kind in ("attention", "attention backward"):
                    what = Measured(kind, dtype="bfloat16", shape=shape, form=form)
                    yield what, attend((rows, heads, tokens, width), form == CAUSAL, kind != "attention")


def attend(shape: tuple[int, int, int, int], is_causal: bool, is_backward: bool) -> Maker:
    def make(device: torch.device) -> Call:
        q, k, v = (random(device, torch.bfloat16, *shape).requires_grad_(is_backward) for _ in range(3))
        if not is_backward:
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return make


def pointwise() -> Iterator[tuple[Measured, Maker]]:
    """By the bytes that an operator reads and writes: a cast, a transposed copy, a norm of rows, a softmax of rows."""
    for size in (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28):
        rows = size // 4096
        yield Measured("copy", size_bytes=6.0 * size, form="cast"), of_matrix(rows, torch.float32, cast)
        yield Measured("copy", size_bytes=4.0 * size, form="transposed"), of_matrix(rows, torch.bfloat16, transposed)
        yield Measured("norm", size_bytes=4.0 * size, form="layer norm"), of_matrix(rows, torch.bfloat16, normed)
        yield Measured("norm", size_bytes=4.0 * size, form="softmax"), of_matrix(rows, torch.bfloat16, softmaxed)
        yield Measured("norm", size_bytes=4.0 * size, form="gelu"), of_matrix(rows, torch.bfloat16, F.gelu)


def of_matrix(rows: int, dtype: torch.dtype, function: Callable[[torch.Tensor], torch.Tensor]) -> Maker:
    def make(device: torch.device) -> Call:
        x = random(device, dtype, rows, 4096)
        return lambda: function(x)

    return make


def cast(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16()


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],))


def softmaxed(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def optimizers() -> Iterator[tuple[Measured, Maker]]:
    """Fused AdamW over tensors of 2,048 x 2,048."""
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

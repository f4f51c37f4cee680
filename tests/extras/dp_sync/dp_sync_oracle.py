"""The methods of `dp_sync=` for n ranks in one process, transcribed from their definitions in numpy float64.

Tests compare autopart's strategies with this file, so it shares no code with them. Parameters are a list of arrays, and
what each rank has of its own is a list over ranks of such lists. Nothing is changed in place. A sum over ranks is taken
in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = list[Array]
Ranks = list[Params]
Compressor = Callable[[Array], Array]
Draw = Callable[[int, int, int, tuple[int, ...]], Array]
"""Uniform numbers of [0, 1) for (step, rank, index of the parameter, its shape)."""
Mixing = Callable[[int], Array]
"""W of a step; steps count from 0. w_ij is the weight that rank i gives to what it receives from rank j."""

# ---- what ranks do with lists of arrays


def each(function: Callable[..., Array], *operands: Ranks) -> Ranks:
    """`function` of the operands' arrays, for every rank and parameter."""
    return [[function(*arrays) for arrays in zip(*params, strict=True)] for params in zip(*operands, strict=True)]


def mean(ranks: Ranks) -> Params:
    """(1/n) sum_i x_i of every parameter."""
    return [sum(arrays[1:], start=arrays[0]) / len(ranks) for arrays in zip(*ranks, strict=True)]


def mix(weights: Array, ranks: Ranks) -> Ranks:
    """x_i := sum_j w_ij x_j, on every rank."""
    return [
        [
            sum((w * x for w, x in zip(row, arrays, strict=True)), start=0 * arrays[0])
            for arrays in zip(*ranks, strict=True)
        ]
        for row in weights
    ]


def on_ranks(ranks: Ranks, num_ranks: int) -> Ranks:
    """The mean over ranks, on every one of `num_ranks`: how a checkpoint of n ranks is read on another number."""
    return [mean(ranks) for _ in range(num_ranks)]


def zeros(ranks: Ranks) -> Ranks:
    return each(np.zeros_like, ranks)


# ---- compressors of one array, flattened in C order


def identity(x: Array) -> Array:
    return x.copy()


def top_k(x: Array, ratio: float) -> Array:
    """The k = max(1, round(ratio d)) largest |x|, the lowest index first among equals; 0 elsewhere."""
    flat = x.ravel()
    k = max(1, round(ratio * flat.size))
    kept = np.argsort(-np.abs(flat), kind="stable")[:k]
    sparse = np.zeros_like(flat)
    sparse[kept] = flat[kept]
    return sparse.reshape(x.shape)


def rand_k(x: Array, indices: Sequence[int]) -> Array:
    """The k entries at `indices`, of the flat array, times d/k: unbiased over uniform draws of k indices."""
    flat = x.ravel()
    kept = np.asarray(indices, dtype=int)
    sparse = np.zeros_like(flat)
    sparse[kept] = flat[kept] * (flat.size / len(kept))
    return sparse.reshape(x.shape)


def sign(x: Array) -> Array:
    """(|x|_2 / sqrt d) sign(x), where sign(0) = +1."""
    return np.linalg.norm(x.ravel()) / np.sqrt(x.size) * np.where(x >= 0, 1.0, -1.0)


def qsgd(x: Array, levels: int, uniforms: Array) -> Array:
    """|x|_2 sign(x) l/s with l = floor(s|x| / |x|_2) plus 1 where the uniform draw is below the fraction cut off."""
    norm = np.linalg.norm(x.ravel())
    if norm == 0:
        return np.zeros_like(x)
    scaled = levels * np.abs(x) / norm
    level = np.floor(scaled) + (uniforms < scaled - np.floor(scaled))
    return norm * np.sign(x) * level / levels


def qsgd_levels(bits: int) -> int:
    """s of "qsgd:<b>bit": one of the b bits of an element is its sign, the others say its level of 0 .. s."""
    return 2 ** (bits - 1) - 1


def fcc(x: Array, compress: Compressor, rounds: int) -> Array:
    """Fast compressed communication of NEOLITHIC (2206.03665): v = 0, then `rounds` times v += C(x - v)."""
    v = np.zeros_like(x)
    for _ in range(rounds):
        v = v + compress(x - v)
    return v


# ---- gradient kinds: from each rank's gradients to those that all ranks hand to their optimizers


class GradientKind(Protocol):
    def step(self, grads: Ranks) -> Params: ...


class Mean:
    """Parallel SGD: mean g_i."""

    def step(self, grads: Ranks) -> Params:
        return mean(grads)


class Compressed:
    """No memory: mean C(g_i)."""

    def __init__(self, compress: Compressor) -> None:
        self.compress = compress

    def step(self, grads: Ranks) -> Params:
        return mean(each(self.compress, grads))


class Qsgd:
    """No memory: mean Q(g_i), with the draws of (step, rank, parameter)."""

    def __init__(self, levels: int, draw: Draw) -> None:
        self.levels, self.draw, self.num_steps = levels, draw, 0

    def step(self, grads: Ranks) -> Params:
        sent = [
            [qsgd(g, self.levels, self.draw(self.num_steps, rank, param, g.shape)) for param, g in enumerate(params)]
            for rank, params in enumerate(grads)
        ]
        self.num_steps += 1
        return mean(sent)


class ErrorFeedback:
    """MEM-SGD, the memory in the gradient as in torch's hooks: p_i = g_i + e_i; mean C(p_i); e_i = p_i - C(p_i)."""

    def __init__(self, compress: Compressor) -> None:
        self.compress = compress
        self.errors: Ranks = []

    def step(self, grads: Ranks) -> Params:
        self.errors = self.errors or zeros(grads)
        corrected = each(np.add, self.errors, grads)
        sent = each(self.compress, corrected)
        self.errors = each(np.subtract, corrected, sent)
        return mean(sent)


class DoubleSqueeze:
    """Memory on both sides: q_i = C(g_i + e_i), e_i = g_i + e_i - q_i; s = mean q_i + E; u = C(s), E = s - u; u.

    The server compresses a parameter whole, whoever holds its parts.
    """

    def __init__(self, compress: Compressor) -> None:
        self.compress = compress
        self.workers = ErrorFeedback(compress)
        self.server_errors: Params = []

    def step(self, grads: Ranks) -> Params:
        received = self.workers.step(grads)
        self.server_errors = self.server_errors or [np.zeros_like(q) for q in received]
        corrected = [q + error for q, error in zip(received, self.server_errors, strict=True)]
        sent = [self.compress(s) for s in corrected]
        self.server_errors = [s - u for s, u in zip(corrected, sent, strict=True)]
        return sent


class Neolithic(DoubleSqueeze):
    """DoubleSqueeze with FCC_R in the place of C on both sides. The gradients are means of R minibatches each."""

    def __init__(self, compress: Compressor, rounds: int) -> None:
        super().__init__(lambda x: fcc(x, compress, rounds))


class EF21:
    """mean h_i, where h_i is the first gradient whole, and h_i += C(g_i - h_i) at every later one."""

    def __init__(self, compress: Compressor) -> None:
        self.compress = compress
        self.h: Ranks = []

    def step(self, grads: Ranks) -> Params:
        if not self.h:
            self.h = each(identity, grads)
        else:
            self.h = each(lambda h, g: h + self.compress(g - h), self.h, grads)
        return mean(self.h)


class EF21Momentum:
    """EF21-SGDM (2305.15155): EF21 of v_i, which is the first gradient, then v_i = (1 - eta) v_i + eta g_i."""

    def __init__(self, compress: Compressor, eta: float) -> None:
        self.eta = eta
        self.ef21 = EF21(compress)
        self.v: Ranks = []

    def step(self, grads: Ranks) -> Params:
        if not self.v:
            self.v = each(identity, grads)
        else:
            self.v = each(lambda v, g: (1 - self.eta) * v + self.eta * g, self.v, grads)
        return self.ef21.step(self.v)


# ---- optimizers of one rank, as torch defines them


class Optimizer(Protocol):
    def step(self, params: Params, grads: Params) -> Params: ...


class SGD:
    """torch.optim.SGD without dampening."""

    def __init__(self, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.nesterov, self.weight_decay = lr, momentum, nesterov, weight_decay
        self.buffers: Params = []

    def step(self, params: Params, grads: Params) -> Params:
        grads = [g + self.weight_decay * x for x, g in zip(params, grads, strict=True)]
        if self.momentum:
            # torch starts the buffer as the first gradient, which is a buffer of 0 before it
            before = self.buffers or [np.zeros_like(g) for g in grads]
            self.buffers = [self.momentum * b + g for b, g in zip(before, grads, strict=True)]
            if self.nesterov:
                grads = [g + self.momentum * b for g, b in zip(grads, self.buffers, strict=True)]
            else:
                grads = self.buffers
        return [x - self.lr * g for x, g in zip(params, grads, strict=True)]


class AdamW:
    """torch.optim.AdamW: weight decay on the weights, eps outside the square root of the corrected variance."""

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.num_steps = 0
        self.m: Params = []
        self.v: Params = []

    def step(self, params: Params, grads: Params) -> Params:
        self.num_steps += 1
        beta1, beta2 = self.betas
        self.m = self.m or [np.zeros_like(g) for g in grads]
        self.v = self.v or [np.zeros_like(g) for g in grads]
        self.m = [beta1 * m + (1 - beta1) * g for m, g in zip(self.m, grads, strict=True)]
        self.v = [beta2 * v + (1 - beta2) * g * g for v, g in zip(self.v, grads, strict=True)]
        return [self._updated(x, m, v) for x, m, v in zip(params, self.m, self.v, strict=True)]

    def _updated(self, x: Array, m: Array, v: Array) -> Array:
        m = m / (1 - self.betas[0] ** self.num_steps)
        v = v / (1 - self.betas[1] ** self.num_steps)
        return x - self.lr * self.weight_decay * x - self.lr * m / (np.sqrt(v) + self.eps)


# ---- model kinds: every rank has its own weights and its own optimizer


class ModelKind:
    """n replicas `x`. The gradients of `step` are those of each rank's loss at its own x_i; the new `x` is returned."""

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer]) -> None:
        self.x, self.optimizers, self.num_steps = x, optimizers, 0

    def step(self, grads: Ranks) -> Ranks:
        self.x = self.next_x(grads)
        self.num_steps += 1
        return self.x

    def next_x(self, grads: Ranks) -> Ranks:
        raise NotImplementedError

    def locally(self, grads: Ranks) -> Ranks:
        """Each rank's weights after a step of its own optimizer, before anything is exchanged."""
        return [optimizer.step(x, g) for optimizer, x, g in zip(self.optimizers, self.x, grads, strict=True)]


class DSGD(ModelKind):
    """Adapt then combine: x_i := sum_j w_ij (x_j after its optimizer's step), with the W of the step."""

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer], mixing: Mixing) -> None:
        super().__init__(x, optimizers)
        self.mixing = mixing

    def next_x(self, grads: Ranks) -> Ranks:
        return mix(self.mixing(self.num_steps), self.locally(grads))


class GossipPGA(DSGD):
    """DSGD, and x_i := mean x_j after every `every`-th step, whose own exchange the mean makes superfluous."""

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer], mixing: Mixing, every: int) -> None:
        super().__init__(x, optimizers, mixing)
        self.every = every

    def next_x(self, grads: Ranks) -> Ranks:
        mixed = super().next_x(grads)
        return on_ranks(mixed, len(mixed)) if (self.num_steps + 1) % self.every == 0 else mixed


class ExactDiffusion(ModelKind):
    """psi_i = x_i after its optimizer's step; phi = psi + x - psi_prev; x := (I + W)/2 phi. At first psi_prev = x."""

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer], weights: Array) -> None:
        super().__init__(x, optimizers)
        self.half = (np.eye(len(weights)) + weights) / 2
        self.previous = x

    def next_x(self, grads: Ranks) -> Ranks:
        psi = self.locally(grads)
        phi = each(lambda new, x, old: new + x - old, psi, self.x, self.previous)
        self.previous = psi
        return mix(self.half, phi)


class GradientTracking(ModelKind):
    """x := W x - gamma q; then, with the gradients at that x, q := W q + g - g_prev. At first q = g.

    -gamma q is what the optimizer adds to x for the gradient q, so that any optimizer will do.
    """

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer], weights: Array) -> None:
        super().__init__(x, optimizers)
        self.weights = weights
        self.q: Ranks = []
        self.previous: Ranks = []

    def next_x(self, grads: Ranks) -> Ranks:
        if not self.q:
            self.q = grads
        else:
            self.q = each(lambda q, g, old: q + g - old, mix(self.weights, self.q), grads, self.previous)
        self.previous = grads
        change = each(np.subtract, self.locally(self.q), self.x)
        return each(np.add, mix(self.weights, self.x), change)


class LocalSGD(ModelKind):
    """x_i := mean x_j after every `every`-th optimizer step. The optimizers' states stay local."""

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer], every: int) -> None:
        super().__init__(x, optimizers)
        self.every = every

    def next_x(self, grads: Ranks) -> Ranks:
        x = self.locally(grads)
        return on_ranks(x, len(x)) if (self.num_steps + 1) % self.every == 0 else x


class DiLoCo(ModelKind):
    """After every `every`-th step: D = mean (a - x_i); a := outer step from a with gradient D; x_i := a.

    The ranks start equal, at the anchor a. `outer` is SGD with lr 0.7 and Nesterov momentum 0.9 where none is given.
    """

    def __init__(self, x: Ranks, optimizers: Sequence[Optimizer], every: int, outer: Optimizer | None = None) -> None:
        super().__init__(x, optimizers)
        self.every = every
        self.outer = outer or SGD(0.7, momentum=0.9, nesterov=True)
        self.anchor = x[0]

    def next_x(self, grads: Ranks) -> Ranks:
        x = self.locally(grads)
        if (self.num_steps + 1) % self.every:
            return x
        deltas = [[a - own for a, own in zip(self.anchor, params, strict=True)] for params in x]
        self.anchor = self.outer.step(self.anchor, mean(deltas))
        return [self.anchor for _ in x]


# ---- mixing matrices


def always(weights: Array) -> Mixing:
    """The same W at every step."""
    return lambda step: weights


def complete(num_ranks: int) -> Array:
    return np.full((num_ranks, num_ranks), 1 / num_ranks)


def ring(num_ranks: int) -> Array:
    """1/3 for itself and each neighbour; 1/2 and 1/2 for two ranks."""
    if num_ranks <= 2:
        return complete(num_ranks)
    weights = np.zeros((num_ranks, num_ranks))
    for i in range(num_ranks):
        for j in (i - 1, i, i + 1):
            weights[i, j % num_ranks] = 1 / 3
    return weights


def grid(num_ranks: int) -> Array:
    """Metropolis: 1/max(|N_i|, |N_j|), |N| counting the rank itself, the rest for itself. Row-major, no wrap-around."""
    rows = max(r for r in range(1, num_ranks + 1) if num_ranks % r == 0 and r * r <= num_ranks)
    columns = num_ranks // rows
    place = [divmod(i, columns) for i in range(num_ranks)]
    neighbours = [[j for j in range(num_ranks) if _distance(place[i], place[j]) == 1] for i in range(num_ranks)]
    weights = np.zeros((num_ranks, num_ranks))
    for i in range(num_ranks):
        for j in neighbours[i]:
            weights[i, j] = 1 / max(1 + len(neighbours[i]), 1 + len(neighbours[j]))
        weights[i, i] = 1 - weights[i].sum()
    return weights


def _distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def exponential(num_ranks: int) -> Array:
    """Exp2: rank i receives from i - 1, i - 2, i - 4, .. below n, all with the weight it gives itself."""
    offsets = [0, *(2**k for k in range(num_powers(num_ranks)))]
    weights = np.zeros((num_ranks, num_ranks))
    for i in range(num_ranks):
        for offset in offsets:
            weights[i, (i - offset) % num_ranks] = 1 / len(offsets)
    return weights


def one_peer(num_ranks: int, step: int) -> Array:
    """Half of itself and half of one peer: i XOR 2^k for a power of two, else i - 2^k; k = step mod ceil(log2 n)."""
    if num_ranks == 1:
        return complete(1)
    power = 2 ** (step % num_powers(num_ranks))
    weights = np.eye(num_ranks) / 2
    for i in range(num_ranks):
        peer = i ^ power if num_ranks & (num_ranks - 1) == 0 else (i - power) % num_ranks
        weights[i, peer] += 1 / 2
    return weights


def num_powers(num_ranks: int) -> int:
    """ceil(log2 n): how many powers of two are below n."""
    return (num_ranks - 1).bit_length()

"""Gradients of gradients (`create_graph=True`): of every conversion, and of whole models in a loop of one's own."""

import contextlib
import copy

import dist
import pytest
import torch
import torch.distributed as td
import torch.nn.functional as F
from conversion_cases import CASES, NUM_RANKS, by_indexing, make_grad, sample
from torch import nn

import autopart
from autopart.errors import UsageError
from autopart.ir.collective_nodes import OPERATORS
from autopart.ir.layout import CONVERSIONS, Conversion
from autopart.ir.mesh import Mesh
from autopart.ops.grouped_matmul import expert_linear
from autopart.runtime.comm import collectives
from autopart.runtime.lockstep import convert_list

TIMEOUT_S = 150.0


def run(fn, mesh, *args, **options):
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, mesh, *args, timeout_s=TIMEOUT_S, **options)


# --- Every conversion


def chained(outputs, inputs, grads):
    """The gradient of a conversion, of that gradient by its own input, and so on: three times, each a list of ranks'.

    A gradient has the placements of its value in the other order, so the second is what the conversion does forward."""
    results = []
    for order in range(3):
        found = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
        results.append([value.detach() for value in found])
        outputs, inputs = found, grads
        ranks = range(NUM_RANKS) if len(found) == NUM_RANKS else [td.get_rank()]
        grads = [make_grad(value, order + rank).requires_grad_() for rank, value in zip(ranks, found, strict=True)]
    return results


def on_this_rank(cases):
    results = []
    for seed, (name, arguments) in enumerate(cases):
        x = sample(name, arguments, seed)[td.get_rank()].requires_grad_()
        output = getattr(torch.ops.autopart, name)(x, td.group.WORLD.group_name, *arguments)
        results.append(chained([output], [x], [make_grad(output, td.get_rank()).requires_grad_()]))
    return results


def by_hand(name, arguments):
    """The same by index arithmetic: forth and back in turn."""
    forth, back = OPERATORS[name].forward, OPERATORS[name].backward
    reverse = tuple(reversed(arguments)) if name == "all_to_all" else arguments
    outputs = by_indexing(forth, sample(name, arguments, CASES.index((name, arguments))), arguments)
    grads = [make_grad(output, rank) for rank, output in enumerate(outputs)]
    results = []
    for order, (primitive, told) in enumerate([(back, reverse), (forth, arguments), (back, reverse)]):
        results.append(by_indexing(primitive, grads, told))
        grads = [make_grad(value, order + rank) for rank, value in enumerate(results[-1])]
    return results


@pytest.fixture(scope="module")
def on_processes():
    return dist.run_ranks(on_this_rank, NUM_RANKS, CASES)


@pytest.mark.large
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}{args}" for name, args in CASES])
def test_every_conversion_is_differentiable_again(number, on_processes):
    name, arguments = CASES[number]
    leaves = [value.clone().requires_grad_() for value in sample(name, arguments, number)]
    outputs = convert_list(name, leaves, *arguments)
    grads = [make_grad(output, rank).requires_grad_() for rank, output in enumerate(outputs)]
    in_one_process = chained(outputs, leaves, grads)
    for order, expected in enumerate(by_hand(name, arguments)):
        for rank in range(NUM_RANKS):
            found = on_processes[rank][number][order][0]
            torch.testing.assert_close(found, expected[rank], rtol=0, atol=1e-14)
            torch.testing.assert_close(in_one_process[order][rank], expected[rank], rtol=0, atol=1e-14)


# --- Whole models


class Attention(nn.Module):
    """One block, whose attention has a gradient of its gradient."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        seen = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).softmax(-1) @ v
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x))))


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


MODELS = {"mlp": (mlp, (8, 8)), "attention": (Attention, (4, 8, 16))}


def input_penalty(model, x):
    """WGAN-GP and R1: the slope at the inputs."""
    points = x.clone().requires_grad_()
    out = model(points)
    (slope,) = torch.autograd.grad(out.square().sum(), points, create_graph=True)
    loss = out.mean() + (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
    loss.backward()
    return [points.grad]


def gradient_penalty(model, x):
    """Gradient regularisation: the squared gradients of the parameters."""
    loss = model(x).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()
    return []


def laplacian(model, x):
    """PINNs and forces: a second derivative in the loss, so parameters are behind three backwards."""
    points = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(points).sin().sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), points, create_graph=True)
    second.square().mean().backward()
    return [points.grad]


def rows_penalty(model, x):
    """`input_penalty`, a mean over this rank's rows, which are one of the ranks' terms."""
    points = x.clone().requires_grad_()
    out = model(points)
    (slope,) = torch.autograd.grad(out.square().sum(), points, create_graph=True)
    loss = out.mean() + (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
    (loss / getattr(model, "num_data_ranks", 1)).backward()
    return [points.grad]


LOOPS = {loop.__name__: loop for loop in (input_penalty, gradient_penalty, laplacian, rows_penalty)}


def _sums_again(conversion):
    """A planted fault: the gradient of a sum is summed again."""
    back = conversion.backward
    return Conversion(conversion.operator, back, back if back == "all_reduce" else conversion.forward)


def errors(mesh, kind, loops, planted=False, local_batch=False, **options):
    """The largest error of any gradient of each loop."""
    if planted:
        Conversion.transposed = property(_sums_again)
        collectives.CONVERSIONS = {**CONVERSIONS, ("P", "R"): CONVERSIONS["P", "R(grad P)"]}
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    plain, (name,) = copy.deepcopy(model), ["input" if kind == "mlp" else "x"]
    index, number = (td.get_rank(), td.get_world_size()) if local_batch else (0, 1)
    own = x.chunk(number)[index]
    pm = autopart.parallelize(model, mesh, example_kwargs={name: own}, local_batch=local_batch, **options)
    result = {}
    for loop in loops:
        pm.zero_grad()
        plain.zero_grad()
        expected, found = LOOPS[loop](plain, x), LOOPS[loop](pm, own)
        pairs = [(full, dict(plain.named_parameters())[n].grad) for n, full in pm.full_grads().items()]
        assert len(pairs) >= 5 or kind == "mlp"
        assert len(pairs) == sum(p.grad is not None for p in plain.parameters())
        pairs += [(grad, whole.chunk(number)[index]) for grad, whole in zip(found, expected, strict=True)]
        result[loop] = max((got - want).abs().max().item() for got, want in pairs)
    return result


WHOLE = {
    "dp2": {},
    "tp2": {},
    "dp2 zero1": {"zero": 1},
    "dp2 zero2": {"zero": 2},
    "dp2 zero3": {"zero": 3},
    "dp2,tp2": {},
    "dp2,tp2 zero3": {"zero": 3},
    "dpr2,dp2 zero3": {"zero": 3},
    "tp2 sequence": {"sequence_parallel": True},
    "cp2": {"context": "gather"},
    "cp2 ulysses": {"context": "ulysses"},
    "dp2 recompute": {"recompute": "full"},
    "dp2 microbatches": {"microbatches": 2},
}


@pytest.mark.few
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", WHOLE)
def test_a_loop_with_gradients_of_gradients_is_that_of_one_process(case, kind):
    mesh = case.split()[0]
    if kind == "mlp" and (mesh == "cp2" or "sequence" in case):
        pytest.skip("it has no sequence")
    for result in run(errors, mesh, kind, list(LOOPS)[:3], **WHOLE[case]):
        assert max(result.values()) < 1e-10, result


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "loop"), [("dp2", "gradient_penalty"), ("tp2", "input_penalty")])
def test_a_sum_of_equal_copies_would_be_found(mesh, loop):
    for result in run(errors, mesh, "attention", [loop], planted=True):
        assert result[loop] > 1e-3


@pytest.mark.large
@pytest.mark.parametrize("zero", [0, 3])
def test_own_rows_of_an_input_have_the_gradients_of_gradients_of_all(zero):
    """A loss of one's own rows adds up over ranks."""
    for result in run(errors, "dp2", "attention", ["rows_penalty"], local_batch=True, zero=zero):
        assert result["rows_penalty"] < 1e-10


def refused(mesh, use):
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16, dtype=torch.float64, requires_grad=True)
    options = {"ring": {"context": "ring"}, "dp_sync": {"dp_sync": "top_k:0.5"}, "no_sync": {}}[use]
    model = Fused() if use == "ring" else Attention()
    pm = autopart.parallelize(model.double(), mesh, example_kwargs={"x": x}, **options)
    with pm.no_sync() if use == "no_sync" else contextlib.nullcontext():
        loss = pm(x).square().mean()
    with pytest.raises(UsageError) as error:
        torch.autograd.grad(loss, [x, *pm.parameters()], create_graph=True)
    return str(error.value)


class Fused(Attention):
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return self.head(
            x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        )


REFUSED = {
    ("cp2", "ring"): """create_graph=True is not supported with ring attention
  why    its backward exchanges tensors between ranks, and this exchange cannot be differentiated
  try    context="ulysses" or context="gather\"""",
    ("dp2", "dp_sync"): """create_graph=True is not supported with dp_sync='top_k:0.5'
  why    ranks synchronise gradients when a backward has ended, and that has no derivative
  try    dp_sync='all_reduce'""",
    ("dp2", "no_sync"): """create_graph=True is not supported with gradients of parameters inside no_sync()
  why    each rank has a partial gradient until the last call reduces them
  try    this call outside of no_sync()""",
}


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "use"), REFUSED, ids=lambda part: part)
def test_what_cannot_be_differentiated_again_is_refused_on_every_rank(mesh, use):
    assert run(refused, mesh, use) == [REFUSED[mesh, use]] * 2


def test_products_with_experts_have_gradients_of_gradients():
    expert, weight = torch.tensor([0, 2, 1, 2, 0]), torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, weight: expert_linear(x, weight, expert), (x, weight))

"""Every conversion, forward and gradient: on process groups, on lists of tensors, and by plain indexing."""

import dist
import pytest
import torch
import torch.distributed as td
from conversion_cases import CASES, NUM_RANKS, by_indexing, make_grad, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import autopart.runtime.comm.collectives  # noqa: F401  which does them on process groups
from autopart.ir.collective_nodes import OPERATORS
from autopart.ir.sharding import DimSharding
from autopart.ops.operators import CUTTING, all_operators, embedding_shard, pick_class
from autopart.runtime.lockstep import convert_list

OTHERS = [name for name in OPERATORS if name not in (*CUTTING, "all_to_all")]
CASES += [("all_to_all", (0, 1)), ("all_to_all", (2, 1)), ("all_to_all", (1, 0))]
CASES += [(name, ()) for name in OTHERS]


def expected(name, arguments, values):
    outputs = by_indexing(OPERATORS[name].forward, values, arguments)
    grads = [make_grad(output, rank) for rank, output in enumerate(outputs)]
    backward = tuple(reversed(arguments)) if name == "all_to_all" else arguments
    return outputs, by_indexing(OPERATORS[name].backward, grads, backward)


def run_on_this_rank(cases):
    """Every case on this rank's process group; returns (output, gradient) of each."""
    group_name = td.group.WORLD.group_name
    results = []
    for seed, (name, arguments) in enumerate(cases):
        x = sample(name, arguments, seed)[td.get_rank()].requires_grad_()
        output = getattr(torch.ops.autopart, name)(x, group_name, *arguments)
        output.backward(make_grad(output, td.get_rank()))
        results.append((output.detach(), x.grad))
    x = torch.arange(4.0) * (1 - 2 * td.get_rank())
    largest = torch.ops.autopart.all_reduce_max(x.requires_grad_(), group_name)
    assert not largest.requires_grad
    return results, torch.ops.autopart.axis_index(group_name), largest


@pytest.fixture(scope="module")
def distributed():
    return dist.run_ranks(run_on_this_rank, NUM_RANKS, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}{args}" for name, args in CASES])
def test_conversion(number, distributed):
    name, arguments = CASES[number]
    values = sample(name, arguments, number)
    outputs, grads = expected(name, arguments, values)
    leaves = [v.clone().requires_grad_() for v in values]
    in_one_process = convert_list(name, leaves, *arguments)
    torch.autograd.backward(in_one_process, [make_grad(o, rank) for rank, o in enumerate(outputs)])
    for rank in range(NUM_RANKS):
        output, grad = distributed[rank][0][number]
        for got, want in ((output, outputs[rank]), (grad, grads[rank])):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
        torch.testing.assert_close(in_one_process[rank], outputs[rank], rtol=0, atol=1e-14)
        torch.testing.assert_close(leaves[rank].grad, grads[rank], rtol=0, atol=1e-14)


def test_axis_index_and_max(distributed):
    assert [index for _, index, _ in distributed] == list(range(NUM_RANKS))
    assert all(torch.equal(largest, torch.tensor([0.0, 1.0, 2.0, 3.0])) for _, _, largest in distributed)
    assert torch.equal(convert_list("all_reduce_max", [torch.ones(2), torch.zeros(2)])[1], torch.ones(2))


def test_dropout_depends_on_seed_operator_and_shard_alone():
    x, seed = torch.ones(1000, dtype=torch.float64), torch.tensor([5])
    torch.manual_seed(1)
    first = torch.ops.autopart.dropout(x, 0.25, seed, 7, [0])
    torch.manual_seed(2)
    assert torch.equal(first, torch.ops.autopart.dropout(x, 0.25, seed, 7, [0]))
    assert 0.7 < (first > 0).double().mean() < 0.8 and torch.allclose(first[first > 0], torch.tensor(1 / 0.75).double())
    for other in ((torch.tensor([6]), 7, [0]), (seed, 8, [0]), (seed, 7, [1])):
        same = (torch.ops.autopart.dropout(x, 0.25, *other) > 0) == (first > 0)
        assert 0.5 < same.double().mean() < 0.75  # independent masks agree on 0.75^2 + 0.25^2


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_draws_once_and_keeps_a_byte_an_element(dtype):
    """On the host half as many integers as elements; on a GPU it is one kernel (`benchmarks/gpu/probe.py`)."""
    x, seed = torch.ones(64, 8, dtype=dtype, requires_grad=True), torch.tensor(5)
    before, kept = torch.get_rng_state(), []
    with Calls() as calls, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = torch.ops.autopart.dropout(x, 0.25, seed, 7, [0])
    drawing = ("random_", "bernoulli_", "bernoulli", "native_dropout", "rand_like")
    assert [name for name in calls.names if name in drawing] == ["random_"]
    assert torch.equal(torch.get_rng_state(), before), "the generator was moved on"
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.bool, 512)]
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_dropout_compiled_draws_what_it_draws_eagerly():
    """What a compiler is shown: a draw that it takes as it is, and a product."""
    x, of_mask = torch.randn(64, 8), (torch.tensor(5), 7, [0])

    def drop(x):
        return torch.ops.autopart.dropout(x, 0.25, *of_mask)

    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(drop)(torch.empty(64, 8))
    names = [node.target._overloadpacket.__name__ for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name != "detach"] == ["draw_mask", "mul", "mul_"]
    mask = torch.ops.autopart.draw_mask(x, 0.25, *of_mask)
    torch.testing.assert_close(x * mask / 0.75, drop(x))


@pytest.mark.parametrize(("shape", "p"), [((0, 4), 0.5), ((3, 4), 1.0), ((3, 4), 0.0)])
def test_dropout_of_nothing_of_all_and_of_none(shape, p):
    x = torch.randn(shape, requires_grad=True)
    y = torch.ops.autopart.dropout(x, p, torch.tensor(5), 7, [])
    y.sum().backward()
    assert torch.equal(y, x * (1 - p)) if p in (0.0, 1.0) else y.shape == shape
    assert torch.equal(x.grad, torch.full_like(x, 1 - p)) if x.numel() else x.grad.shape == shape


def test_every_operator_is_tried():
    assert {name for name, _ in CASES} == set(OPERATORS)
    others = {
        "all_reduce_max",
        "axis_index",
        "cast",
        "draw_mask",
        "drop",
        "dropout",
        "embedding_shard",
        "pick_class",
        "expert_linear",
        "expert_outer",
        "to_experts",
        "from_experts",
        "exchange_counts",  # these three: tests/parallel/test_dispatch.py
        "dispatch",
        "combine",
        "window_attention",
        "attention_runs",
        "ring_attention",  # tests/parallel/test_ring.py
        "positions",
        "update_cache",  # tests/extras/generation/test_generate.py
        "ctc_loss",
        "ctc_loss_grad",
        "attention_dropout",  # these three: tests/parallel/test_attention_dropout.py
        "attention_dropout_forward",
        "attention_dropout_backward",
    }
    assert set(all_operators()) == set(OPERATORS) | others


@pytest.mark.parametrize("size", range(1, 30))
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
def test_cut_and_join_are_inverse(size, num_shards):
    full = torch.randn(2, size, 3)
    sections = () if size < 3 else (size - 2, 2)
    cut = DimSharding(1, size, sections, num_shards)
    shards = [cut.take(full, index) for index in range(num_shards)]
    assert torch.equal(cut.join(shards), full)
    assert torch.equal(sum(cut.place(s, i) for i, s in enumerate(shards)), full)
    assert all(torch.equal(cut.trimmed(cut.padded(s), i), s) for i, s in enumerate(shards))
    assert len({cut.padded(s).shape for s in shards}) == 1


@pytest.mark.parametrize("padding_idx", [-1, 4, 9])
def test_embedding_shards_add_up(padding_idx):
    weight = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(10, (4, 5))
    ids[0, :3] = torch.tensor([4, 9, 0])
    whole = torch.nn.functional.embedding(ids, weight, None if padding_idx < 0 else padding_idx)
    grad = torch.randn_like(whole)
    (want,) = torch.autograd.grad(whole, weight, grad)
    cut = DimSharding(0, 10, (), 4)  # 3, 3, 3, 1
    parts = []
    for rank in range(5):  # a fifth shard that holds no row
        rows = cut.take(weight, rank) if rank < 4 else weight[:0]
        parts.append(embedding_shard(rows, ids, min(3 * rank, 10), padding_idx))
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=0)
    (got,) = torch.autograd.grad(sum(parts), weight, grad)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_picked_classes_add_up():
    logits = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 9, 3, -100, 5, 6])
    parts = [pick_class(logits[:, s : s + 4], target, s) for s in (0, 4, 8, 10)]
    want = torch.where(target >= 0, logits.gather(1, target.clamp(min=0)[:, None])[:, 0], 0)
    assert torch.equal(sum(parts), want)
    weights = torch.randn(6, dtype=torch.float64)
    got, expected_grad = (torch.autograd.grad(v, logits, weights)[0] for v in (sum(parts), want))
    assert torch.equal(got, expected_grad)


@pytest.mark.parametrize("label", [10, 12, -1])
@pytest.mark.parametrize("start", [0, 4, 8, 10])
def test_a_class_out_of_range_is_an_error_on_every_rank(label, start):
    logits = torch.randn(3, 10)[:, start : start + 4]
    with pytest.raises(IndexError, match=f"^Target {label} is out of bounds: there are 10 classes.$"):
        pick_class(logits, torch.tensor([0, -100, label]), start, 10, -100)
    assert pick_class(logits, torch.tensor([0, -7, 9]), start, 10, -7)[1] == 0

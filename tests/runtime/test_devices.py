"""The device a rank computes on, and where its values are: shown on a CPU, by what torch would say of GPUs."""

import operator
import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import zoo
from dist import run_ranks
from torch import nn
from traced import plan_of, run_of

from autopart.errors import OptionError
from autopart.extras.calibrate import machine_speed
from autopart.ir.graph import draws_random_numbers, short_name, value
from autopart.ir.mesh import Mesh
from autopart.ir.program import SEEDS
from autopart.ops import grouped_matmul, operators
from autopart.options import Options
from autopart.passes.facts import analyze
from autopart.passes.normalize.batch_norm_forms import batch_statistics
from autopart.proof import verify_estimate
from autopart.proof.comparison import GraphUnderTest
from autopart.proof.scale import scaled_model
from autopart.proof.verify import VerificationRun
from autopart.recipe.compiler import Compiler
from autopart.recipe.make_plan import prepare
from autopart.runtime.comm import call_random, process_mesh
from autopart.runtime.comm.collectives import on_device
from autopart.runtime.executable import move_to_device
from autopart.runtime.lockstep import run_lockstep


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


def layers():
    torch.manual_seed(0)
    return Layers(), {"x": torch.randn(4, 8)}


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs that this process never touches; what it sets is kept."""

    def machine(count, backend="nccl", config=None, **environment):
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(process_mesh.dist, "get_backend", lambda: backend)
        monkeypatch.setattr(process_mesh.dist, "get_backend_config", lambda: config or f"cuda:{backend}")
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, text in environment.items():
            monkeypatch.setenv(name, str(text))
        return chosen

    return machine


@pytest.mark.parametrize(("count", "model", "local_rank", "found"), [
    (4, "cuda:0", 2, 2),  # .to("cuda") on every rank
    (4, "cuda", 2, 2),
    (4, "cuda:3", 2, 3),  # placed by hand
    (1, "cuda:0", 2, 0),  # all ranks share one
    (4, "cpu", 2, 2),
])  # fmt: skip
def test_a_model_on_the_first_gpu_of_every_rank_goes_to_the_ranks_own(gpus, count, model, local_rank, found):
    chosen = gpus(count, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)
    assert process_mesh._device("cuda", torch.device(model)) == torch.device("cuda", found)
    assert chosen == [found]


@pytest.mark.parametrize(("count", "current", "found"), [(4, 0, 2), (4, 1, 1), (1, 0, 0)])
@pytest.mark.parametrize("model", ["cpu", "cuda"])
def test_ranks_that_torchrun_did_not_start_have_a_gpu_each(gpus, monkeypatch, count, current, found, model):
    """The group says which rank this is; `torch.cuda.set_device` before counts more."""
    gpus(count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    for name, says in (("is_initialized", True), ("get_rank", 2), ("get_world_size", 4)):
        monkeypatch.setattr(process_mesh.dist, name, lambda says=says: says)
    assert process_mesh._device("cuda", torch.device(model)) == torch.device("cuda", found)
    assert process_mesh._one_gpu_each() == (count == 4)


@pytest.mark.parametrize(("count", "backend", "config", "model", "on_gpu"), [
    (4, "nccl", "cuda:nccl", "cpu", True),
    (4, "undefined", "cpu:gloo,cuda:nccl", "cpu", True),  # init_process_group() without a backend
    (1, "undefined", "cpu:gloo,cuda:nccl", "cpu", False),  # fewer GPUs than ranks: nccl could not run
    (0, "undefined", "cpu:gloo", "cpu", False),
    (4, "gloo", "cpu:gloo,cuda:gloo", "cpu", False),
    (1, "gloo", "cpu:gloo,cuda:gloo", "cuda:0", True),
])  # fmt: skip
def test_ranks_compute_where_their_process_group_does(gpus, count, backend, config, model, on_gpu):
    gpus(count, backend, config, LOCAL_WORLD_SIZE=4)
    assert process_mesh._uses_gpus(torch.device(model)) == on_gpu


@pytest.mark.parametrize("rows", [6, 4])
def test_rows_of_other_experts_are_zero_whatever_was_in_their_memory(monkeypatch, rows):
    """torch's kernel writes no rows after its last group; an empty group, and one that ends with the rows, are fine."""
    x, weight = torch.randn(rows, 8), torch.randn(3, 8, 8)
    expert = torch.tensor([0, 2, 4, 2, 0, 5])[:rows]  # 4 and 5 are other ranks', 1 has no row
    expected = grouped_matmul.expert_linear(x, weight, expert)

    def grouped(a, b, offs):
        if a.dim() == b.dim() == 2:
            starts = [0, *offs.tolist()]
            return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(starts)])
        made = torch.full((a.size(0), b.size(2)), float("nan"))
        start = 0
        for matrix, end in zip(b, offs.tolist(), strict=True):
            made[start:end] = a[start:end] @ matrix
            start = end
        return made

    monkeypatch.setattr(F, "grouped_mm", grouped)
    monkeypatch.setattr(grouped_matmul, "_has_kernel", lambda x, y: True)
    torch.testing.assert_close(grouped_matmul.expert_linear(x, weight, expert), expected)
    x.requires_grad_()
    y = grouped_matmul.expert_linear(x, weight.requires_grad_(), expert)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and weight.grad.isfinite().all()
    assert not x.grad[expert > 2].any() and not weight.grad[1].any()


def test_experts_without_a_kernel_wait_for_the_gpu_once_a_call(monkeypatch):
    """Whatever reads a value on the host waits for all that runs on the GPU."""
    reads = []
    lists = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append("list") or lists(self))
    for name in ("__int__", "__bool__", "__index__", "item", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: reads.append(name))
    x, expert = torch.randn(6, 8), torch.tensor([0, 2, 4, 2, 0, 5])
    y = grouped_matmul.expert_linear(x, torch.randn(3, 8, 8), expert)
    assert reads == ["list"]
    grouped_matmul.expert_outer(x, y, expert, 3)
    assert reads == ["list"] * 2


@pytest.mark.parametrize("kind", ["cudnn_batch_norm", "miopen_batch_norm"])
def test_batch_norms_of_a_gpus_libraries_become_those_there_are_rules_for(kind):
    """In training without running statistics the formula, in eval mode `batch_norm`; what is written unsaid is left."""
    x, weight, bias, mean, var = torch.randn(4, 3, 5), *torch.rand(4, 3)
    target = getattr(torch.ops.aten, kind).default
    for training, stats in ((True, (None, None)), (False, (mean, var)), (True, (mean, var))):
        graph = torch.fx.Graph()
        given = [(name, t) for name, t in zip("xwbmv", (x, weight, bias, *stats), strict=True) if t is not None]
        nodes = [graph.placeholder(name) for name, _ in given]
        for node, (_, tensor) in zip(nodes, given, strict=True):
            node.meta["val"] = tensor.to("meta")
        padded = (*nodes, None, None)[:5]
        call = graph.call_function(target, (*padded, training, 0.1, 1e-5))
        call.meta["val"] = (x.to("meta"), mean.to("meta"), var.to("meta"))
        first = graph.call_function(operator.getitem, (call, 0))
        first.meta["val"] = x.to("meta")
        graph.output(first)
        batch_statistics(graph)
        left = [node for node in graph.nodes if node.target is target]
        if training and stats[0] is not None:
            assert left == [call]
            continue
        assert not left
        made = torch.fx.GraphModule({}, graph)(*(tensor for _, tensor in given))
        torch.testing.assert_close(made, F.batch_norm(x, *stats, weight, bias, training, 0.1, 1e-5))


def test_what_fits_in_double_precision_is_asked_of_the_device_that_computes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 9_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert verify_estimate.available_bytes(torch.device("cuda", 1)) == 1_300
    assert verify_estimate.available_bytes(torch.device("cpu")) > 1_000_000
    asked = []
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: asked.append(device) or 0)
    model, batch = layers()
    on_gpu = types.SimpleNamespace(parameters=lambda: iter([types.SimpleNamespace(device=torch.device("cuda", 1))]))
    assert scaled_model.device_of(on_gpu) == torch.device("cuda", 1)
    assert scaled_model.device_of(model.to("meta")) == torch.device("cpu")
    monkeypatch.setattr(scaled_model, "device_of", lambda model: torch.device("cuda", 1))
    assert not scaled_model.fits(model, batch)
    assert asked == [torch.device("cuda", 1)]


def test_a_batch_on_the_host_is_moved_to_the_model_that_is_verified():
    """The model itself runs too, and moves nothing; `meta` stands for the GPU."""
    model, batch = layers()
    run = VerificationRun(model, batch)
    found = scaled_model.on_device({**batch, "flag": 3}, torch.device("meta"))
    assert found["x"].device.type == "meta" and found["flag"] == 3
    run.source = types.SimpleNamespace(parameters=lambda: iter([types.SimpleNamespace(device=Elsewhere())]))
    with pytest.raises(TypeError, match="Elsewhere"):  # where the weights are is where the batch is asked to go
        run.convert_arguments(batch, None)


class Elsewhere:
    type = "cuda"


def float32_is_whole():
    return not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_tests_compute_in_whole_float32():
    assert float32_is_whole() and run_ranks(float32_is_whole, 2) == [True, True]


class Pretended(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("on_gloo", [True, False])
def test_measured_sends_of_gloo_go_through_the_host(monkeypatch, on_gloo):
    """gloo would read a GPU's address as one of the host."""
    sent = []
    group = types.SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(machine_speed, "is_gloo", lambda group, device: on_gloo)
    for name in ("send", "recv"):
        monkeypatch.setattr(machine_speed.dist, name, lambda x, **of: sent.append(type(x)))
    bench = machine_speed.Bench(
        types.SimpleNamespace(device=torch.device("cuda", 0)), machine_speed.Effort.of(True, False)
    )
    monkeypatch.setattr(machine_speed.Bench, "random", lambda self, *shape: torch.ones(*shape).as_subclass(Pretended))
    monkeypatch.setattr(machine_speed.Bench, "together", lambda self, call: call() or 1.0)
    monkeypatch.setattr(Pretended, "cpu", lambda self: self.as_subclass(torch.Tensor), raising=False)
    bench.exchange(64, group)()
    assert sent == [torch.Tensor if on_gloo else Pretended] * 2


def test_a_batch_on_the_host_is_moved_to_the_model():
    """`meta` stands for the GPU that the weights are on; the batch stays where a data loader has left it."""
    run = run_of(layers)
    program = run.subject.step(run.arrange("tp2", plan_of(run, "tp2"), Options(rng="exact")).decisions)
    shards = {
        rank: {name: nn.Parameter(torch.empty(_local(p), device="meta", dtype=torch.float64))
               for name, p in program.parameters.items()}
        for rank in range(2)
    }  # fmt: skip
    found = run_lockstep(program, shards, {}, run.traced.call.tensors)
    assert {loss.device.type for microbatches in found.values() for (loss,) in microbatches} == {"meta"}
    weights = {name: weight.to("meta") for name, weight in run.traced.parameters.items()}
    values = GraphUnderTest(replace(run.traced, parameters=weights), run.subject.loss).values()
    assert values[run.subject.loss].device.type == "meta"
    assert run.traced.call.tensors[0].device.type == "cpu"


def test_seeds_of_dropout_stay_on_the_host():
    """Each dropout of each microbatch reads one: on a GPU it would wait there."""
    program = types.SimpleNamespace(input_names=("x", "flag", SEEDS))
    here = move_to_device(torch.device("meta"), program, (torch.ones(2), 3, torch.arange(4)))
    assert [str(getattr(value, "device", value)) for value in here] == ["meta", "3", "cpu"]


class Attends(nn.Module):
    """Attention that drops weights, as torch's own function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return F.scaled_dot_product_attention(self.inner(x), x, x, dropout_p=0.5).square().mean()


class Tosses(Attends):
    def forward(self, x):
        return (self.inner(x) * torch.bernoulli(self.inner(x).detach().sigmoid())).mean()


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.GRU(8, 8, 2, dropout=0.5)

    def forward(self, x):
        return self.layers(x)[0].square().mean()


@pytest.mark.few
@pytest.mark.parametrize(("model", "why"), [
    (Attends, "a GPU's fused attention kernel draws the dropout mask itself, in its own order"),
    (Tosses, "the model computes the probabilities, and a GPU then draws the random numbers in another order"),
    (Repeats, "cuDNN draws the dropout masks of recurrent layers itself, in its own order"),
])  # fmt: skip
def test_what_cannot_be_exact_is_judged_where_it_runs(model, why):
    """A model that was traced on the CPU may run on a GPU."""
    program = written(model(), {"x": torch.randn(2, 4, 8)}, "exact")
    call_random.check_exact(program, torch.device("cpu"))
    with pytest.raises(OptionError, match="rng='exact' cannot reproduce the random numbers") as raised:
        call_random.check_exact(program, torch.device("cuda", 1))
    assert why in str(raised.value) and "test_devices.py:" in str(raised.value) and "rng='fast'" in str(raised.value)
    call_random.check_exact(written(model(), {"x": torch.randn(2, 4, 8)}, "fast"), torch.device("cuda", 1))


def written(model, batch, rng):
    compiler = Compiler(model, Mesh.parse("tp1"), Options(rng=rng))
    compiler.trace_example((), batch)
    return compiler.program((), batch, purpose="step", training=True)[0]


def placed(graph, kind):
    """The graph as a trace of the model on a GPU has it: all but what names the host is there."""
    gpu = torch.device(kind, 0)
    for node in graph.nodes:
        names_host = node.name in ("rand", "arange_1")
        if node.kwargs.get("device") is not None and not names_host:
            node.kwargs = {**node.kwargs, "device": gpu}
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = types.SimpleNamespace(device=torch.device("cpu") if names_host else gpu)
    return graph


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_a_model_on_a_gpu_makes_on_the_host_stays_there(monkeypatch, kind):
    """And its draws move the host's generator, which ranks must have alike too. In a trace on the CPU nothing tells."""
    monkeypatch.setattr(analyze, "is_tensor", lambda node: node.meta.get("val") is not None)
    graph = placed(prepare(zoo.Hosted(), {"x": torch.randn(4, 8)}).graph, kind)
    analyze._note_host(graph)
    elsewhere = torch.device("cuda", 3)
    devices = {
        node.name: on_device(node, node.kwargs, elsewhere)["device"]
        for node in graph.nodes if node.kwargs.get("device") is not None
    }  # fmt: skip
    here = torch.device("cpu") if kind == "cuda" else elsewhere
    assert devices["arange"] == elsewhere and devices["arange_1"] == devices["rand"] == here
    drawn = [node for node in graph.nodes if node.op == "call_function" and draws_random_numbers(node)]
    assert len(drawn) == 2
    program = types.SimpleNamespace(drawn=drawn, draws="exact")
    assert set(call_random.drawn_on(program, elsewhere)) == {elsewhere, here}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_to_another_device_stays(device):
    """Where a trace has it on another one than it comes from; between the same it is none."""
    with torch.device(device):
        model, x = zoo.Hosted(), torch.randn(4, 8)
    copied = [value(node).device.type for node in prepare(model, {"x": x}).graph.nodes if short_name(node) == "to"]
    assert copied == ([] if device == "cpu" else ["meta", "meta"])


@pytest.mark.parametrize("rng", ["exact", "fast"])
def test_every_generator_that_is_drawn_from_is_wound_back(monkeypatch, rng):
    states = {"cpu": 3, "cuda": 7}
    monkeypatch.setattr(call_random, "get_state", lambda device: states[device.type])
    monkeypatch.setattr(call_random, "set_state", lambda state, device: states.__setitem__(device.type, state))
    seeded = types.SimpleNamespace(manual_seed=lambda seed: types.SimpleNamespace(get_state=lambda: 11))
    monkeypatch.setattr(call_random.torch, "Generator", lambda device: seeded)
    drawn = [types.SimpleNamespace(meta=meta) for meta in ({}, {"on_host": True})]
    program = types.SimpleNamespace(draws=rng, drawn=drawn)
    first = {"cpu": 3, "cuda": 7} if rng == "exact" else {"cpu": 11, "cuda": 11}
    with call_random.one_stream(program, [torch.tensor([5])], torch.device("cuda", 0)) as rewind:
        for _ in range(2):
            rewind()
            assert states == first
            states = {"cpu": 20, "cuda": 30}  # a stage draws
    assert states == ({"cpu": 20, "cuda": 30} if rng == "exact" else {"cpu": 3, "cuda": 7})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpus_dropout_in_16_bits_is_rounded_once(monkeypatch, dtype):
    """As torch's fused kernel multiplies in float32; on a CPU torch rounds the noise, and so does `drop` there."""
    x = torch.randn(4096).to(dtype).requires_grad_()
    torch.manual_seed(1)
    plain = F.dropout(x, 0.1)
    torch.manual_seed(1)
    noise = F.dropout(torch.ones_like(x), 0.1)
    assert torch.equal(operators.drop(x, noise, 0.1), plain)
    once = torch.where(noise != 0, x.double() / 0.9, 0).to(dtype)
    monkeypatch.setattr(operators, "_multiplies_in_float", lambda x: x.element_size() == 2)
    fused = operators.drop(x, noise, 0.1)
    torch.testing.assert_close(fused, once, rtol=0 if dtype.itemsize == 2 else 1e-6, atol=0)
    assert fused.dtype == dtype and (dtype == torch.float32) == torch.equal(fused, plain)
    fused.backward(torch.ones_like(fused))
    torch.testing.assert_close(x.grad, torch.where(noise != 0, 1 / 0.9, 0.0).to(dtype), rtol=1e-6, atol=0)


def _local(stored):
    sizes = Mesh.parse("tp2")
    shape = list(stored.shape)
    for axis, place in stored.layout.items():
        if place.is_shard:
            shape[place.dim] //= sizes.size(axis)
    return shape

"""The device a rank computes on, and where its values are: shown on a CPU, by what torch would say of GPUs."""

import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traced import plan_of, run_of

from autopart.ir import experts
from autopart.ir.mesh import Mesh
from autopart.ir.program import SEEDS
from autopart.options import Options
from autopart.proof.subject import Subject
from autopart.runtime import measure
from autopart.runtime.comm import processes
from autopart.runtime.executable import brought_to
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
        monkeypatch.setattr(processes.dist, "get_backend", lambda: backend)
        monkeypatch.setattr(processes.dist, "get_backend_config", lambda: config or f"cuda:{backend}")
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
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
    assert processes._device("cuda", torch.device(model)) == torch.device("cuda", found)
    assert chosen == [found]


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
    assert processes._uses_gpus(torch.device(model)) == on_gpu


@pytest.mark.parametrize("rows", [6, 4])
def test_rows_of_other_experts_are_zero_whatever_was_in_their_memory(monkeypatch, rows):
    """torch's kernel writes no rows after its last group; an empty group, and one that ends with the rows, are fine."""
    x, weight = torch.randn(rows, 8), torch.randn(3, 8, 8)
    expert = torch.tensor([0, 2, 4, 2, 0, 5])[:rows]  # 4 and 5 are other ranks', 1 has no row
    expected = experts.expert_linear(x, weight, expert)

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
    monkeypatch.setattr(experts, "_has_kernel", lambda x, y: True)
    torch.testing.assert_close(experts.expert_linear(x, weight, expert), expected)
    x.requires_grad_()
    y = experts.expert_linear(x, weight.requires_grad_(), expert)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and weight.grad.isfinite().all()
    assert not x.grad[expert > 2].any() and not weight.grad[1].any()


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
    monkeypatch.setattr(measure, "is_gloo", lambda group, device: on_gloo)
    for name in ("send", "recv"):
        monkeypatch.setattr(measure.dist, name, lambda x, **of: sent.append(type(x)))
    bench = measure.Bench(types.SimpleNamespace(device=torch.device("cuda", 0)), measure.Effort.of(True, False))
    monkeypatch.setattr(measure.Bench, "random", lambda self, *shape: torch.ones(*shape).as_subclass(Pretended))
    monkeypatch.setattr(measure.Bench, "together", lambda self, call: call() or 1.0)
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
    values = Subject(replace(run.traced, parameters=weights), run.subject.loss).values()
    assert values[run.subject.loss].device.type == "meta"
    assert run.traced.call.tensors[0].device.type == "cpu"


def test_seeds_of_dropout_stay_on_the_host():
    """Each dropout of each microbatch reads one: on a GPU it would wait there."""
    program = types.SimpleNamespace(input_names=("x", "flag", SEEDS))
    here = brought_to(torch.device("meta"), program, (torch.ones(2), 3, torch.arange(4)))
    assert [str(getattr(value, "device", value)) for value in here] == ["meta", "3", "cpu"]


def _local(stored):
    sizes = Mesh.parse("tp2")
    shape = list(stored.shape)
    for axis, place in stored.layout.items():
        if place.is_shard:
            shape[place.dim] //= sizes.size(axis)
    return shape

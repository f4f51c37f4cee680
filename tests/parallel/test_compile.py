"""Plans whose stages are run through `torch.compile`."""

import copy
import os
import shutil
import unittest.mock
from typing import NamedTuple

import dist
import pytest
import torch
import zoo
from compilers import counted
from dist import run_ranks
from torch import nn

import autopart
from autopart.errors import MemoryLimitError, OptionError
from autopart.runtime.graphs import compiled_blocks

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")


class FakeGroup(NamedTuple):
    """A process group of which nothing is asked but where this process is in it."""

    at: int
    number: int

    def rank(self):
        return self.at

    def size(self):
        return self.number


class Blocks(nn.Module):
    """Blocks of everything that a compiler meets: products, collectives, norms, dropout. Those in `odd` are unlike."""

    def __init__(self, num_blocks=2, odd=()):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU() if index in odd else nn.GELU(), nn.Linear(16, 8),
                nn.Dropout(0.1),
            ) for index in range(num_blocks)
        )  # fmt: skip

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def example(*sizes):
    torch.manual_seed(0)
    return Blocks(*sizes).double(), {"x": torch.randn(4, 3, 8, dtype=torch.float64)}


def steps(mesh, options):
    """Losses and gradients of two steps, compiled and not, with the same masks."""
    found = []
    for compiled in (False, True):
        model, batch = example()
        torch.manual_seed(1)
        pm = autopart.parallelize(model, mesh, example_kwargs=batch, compile=compiled, **options)
        losses = [pm.step(**batch).item() for _ in range(2)]
        found.append((losses, pm.full_grads()))
    return found


def cached_loss(folder):
    """How far a compiled step is off, with what is compiled kept in a folder."""
    with unittest.mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        model, batch = zoo.gpt2()
        _, loss, _ = zoo.reference(model, batch)
        return abs(autopart.parallelize(model, "cp2", example_kwargs=batch, compile=True).step(**batch) - loss).item()


@pytest.mark.large
@needs_compiler
def test_a_rank_does_not_find_what_another_one_has_compiled(tmp_path):
    for _ in range(2):  # compiled, then found
        dist.shutdown()  # processes have nothing in memory, and their groups have the same names
        assert max(run_ranks(cached_loss, 2, str(tmp_path), timeout_s=250)) < 1e-12


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_compiled_is_kept_by_rank(monkeypatch, rank):
    monkeypatch.setattr(compiled_blocks, "resolve_group", lambda name: FakeGroup(rank, 2))
    seen = []

    def inductor(graph, inputs):
        seen.append(torch.compiler.config.cache_key_tag)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inductor)
    monkeypatch.setattr(torch, "compile", lambda f, backend, **_: lambda *x, **named: backend(f, [*x, *named.values()]))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.autopart.reduce_scatter.default, (graph.placeholder("x"), "7", 0, 3)))
    compiled = compiled_blocks._compile(torch.fx.GraphModule({}, graph), False)
    compiled.forward(torch.ones(3))
    compiled.forward(x=torch.ones(3))  # as pipelines call a stage
    assert seen == [f"7: {rank} of 2"] * 2 and not torch.compiler.config.cache_key_tag


@needs_compiler
@pytest.mark.parametrize(("mesh", "options"), [
    ("dp2", {"zero": 3}), pytest.param("tp2", {}, marks=pytest.mark.large),
    pytest.param("pp2", {"microbatches": 2}, marks=pytest.mark.large),
    pytest.param("pp2", {"microbatches": 2, "recompute": {"blocks.*": "full"}}, marks=pytest.mark.large),
])  # fmt: skip
def test_compiled_stages_compute_the_same(mesh, options):
    for (losses, grads), (compiled_losses, compiled_grads) in run_ranks(steps, 2, mesh, options, timeout_s=400):
        assert compiled_losses == pytest.approx(losses, abs=1e-12) and losses[0] != losses[1]
        assert grads.keys() == compiled_grads.keys()
        for name, grad in grads.items():
            assert (grad - compiled_grads[name]).abs().max() < 1e-12, name


def of_transformers(kind, num_layers):
    model, batch = getattr(zoo, kind)(num_layers)
    return model, batch | zoo.no_cache(model)


def graphs_after(num_steps, make, sizes, options):
    """Return the losses and gradients of an eager and a compiled run, and how many graphs each compiled step made."""
    found, num_graphs = [], []
    with pytest.MonkeyPatch.context() as patch:
        counter = counted(patch)
        for compiled in (False, True):
            model, batch = make(*sizes)
            torch.manual_seed(1)
            pm = autopart.parallelize(model, "dp1", example_kwargs=batch, compile=compiled, **options)
            losses = []
            for _ in range(num_steps):
                losses.append(pm.step(**batch).item())
                num_graphs.append(counter.frame_count)
            found.append((losses, pm.full_grads()))
    torch._dynamo.reset()
    return found, num_graphs[num_steps:]


@pytest.mark.large
@pytest.mark.parametrize(("options", "num_kinds"), [
    ({}, 3),  # the first block, whose input needs no gradient, the others, and the loss
    ({"microbatches": 2}, 3),
    ({"recompute": "full"}, 3),
    ({"recompute": {"blocks.[12]": "full", "blocks.*": "none"}}, 4),
])  # fmt: skip
def test_each_kind_of_block_is_compiled_once(options, num_kinds):
    for num_blocks, num_steps in ((5, 20), (8, 2)):
        ((runs, graphs),) = run_ranks(graphs_after, 1, num_steps, example, (num_blocks,), options)
        (losses, grads), (compiled_losses, compiled_grads) = runs
        assert compiled_losses == losses and all(grads[name].equal(compiled_grads[name]) for name in grads)
        assert graphs == [num_kinds] * num_steps, num_blocks


def test_a_model_of_one_block_compiles():
    ((runs, graphs),) = run_ranks(graphs_after, 1, 2, example, (1,), {})
    (losses, _), (compiled_losses, _) = runs
    assert compiled_losses == losses and graphs == [1, 1]


def graphs_of_lengths(lengths):
    """Train on each length, compiled and not. Return the differences of losses, and how many graphs each step made."""
    differences, num_graphs = [], []
    with pytest.MonkeyPatch.context() as patch:
        counter = counted(patch)
        model, batch = example(3)
        torch.manual_seed(1)
        pm = autopart.parallelize(copy.deepcopy(model).eval(), "dp1", example_kwargs=batch, compile=True)
        for length in lengths:
            x = torch.randn(4, length, 8, dtype=torch.float64)
            differences.append((pm.step(x=x) - model.eval()(x)).abs().item())
            num_graphs.append(counter.frame_count)
    torch._dynamo.reset()
    return differences, num_graphs


@pytest.mark.large
def test_new_lengths_are_not_compiled_again():
    ((differences, graphs),) = run_ranks(graphs_of_lengths, 1, [3, 24, 12, 6, 8, 9, 20, 10, 5])
    assert max(differences) < 1e-12
    assert graphs[:3] == [3, 6, 9] and len({*graphs[4:]}) == 1  # three are traced


@pytest.mark.large
@pytest.mark.parametrize(("kind", "num_kinds"), [
    ("llama", 3), pytest.param("t5", 5, marks=pytest.mark.large),
])  # fmt: skip
def test_models_of_any_depth_have_the_same_kinds_of_blocks(kind, num_kinds):
    """The first block, the others and the rest; of an encoder and a decoder each."""
    for num_layers in (4, 5):
        ((found, graphs),) = run_ranks(graphs_after, 1, 1, of_transformers, (kind, num_layers), {})
        ((loss,), grads), ((compiled_loss,), compiled_grads) = found
        assert abs(compiled_loss - loss) < 1e-12 and graphs == [num_kinds]
        assert all((grads[name] - compiled_grads[name]).abs().max() < 1e-12 for name in grads)


def test_a_block_that_is_like_no_other_is_compiled_by_itself():
    ((_, odd),), ((_, two_odd),) = (run_ranks(graphs_after, 1, 1, example, (6, which), {}) for which in ((2,), (2, 4)))
    assert odd == two_odd == [4]


def test_chains_of_pointwise_operators_are_one_kernel():
    model, batch = example()
    eager, compiled = (autopart.plan(model, "tp2", example_kwargs=batch, compile=c) for c in (False, True))
    before, after = (autopart.simulate(plan) for plan in (eager, compiled))
    assert after.step_time_s < before.step_time_s and after.parts["other"] < before.parts["other"]
    assert after.parts["matmul"] == before.parts["matmul"] and after.collectives == before.collectives
    assert compiled.cost.at(tp=2).parts_s == after.parts
    assert all(row["total"] < before["total"] for row, before in zip(compiled.memory, eager.memory, strict=True))


def test_a_plan_says_that_it_is_compiled(tmp_path):
    model, batch = example()
    plan = autopart.plan(model, "tp2", example_kwargs=batch, compile=True)
    plan.save(tmp_path / "plan.json")
    assert autopart.Plan.load(tmp_path / "plan.json") == plan and plan.compile
    assert "every stage, by torch.compile" in str(plan.explain())
    assert autopart.verify(model, "tp2", example_kwargs=batch, plan=plan).ok


@pytest.mark.parametrize(("options", "text"), [
    ({"compile": "yes"}, "compile='yes' is neither True nor False\n  try    compile=True, or False"),
    ({"compile": True, "schedule": "zbv"},
     "compile=True cannot be combined with schedule='zbv'\n  why    the schedule runs the backward in two parts, and a "
     "compiled stage has one backward"
     "\n  try    another schedule, for example '1f1b' or 'interleaved_1f1b'"),
])  # fmt: skip
def test_what_cannot_be_compiled(options, text):
    model, batch = example()
    with pytest.raises(OptionError) as caught:
        autopart.plan(model, "pp2", example_kwargs=batch, **options)
    assert str(caught.value) == text


def test_what_contradicts_a_plan():
    model, batch = example()
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    with pytest.raises(OptionError, match="compile=True contradicts the plan, which has False"):
        autopart.verify(model, "tp2", example_kwargs=batch, plan=plan, compile=True)


@pytest.mark.large
def test_ways_out_of_too_much_memory_can_be_compiled():
    model, batch = example()
    with pytest.raises(MemoryLimitError) as caught:
        autopart.plan(model, "pp2,dp2", example_kwargs=batch, compile=True, memory=1000, schedule="interleaved_1f1b",
                      microbatches=2)  # fmt: skip
    text = str(caught.value)
    assert "zero=3" not in text and "zbv" not in text and "zero_bubble" not in text

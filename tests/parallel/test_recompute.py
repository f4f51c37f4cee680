"""What is computed again in the backward: which regions there are, that they give what the model gives, and save."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from contextlib import nullcontext
from unittest import mock

import dist
import held
import pytest
import torch
import zoo
from torch import nn
from traced import plan_of, run_of, verified

import autopart
from autopart.ir.facts import facts
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.ir.run.recompute_spec import recompute_mode_of
from autopart.ir.run.schedules import FLUSHING, SINGLE_STAGE
from autopart.passes.choose.plan_codec import decode
from autopart.plans.plan import Plan
from autopart.proof.verify import VerificationRun
from autopart.runtime import lockstep
from autopart.runtime.graphs import recompute_calls as regions
from autopart.tracing.trace_model import bind_call


@functools.cache
def eager(build):
    """A builder of a model whose attention is written out."""

    def built():
        model, batch = build()
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = "eager"
        return model, batch

    return built


@functools.cache
def dropping(build):
    """A builder of a model that drops a tenth."""

    def built():
        model, batch = build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return model, batch

    return built


RUN_AGAIN = regions.run_again


def program_of(build, mesh: str, recompute: str) -> tuple[Plan, Program]:
    run = run_of(build)
    plan = plan_of(run, mesh, recompute=recompute)
    decisions = decode(run.traced, Plan.from_json(plan.to_json()), Mesh.parse(mesh))
    return plan, run.subject.step(decisions)


def regions_of(program: Program) -> list[dict[int, list[torch.fx.Node]]]:
    """Of every stage, the nodes of each region."""
    found = []
    for stage in program.stages:
        regions: dict[int, list[torch.fx.Node]] = {}
        for node in stage.graph.graph.nodes:
            if "region" in facts(node):
                regions.setdefault(facts(node)["region"], []).append(node)
        found.append(regions)
    return found


def names(nodes) -> list[str]:
    return [node.target.__name__.removesuffix(".default") for node in nodes]


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "tp2"), ("bert", "dp2")])
def test_full_recomputes_every_block(name, mesh):
    plan, program = program_of(zoo.ZOO[name], mesh, "full")
    assert plan.recompute == "full" and not [n for n in plan.notes if "recompute" in n]
    for stage, found in zip(program.stages, regions_of(program), strict=True):
        calls = [node for node in stage.graph.graph.nodes if node.op == "call_function"]
        for nodes in found.values():
            places = [calls.index(node) for node in nodes]
            assert places == list(range(places[0], places[-1] + 1)), "a block is one run of the graph"
        left = {facts(node)["key"] for node in calls if node.target is torch.ops.aten.linear.default} - {
            facts(node)["key"] for nodes in found.values() for node in nodes if "key" in facts(node)
        }
        assert not [key for key in left if re.search(r"\.\d+\.", key)], left


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2,pp2"])
def test_selective_recomputes_the_core_of_attention(mesh):
    _, program = program_of(dropping(eager(zoo.gpt2)), mesh, "selective")
    cores = [nodes for regions in regions_of(program) for nodes in regions.values()]
    assert [names(core) for core in cores] == [
        ["matmul", "mul.Tensor", "add.Tensor", "softmax.int", "drop", "matmul"]
    ] * 2


FOUR = functools.partial(zoo.gpt2, num_layers=4)
SOME = {"transformer.h.[0-1]": "full", "transformer.h.*": "selective"}


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_blocks_are_recomputed_as_they_match_first(mesh):
    _, program = program_of(eager(FOUR), mesh, SOME)
    regions = [nodes for regions in regions_of(program) for nodes in regions.values()]
    found = {
        next(re.findall(r"h\.\d", facts(n)["key"])[0] for n in nodes if "key" in facts(n)): nodes for nodes in regions
    }
    assert {block: "linear" in names(nodes) for block, nodes in found.items()} == {
        "h.0": True, "h.1": True, "h.2": False, "h.3": False,
    }  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_memory_of_some_blocks_is_between_that_of_none_and_all(mesh):
    ways = ("full", {"*.[0-2]": "full"}, {"*.0": "full"}, {"*.0": "selective"}, {"*.0": "none"})
    plans = [plan_of(run_of(eager(FOUR)), mesh, recompute=how) for how in (*ways, "none")]
    *held, none = [sum(row["activations"] for row in plan.memory) for plan in plans]
    assert held == sorted(set(held)) and held[-1] == none


@pytest.mark.large
def test_a_plan_keeps_and_compares_what_blocks_recompute():
    run = run_of(eager(FOUR))
    plan = plan_of(run, "pp2", recompute=SOME)
    read = Plan.from_json(plan.to_json())
    assert read == plan and list(read.recompute.items()) == list(SOME.items()), "in the order that was said"
    assert "recompute    transformer.h.[0-1]=full,transformer.h.*=selective" in plan.explain()
    assert not plan.diff(plan_of(run, "pp2", recompute="*.0=full,*.1=full,*=selective"))
    rows = plan.diff(plan_of(run, "pp2", recompute={"*.0": "full", "*": "selective"})).rows
    assert ("recompute", "in the backward") in {(row.part, row.what) for row in rows}
    assert verified(run, "pp2", read).ok


@pytest.mark.large
def test_a_scaled_copy_recomputes_as_the_blocks_it_keeps():
    model, batch = eager(FOUR)()
    plan = autopart.plan(model, "tp2", example_kwargs=batch, recompute={"transformer.h.0": "full", "*": "selective"})
    small = VerificationRun(model, bind_call(model, (), batch), scaled=True)
    for kept, words in (((0, 1), ["full", "selective"]), ((3, 0), ["selective", "full"])):
        copied = dataclasses.replace(small.scaled, kept={"transformer.h": (kept, 4)}).plan(plan, {}, small.traced)
        assert [recompute_mode_of(copied.recompute, f"transformer.h.{i}") for i in (0, 1)] == words
    assert autopart.verify(model, "tp2", example_kwargs=batch, plan=plan, scaled=True).ok
    some = {"transformer.h.3": "full"}  # which the copy has not
    assert autopart.verify(model, "tp2", example_kwargs=batch, recompute=some, scaled=True).ok


@pytest.mark.large
def test_encoders_and_decoders_have_their_own_blocks():
    _, program = program_of(dropping(eager(zoo.t5)), "tp2", "full")
    paths = [{facts(n)["key"].split(".layer")[0] for n in r if "block" in facts(n).get("key", "")}
             for r in regions_of(program)[0].values()]  # fmt: skip
    assert paths == [{f"{part}.block.{i}"} for part in ("encoder", "decoder") for i in (0, 1)]
    _, program = program_of(dropping(eager(zoo.t5)), "tp2", "selective")
    assert len(regions_of(program)[0]) == 2 + 2 * 2, "self-attention everywhere, and two cross-attentions"


class Again(nn.Module):
    """One layer, called four times, as in ALBERT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(4):
            x = x + self.down(torch.tanh(self.up(x)))
        return x.square().mean()


def layer_called_again():
    return Again().double(), {"x": torch.randn(8, 4, dtype=torch.float64)}


def test_a_layer_that_is_called_again_is_a_block_each_time():
    _, program = program_of(layer_called_again, "dp2", "full")
    found = [names(nodes) for nodes in regions_of(program)[0].values()]
    assert len(found) == 4 and all("tanh" in names_ and names_.count("linear") == 2 for names_ in found), found


def test_none_marks_nothing():
    plan, program = program_of(zoo.gpt2, "tp2", "none")
    assert plan.recompute == "none" and regions_of(program) == [{}]


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def one_block():
    return OneBlock(), {"x": torch.randn(4, 8)}


def test_where_nothing_can_be_recomputed_the_plan_says_so():
    for recompute, why in (("full", "no repeated blocks"), ("selective", "no two products of activations")):
        plan, program = program_of(one_block, "tp2", recompute)
        assert [why in note for note in plan.notes if "recompute" in note] == [True]
        assert regions_of(program) == [{}]
    plan, program = program_of(zoo.gpt2, "tp2", "selective")
    assert [n for n in plan.notes if "recompute" in n] == [
        "recompute='selective' changes nothing: attention is one operator (scaled_dot_product_attention), which saves "
        "nothing between its products"
    ]


class Entangled(nn.Module):
    """Two streams of attention whose scores read each other: neither core can be run as one call."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        left, right = a @ a.transpose(1, 2), b @ b.transpose(1, 2)
        mixed = left.softmax(-1) + self.mix[0](right), right.softmax(-1) + self.mix[1](left)
        return ((mixed[0] @ a) + (mixed[1] @ b)).sum()


def entangled():
    return Entangled(), {"x": torch.randn(2, 4, 8)}


def test_regions_that_wait_for_each_other_are_left_alone():
    _, program = program_of(entangled, "dp2", "selective")
    assert regions_of(program) == [{}]


# --- exact -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, shared: nn.Linear, first: bool):
        super().__init__()
        self.up, self.down, self.shared, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), shared, nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.randn(16)) if first else None
        self.query = nn.Linear(16, 16)

    def forward(self, x, scale):
        scale = scale if self.scale is None else torch.sin(self.scale)
        x = x + self.drop((self.query(x) @ x.transpose(1, 2)).softmax(-1)) @ x
        return x + self.drop(self.shared(self.down(torch.tanh(self.up(x))))) * scale, scale


class Blocks(nn.Module):
    """Blocks of attention and an MLP that share a weight, and read what the first has made."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(shared, i == 0) for i in range(4))

    def forward(self, x, y):
        scale = None
        for block in self.blocks:
            x, scale = block(x, scale)
        return nn.functional.mse_loss(x, y)


def shared_blocks():
    return Blocks().double(), {name: torch.randn(8, 6, 16, dtype=torch.float64) for name in "xy"}


class Norms(nn.Module):
    """Blocks that update statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        )

    def forward(self, x):
        return self.blocks(x).square().mean()


def batch_norms():
    return Norms().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}


ALL_AXES = "dp2,pp2,tp2"
EXACT = [  # model, mesh, recompute, other options
    (zoo.gpt2, "tp2", "full", {}),
    (zoo.gpt2, ALL_AXES, "full", {}),
    (dropping(eager(zoo.gpt2)), ALL_AXES, "selective", {}),
    (eager(zoo.llama), "tp2", "selective", {"sequence_parallel": True}),
    (eager(zoo.llama), "dp2", "full", {"zero": 3}),
    (eager(zoo.llama), ALL_AXES, "full", {"sequence_parallel": True, "zero": 3}),
    (dropping(eager(zoo.t5)), "pp2", "full", {}),
    (dropping(eager(zoo.t5)), "tp2", "full", {}),
    (dropping(eager(zoo.t5)), ALL_AXES, "selective", {"zero": 3}),
    (dropping(zoo.bert), "dp2", "full", {"zero": 3}),
    (dropping(zoo.bert), ALL_AXES, "full", {}),
    (dropping(zoo.bert), "pp2", "selective", {}),
    (shared_blocks, ALL_AXES, "full", {}),
    (shared_blocks, "dp2,tp2", "full", {"zero": 3}),
    (batch_norms, "dp2,tp2", "full", {}),
    (layer_called_again, ALL_AXES, "full", {"zero": 3}),
    (dropping(eager(FOUR)), "tp2", SOME, {}),
    (dropping(eager(FOUR)), "pp2", SOME, {}),
    (dropping(eager(FOUR)), ALL_AXES, {"*.1": "full", "*.3": "selective"}, {"zero": 3, "sequence_parallel": True}),
]


@pytest.mark.few
@pytest.mark.parametrize(("build", "mesh", "recompute", "options"), EXACT)
def test_what_is_recomputed_is_exact(build, mesh, recompute, options, monkeypatch):
    """Loss, gradients and buffers, with dropout as one device draws it; and it is recomputed, on all ranks."""
    again: list[int] = []
    monkeypatch.setattr(lockstep, "run_again", counting(again))
    found = verified(run_of(build), mesh, recompute=recompute, **options)
    assert found.ok and found.max_error < 1e-10, str(found)
    assert 2 in again and {1, 2}.issuperset(again), "1: a piece of a block, cut off by a stage, that keeps nothing"


def counting(again: list[int]):
    """`run_again` that counts how often what runs with gradients is run."""

    def counted(function, *arguments):
        if not torch.is_grad_enabled():
            return function(*arguments)
        number = len(again)
        again.append(0)

        def run(*arguments):
            again[number] += 1
            return function(*arguments)

        return RUN_AGAIN(run, *arguments)

    return counted


def test_a_second_run_that_differs_is_found(monkeypatch):
    """What is verified is what is recomputed: here the second run's all-reduces are wrong."""
    again: list[bool] = []

    def noted(function, *arguments):
        runs = iter([False])

        def run(*arguments):
            again[:] = [next(runs, True)]
            try:
                return function(*arguments)
            finally:
                again.clear()

        return RUN_AGAIN(run, *arguments)

    right = lockstep.LIST_PRIMITIVES["all_reduce"]
    wrong = {**lockstep.LIST_PRIMITIVES, "all_reduce": lambda x: [v * (2 if any(again) else 1) for v in right(x)]}
    monkeypatch.setattr(lockstep, "run_again", noted)
    monkeypatch.setattr(lockstep, "LIST_PRIMITIVES", wrong)
    assert not verified(run_of(zoo.gpt2), "tp2", recompute="full").ok
    assert verified(run_of(zoo.gpt2), "tp2").ok


# --- on processes ----------------------------------------------------------------------------------------------------


BUILT = {"gpt2": zoo.gpt2, "shared": shared_blocks}


def saved(build: str, mesh: str, options: dict) -> dict[str, list[tuple[int, int, int]]]:
    """What `held.saved_on_a_rank` finds; "ignored": where regions are run as any other operators."""
    as_ever = mock.patch.object(regions, "run_again", lambda function, *arguments: function(*arguments))
    found = {}
    for how in ("none", "selective", "full", "ignored"):
        asked = {**options, "recompute": "full" if how == "ignored" else how}
        with mock.patch.dict(held.ZOO, {"it": BUILT[build]}), as_ever if how == "ignored" else nullcontext():
            found[how] = held.saved_on_a_rank("it", mesh, 0.1, asked)
    return found


@pytest.mark.large
@pytest.mark.parametrize(("build", "mesh", "options"), [
    ("shared", "tp2", {}), ("shared", "pp2", {}), ("shared", "dp2", {"zero": 3}),
])  # fmt: skip
def test_only_what_regions_read_is_held(build, mesh, options):
    """After a forward, to the byte as estimated; and where regions are ignored it is not less than without them."""
    for rank in dist.run_ranks(saved, 2, build, mesh, options):
        for none, selective, full, ignored in zip(*rank.values(), strict=True):
            sizes = [size for _, size, _ in (none, selective, full)]
            assert sizes == [estimated for *_, estimated in (none, selective, full)]
            assert sizes[2] < 0.3 * sizes[0] and sizes[2] < sizes[1] < sizes[0]
            assert ignored[1] == none[1]


def same_step(build, mesh, how, **options):
    """Twice: a program can be run again, and adds to `.grad`."""
    model, batch = BUILT[build]()
    model.eval() if build == "shared" else model.train()
    outputs, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, recompute=how, **options)
    assert pm.plan.recompute == how
    for times in (1, 2):
        zoo.assert_close_outputs(pm.step(**batch), loss)
        zoo.assert_same_grads(pm.full_grads(), {n: None if g is None else g * times for n, g in grads.items()})
    with torch.no_grad():
        zoo.assert_close_outputs(pm(**batch), outputs)
    if Mesh.parse(mesh).size("pp") == 1:  # a loop of the user's, where others stand in for the parameters
        pm.zero_grad()
        found = pm(**batch)
        loss = found.loss if hasattr(found, "loss") else found
        with torch.autocast("cpu", torch.bfloat16):  # of the backward: what is run again is run as it was
            loss.backward()
        zoo.assert_same_grads(pm.full_grads(), grads)
    assert all(node.op != "call_module" for node in pm.graph().graph.nodes), "the graph reads as ever"


@pytest.mark.large
@pytest.mark.parametrize(("build", "mesh", "how", "options"), [
    ("gpt2", "tp2", "full", {}), ("shared", "dp2", "selective", {"zero": 3}),
    ("shared", "dp2,tp2", "full", {"zero": 3}),
])  # fmt: skip
def test_processes_recompute(build, mesh, how, options):
    dist.run_ranks(same_step, Mesh.parse(mesh).num_ranks, build, mesh, how, **options)


def every_schedule(counted):
    for schedule in FLUSHING:
        runs: list[int] = []
        virtual = 1 if schedule in SINGLE_STAGE else 2
        with mock.patch.object(regions, "run_again", counting(runs)):
            same_step("shared", "pp2", "full", schedule=schedule, microbatches=4, virtual_stages=virtual)
        counted[schedule] = set(runs)
    return counted


@pytest.mark.large
def test_every_schedule_recomputes_once():
    """Also those that split the backward, which then do all of it in its first part."""
    for rank in dist.run_ranks(every_schedule, 2, {}, timeout_s=120.0):
        assert rank == {schedule: {2} for schedule in FLUSHING}


def dropped_in_place(mesh, how):
    model, batch = BUILT["shared"]()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, recompute=how)
    loss = pm.step(**batch)
    return loss, pm.full_grads()


def same_dropout(mesh):
    (loss, grads), (again, found) = (dropped_in_place(mesh, how) for how in ("none", "full"))
    zoo.assert_close_outputs(again, loss)
    zoo.assert_same_grads(found, grads)


@pytest.mark.large
def test_masks_are_the_same_both_times():
    """With rng="fast", where every rank draws its own."""
    dist.run_ranks(same_dropout, 2, "tp2")

"""Choices block by block: exact methods are exact, what all find fits, is what plans say, and runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zoo
from cost_models import gpt

import autopart
from autopart.errors import MemoryLimitError, OptionError
from autopart.extras.block_search.block_problem import BlockChoice, BlockProblem, Blocks
from autopart.extras.block_search.choose_blocks import blocks_of, completed
from autopart.extras.block_search.search_methods import BlockSearchResult, Method, solve
from autopart.ir.mesh import Mesh
from autopart.tuning.search import space_of

EXACT: tuple[Method, ...] = ("dynamic_programming", "integer_programming")
SAMPLING: tuple[Method, ...] = ("evolution_strategies", "reinforcement_learning")


def random_problem(seed: int) -> BlockProblem:
    """A few blocks of one or two kinds, in runs or mixed; whole numbers, so that a quantum can be one byte."""
    draw = np.random.default_rng(seed)
    blocks, kinds, options = int(draw.integers(2, 6)), int(draw.integers(1, 3)), int(draw.integers(2, 5))
    stages, microbatches = int(draw.integers(1, min(blocks, 4) + 1)), int(draw.integers(1, 5))
    kind = draw.integers(0, kinds, blocks)
    kind = np.sort(kind) if draw.random() < 0.5 else kind
    times, states, kept, temporary = (
        draw.integers(low, high, (kinds, options)).astype(float)[kind]
        for low, high in ((5, 20), (1, 10), (1, 10), (0, 8))
    )
    flight = np.minimum(microbatches, stages - np.arange(stages))
    base = [draw.integers(0, high, stages).astype(float) for high in (5, 9, 6)]
    usual = base[1] + base[2] + blocks / stages * (states.mean() + flight * kept.mean())
    return BlockProblem(
        times, states, kept, temporary, flight, *base, microbatches, float(int(usual.max() * draw.uniform(0.7, 1.3)))
    )


def brute_force(problem: BlockProblem, memory_bytes: float | None = None) -> float:
    """The fastest of all choices; infinite where none fits."""
    best, limit = np.inf, problem.memory_bytes if memory_bytes is None else memory_bytes
    options = np.array(list(itertools.product(range(problem.num_options), repeat=problem.num_blocks)))
    for begins in itertools.combinations(range(1, problem.num_blocks), problem.num_stages - 1):
        stage_of = np.broadcast_to(BlockChoice(tuple(options[0]), begins).stage_of, options.shape)
        times, sizes = problem.price(options, stage_of)
        best = min([best, *times[(sizes <= limit).all(1)]])
    return float(best)


def found(problem: BlockProblem, method: Method, budget: int | None = None) -> BlockSearchResult | None:
    try:
        return solve(problem, method, budget=budget)
    except MemoryLimitError:
        return None


def problems(number: int) -> Iterator[tuple[BlockProblem, float]]:
    for seed in range(number):
        problem = random_problem(seed)
        yield problem, brute_force(problem)


def test_exact_methods_find_what_brute_force_finds():
    infeasible = 0
    for problem, best in problems(100):
        infeasible += not np.isfinite(best)
        for method in EXACT:
            one = found(problem, method, int(problem.memory_bytes) if method == EXACT[0] else None)
            assert (one.step_time_s if one else np.inf) == pytest.approx(best, rel=1e-9), method
            assert one is None or (problem.fits(one.choice) and one.lower_bound_s <= best * (1 + 1e-9))
    assert 5 < infeasible < 50


def test_quanta_cost_no_more_than_their_bound():
    coarse, exact = 20, 0
    for problem, best in problems(40):
        one = found(problem, "dynamic_programming", coarse)
        assert one is None or problem.fits(one.choice)
        bound = brute_force(problem, problem.memory_bytes * (1 - (problem.num_blocks + 1) / coarse))
        assert (one.step_time_s if one else np.inf) <= bound
        exact += one is not None and one.step_time_s == best
    assert exact > 10


@pytest.mark.few
@pytest.mark.parametrize("method", SAMPLING)
def test_sampling_methods_fit_repeat_and_come_near(method):
    gaps = []
    for problem, best in problems(8):
        one, again = found(problem, method, 1000), found(problem, method, 1000)
        if one is None or again is None:
            assert one is again
            continue
        assert problem.fits(one.choice) and one.choice == again.choice and one.evaluations >= 1000
        assert one.step_time_s >= best * (1 - 1e-12)
        gaps.append(one.gap(best))
    assert len(gaps) > 3 and np.mean(gaps) < 0.1


@pytest.fixture(scope="module")
def space():
    model, batch = gpt(hidden=256, layers=8, vocabulary=2000, tokens=64, rows=8)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    return space_of(model, "a100-80gb-sxm", 256, batch)


def some(blocks: Blocks, seed: int) -> BlockChoice:
    """Any options, stages of two to four blocks."""
    draw = np.random.default_rng(seed)
    number, stages = len(blocks.blocks), blocks.setting.mesh.size("pp")
    begins = np.arange(1, stages) * number // stages
    return BlockChoice(tuple(draw.integers(0, len(blocks.options), number).tolist()), tuple(begins.tolist()))


def options_of(blocks: Blocks, choice: BlockChoice) -> dict:
    """Of `autopart.plan`."""
    return autopart.BlockSearch(
        blocks, BlockSearchResult("dynamic_programming", choice, 0, 0, 0), blocks.simulation(choice), False
    ).options


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "schedule", "off"),
    [("dp4", None, 0.01), ("tp2", None, 0.01), ("pp4", "gpipe", 0.05), ("dp2,pp2,tp2", "1f1b", 0.05),
     ("dp2,pp4", "1f1b", 0.1)],
)  # fmt: skip
def test_what_is_searched_is_what_is_simulated_and_planned(space, mesh, schedule, off):
    sizes = Mesh.parse(mesh)
    blocks = blocks_of(space, sizes, completed(256, sizes, schedule, 8), sequence_parallel=False)
    problem, choice = blocks.problem(80e9), some(blocks, 0)
    simulated = blocks.simulation(choice)
    assert problem.step_time_s(choice) == pytest.approx(simulated.step_time_s, rel=off)
    if schedule != "gpipe":  # its slowest forward and its slowest backward may be of two stages
        assert problem.step_time_s(choice) >= simulated.step_time_s * 0.995
    held = problem.stage_bytes(choice) / np.array(simulated.peak_memory_bytes)
    assert (held > 0.99).all() and (held < 1.2).all()  # as if every block had others beside it
    ids = torch.zeros(256, 64, dtype=torch.long, device="meta")
    plan = autopart.plan(
        space.model, mesh, example_kwargs={"input_ids": ids, "labels": ids.clone()}, **options_of(blocks, choice)
    )
    real = autopart.simulate(plan)
    assert simulated.step_time_s == pytest.approx(real.step_time_s, rel=0.02)
    assert simulated.peak_memory_bytes == pytest.approx(real.peak_memory_bytes, rel=0.02)


@pytest.mark.large
def test_what_is_found_is_a_plan_that_computes_what_the_model_does():
    torch.manual_seed(0)
    model, _ = gpt(hidden=32, layers=4, tokens=16, rows=8)
    model.config._attn_implementation = "eager"
    real = type(model)(model.config).double()
    real.loss_type = "ForCausalLM"
    ids = torch.randint(120, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    asked = {"microbatches": 4, "example_kwargs": batch}
    most = autopart.search_blocks(real, "pp2,dp2", memory="80GB", **asked)
    assert most.recompute == "none" and not any(option.cut for option in most.chosen.values())
    tight = autopart.search_blocks(real, "pp2,dp2", memory=int(0.85 * most.memory_bytes), **asked)
    assert len({*tight.chosen.values()}) > 1 and tight.memory_bytes <= 0.85 * most.memory_bytes
    assert tight.step_time_s > most.step_time_s
    plan = autopart.plan(real, "pp2,dp2", example_kwargs=batch, **tight.options)
    assert [name.partition("/")[0] for name in plan.cuts] and plan.recompute == tight.recompute
    cut = {name for name, option in tight.chosen.items() if option.cut}
    stored = {
        name.rsplit(".", 3)[0] for name, p in real.named_parameters()
        if ".h." in name and p.dim() > 1 and plan.placement_text(name, "dp") != "R"
    }  # fmt: skip
    assert {".".join(name.split(".")[:3]) for name in stored} == cut
    assert str(tight) and autopart.verify(real, "pp2,dp2", example_kwargs=batch, plan=plan).max_error < 1e-10


@pytest.mark.large
def test_blocks_of_two_kinds_and_models_that_are_not_made_smaller():
    model, batch = zoo.ZOO["t5"]()
    most = autopart.search_blocks(model, "pp2", example_kwargs=batch, microbatches=2)
    found = autopart.search_blocks(
        model, "pp2", example_kwargs=batch, microbatches=2, memory=int(0.95 * most.memory_bytes), method=EXACT[1]
    )
    assert {name.partition(".")[0] for name in found.chosen} == {"encoder", "decoder"} and len(found.chosen) == 4
    assert {option.recompute for option in found.chosen.values()} == {"none", "full"}
    plan = autopart.plan(model, "pp2", example_kwargs=batch, **found.options)
    assert autopart.verify(model, "pp2", example_kwargs=batch, plan=plan).max_error < 1e-10
    assert max(row["total"] for row in plan.memory) < most.memory_bytes


@pytest.mark.large
def test_mistakes(space):
    model, call = space.model, {"example_kwargs": space.example, "global_batch": 32}
    for mesh, options, error in [
        ("dp4", {"method": "luck"}, "unknown method='luck'"),
        ("pp2", {"schedule": "zbv"}, "schedule='zbv' is not supported by search_blocks"),
        (
            "pp16",
            {},
            r"search_blocks needs at least one repeated block per pipeline stage \(pp=16\)\n  why    the model has 8 "
            r"adjacent",
        ),
        ("dp3", {}, "a batch of 32 samples cannot be split into dp=3 x microbatches=1 equal parts"),
    ]:
        with pytest.raises(OptionError, match=error):
            autopart.search_blocks(model, mesh, **options, **call)
    for method in (*EXACT, *SAMPLING):
        with pytest.raises(MemoryLimitError, match=f"{method} finds no options of blocks that fit into 1 kB"):
            autopart.search_blocks(model, "pp2", memory=1000, method=method, budget=100, **call)

"""One table: feature x mesh x model computes what one device computes.

In one process, all ranks of a step (`verify`): loss, outputs and every gradient. On processes, training: loss and
gradients of steps that add up, then weights after three optimizer steps with clipping.
"""

from __future__ import annotations

import gc
import itertools
import random
import shutil
from typing import Any

import dist
import pytest
import zoo
from traced import run_of, verified
from zero_checks import trains

from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import SPLIT_BACKWARD, can_run

Run = tuple[str, str, dict[str, Any]]
"""Model, mesh, options."""

# --- in one process --------------------------------------------------------------------------------------------------

FEATURES: list[dict[str, Any]] = [
    {"zero": 1}, {"zero": 2, "microbatches": 2}, {"zero": 3}, {"zero": 3, "recompute": "full"},
    {"recompute": "full", "microbatches": 2}, {"recompute": "selective"}, {"sequence_parallel": True, "zero": 3},
]  # fmt: skip
MESHES = ("dp2", "dp2,tp2", "pp2,dp2", "cp2", "dp2,cp2,tp2", "dpr2,cp2", "pp2,dp2,cp2", "dp2,cp3")
MODELS = ("gpt2", "llama", "bert", "conv_net")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_a_feature_is_exact(options, mesh, name):
    found = verified(run_of(zoo.ZOO[name]), mesh, **options)
    assert found.ok and found.max_error < 1e-10, str(found)


# --- on processes ----------------------------------------------------------------------------------------------------

TOGETHER: dict[int, list[Run]] = {  # by the number of ranks
    2: [
        ("llama", "dp2", {"zero": 3, "recompute": "full"}),
        ("skip_mlp", "dp2", {"zero": 1, "microbatches": 2}),
        ("skip_mlp", "pp2", {"schedule": "zbv", "microbatches": 4}),
        ("gpt2", "cp2", {"zero": 3}),
    ],
    4: [
        ("skip_mlp", "dpr2,dp2", {"zero": 0, "microbatches": 2}),
        ("skip_mlp", "dpr2,dp2", {"zero": 2, "microbatches": 2}),
        ("skip_mlp", "pp2,dp2", {"zero": 2, "schedule": "1f1b", "microbatches": 2}),
        ("llama", "dp2,cp2", {"zero": 2, "microbatches": 2}),
    ],
}


def trains_in_turn(runs: list[Run]) -> None:
    """Train several times in one start of processes. A failure names its run."""
    for name, mesh, options in runs:
        try:
            trains(name, mesh, {"compile": False, **options})
        except Exception as error:
            error.add_note(f"in {name} on {mesh} with {options}")
            raise
        gc.collect()  # frees the run's process groups: each has threads that wake a hundred times a second


@pytest.mark.whole
@pytest.mark.parametrize("num_ranks", TOGETHER)
def test_training_is_exact(num_ranks):
    runs = TOGETHER[num_ranks]
    assert {Mesh.parse(mesh).num_ranks for _, mesh, _ in runs} == {num_ranks}
    dist.run_ranks(trains_in_turn, num_ranks, runs, timeout_s=240)


def wrong_at_the_second(runs: list[Run]) -> None:
    """As `trains_in_turn`, with a loss that is wrong from the second run on."""
    step, count = zoo.reference, itertools.count()
    zoo.reference = lambda *given: (None, (found := step(*given))[1] + (next(count) > 0), found[2])
    try:
        trains_in_turn(runs)
    finally:
        zoo.reference = step


def test_a_failure_names_its_run():
    runs = [("skip_mlp", "dp1", {"zero": 0}), ("skip_mlp", "dp1", {"zero": 0, "microbatches": 2})]
    with pytest.raises(dist.RankError, match=r"in skip_mlp on dp1 with {'zero': 0, 'microbatches': 2}"):
        dist.run_ranks(wrong_at_the_second, 1, runs)


SAMPLE = 64
PROCESS_MESHES = ("dp2", "dp4", "dpr2,dp2", "dp2,tp2", "pp2,dp2", "tp2", "pp2", "dp3", "dp2,cp2", "pp2,cp2")
SCHEDULES = (None, "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
RECOMPUTE = ("none", "selective", "full")
PROCESS_MODELS = ("gpt2", "llama", "t5", "skip_mlp")  # tied weights; vectors that tp reduces; two stacks; skips


def sampled_runs() -> list[Run]:
    """Sample all combinations of options so that every value comes about as often."""
    choices = PROCESS_MESHES, SCHEDULES, (1, 2, 4), (0, 1, 2, 3), RECOMPUTE, (False, True), PROCESS_MODELS
    every = [one for one in itertools.product(*choices) if _can_be(*one)]
    shuffled = random.Random(0)
    levels = {zero: [one for one in every if one[3] == zero] for zero in (0, 1, 2, 3)}
    chosen: list[tuple[Any, ...]] = []
    for index in range(SAMPLE):
        mesh, compiled = PROCESS_MESHES[index % len(PROCESS_MESHES)], index % 16 == 7
        fitting = [one for one in levels[index // len(PROCESS_MESHES) % 4] if one[0] == mesh and one[5] == compiled]
        chosen.append(shuffled.choice(fitting or levels[0]))
    return [(model, mesh, {"schedule": schedule, "microbatches": microbatches, "zero": zero, "recompute": recompute,
                           "compile": compiled})
            for mesh, schedule, microbatches, zero, recompute, compiled, model in chosen]  # fmt: skip


def _can_be(
    mesh: str, schedule: str | None, microbatches: int, zero: int, recompute: str, compiled: bool, model: str
) -> bool:
    axes = Mesh.parse(mesh)
    if (axes.size("pp") > 1) != (schedule is not None) or (zero and axes.storing_axis is None):
        return False
    if schedule is not None:
        stages = 2 if schedule in ("gpipe", "1f1b") else 4
        if not can_run(schedule, stages, 2, microbatches) or (compiled and schedule in SPLIT_BACKWARD):
            return False
    if compiled and (shutil.which("g++") is None or model == "t5" or recompute == "selective"):
        return False
    if axes.size("cp") > 1 and model not in ("gpt2", "llama"):
        return False
    return 8 % (axes.data_parallel_size * microbatches) == 0 and not (model == "skip_mlp" and recompute != "none")


@pytest.mark.large
@pytest.mark.parametrize(("build", "mesh", "options"), sampled_runs(), ids=str)
def test_training_with_sampled_options_is_exact(build, mesh, options):
    given = {name: value for name, value in options.items() if value is not None}
    dist.run_ranks(trains, Mesh.parse(mesh).num_ranks, build, mesh, given, timeout_s=400 if options["compile"] else 120)

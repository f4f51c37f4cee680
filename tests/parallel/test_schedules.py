"""The seven pipeline schedules of torch on real processes: the same loss and gradients as without a pipeline."""

import copy

import dist
import pytest
import zoo

import autopart
from autopart.errors import StageError
from autopart.ir.run.schedules import FLUSHING, MULTI_STAGE, SCHEDULES, check_schedule

RUNS = [  # schedule, pp, virtual stages, microbatches
    ("gpipe", 2, 1, (1, 2, 4, 8)),
    ("1f1b", 2, 1, (1, 2, 4, 8)),
    ("interleaved_1f1b", 2, 2, (2, 4, 8)),
    ("interleaved_zero_bubble", 2, 2, (2, 4, 8)),
    ("zbv", 2, 2, (2, 4, 8)),
    ("dualpipev", 2, 2, (4, 8)),
    ("looped_bfs", 2, 2, (2, 4, 8)),
    ("looped_bfs", 2, 3, (4,)),
    ("1f1b", 4, 1, (1, 2, 3, 4, 8)),
    ("interleaved_1f1b", 4, 2, (4, 8)),
]
MODELS = ("gpt2", "skip_mlp")
"""A tied weight on the first and last stage, with the most microbatches; values that cross several cuts, with all."""

REFUSED = {  # what cannot run: the call's arguments, and what the error says
    "unknown name": (("zigzag", 2, 2, 4), "unknown schedule 'zigzag'", "gpipe, 1f1b"),
    "stages no multiple of pp": (
        ("interleaved_1f1b", 3, 2, 4),
        "the number of stages is not a multiple of pp=2",
        "2 or 4 stages",
    ),
    "two stages a rank in 1f1b": (("1f1b", 4, 2, 4), "one stage per rank, not 2", "virtual_stages=1"),
    "two stages a rank in gpipe": (("gpipe", 4, 2, 4), "one stage per rank, not 2", "virtual_stages=1"),
    "one stage a rank in zbv": (("zbv", 2, 2, 4), "two stages per rank, not 1", "virtual_stages=2"),
    "three stages a rank in dualpipev": (("dualpipev", 6, 2, 8), "two stages per rank, not 3", "virtual_stages=2"),
    "few microbatches in 1f1b_2bw": (("1f1b_2bw", 4, 4, 2), "at least 4 microbatches", "microbatches=4"),
    "few microbatches in dualpipev": (("dualpipev", 4, 2, 2), "at least 4 microbatches", "microbatches=4"),
    "rounds of unequal length": (
        ("interleaved_1f1b", 4, 2, 5),
        "cannot be split into 2 equal rounds",
        "microbatches=4",
    ),
    "rounds of zero bubble": (
        ("interleaved_zero_bubble", 8, 4, 9),
        "cannot be split into 2 equal rounds",
        "microbatches=8",
    ),
}


def same_gradients(name, schedule, pp, virtual_stages, counts):
    model, batch = zoo.ZOO[name]()
    outputs, loss, grads = zoo.reference(model, batch)
    for microbatches in counts:
        pm = autopart.parallelize(
            copy.deepcopy(model),
            {"pp": pp},
            example_kwargs=batch,
            schedule=schedule,
            microbatches=microbatches,
            virtual_stages=virtual_stages,
        )
        asked = (schedule, microbatches, virtual_stages)
        assert (pm.plan.schedule.name, pm.plan.schedule.microbatches, pm.plan.schedule.virtual_stages) == asked
        assert len(pm.plan.stages) == pp * virtual_stages
        for times in (1, 2):  # a schedule can be run again, and adds to `.grad`
            zoo.assert_close_outputs(pm.step(**batch), loss, where=f"loss of {asked}")
            expected = {name: None if grad is None else grad * times for name, grad in grads.items()}
            zoo.assert_same_grads(pm.full_grads(), expected)
        zoo.assert_close_outputs(pm(**batch), outputs)


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run[:3])))
def test_schedule_is_exact(run, name):
    *asked, counts = run
    counts = counts if name == "skip_mlp" else counts[-1:]
    dist.run_ranks(same_gradients, run[1], name, *asked, counts, timeout_s=120.0)


def test_every_schedule_is_run():
    assert {run[0] for run in RUNS} == set(FLUSHING) and len(FLUSHING) == 7
    assert sum(run[1] == 4 for run in RUNS) >= 2


@pytest.mark.parametrize("case", REFUSED)
def test_schedule_is_refused(case):
    arguments, why, hint = REFUSED[case]
    with pytest.raises(StageError) as error:
        check_schedule(*arguments)
    assert why in str(error.value) and hint in str(error.value)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run[:3])))
def test_schedule_is_accepted(run):
    schedule, pp, virtual_stages, counts = run
    for microbatches in counts:
        check_schedule(schedule, pp * virtual_stages, pp, microbatches)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_default_microbatches_fit_the_schedule(schedule):
    """Where only the schedule is named, the rest is chosen so that it runs."""
    model, batch = zoo.skip_mlp()
    plan = autopart.plan(model, "pp2", example_kwargs=batch, schedule=schedule)
    chosen = plan.schedule
    assert chosen.name == (schedule or "1f1b")
    assert chosen.virtual_stages == (2 if schedule in MULTI_STAGE else 1)
    assert chosen.microbatches >= 2 * chosen.virtual_stages, "the default leaves the pipeline idle"
    check_schedule(chosen.name, 2 * chosen.virtual_stages, 2, chosen.microbatches)


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"virtual_stages": 2}])
def test_schedule_without_pipeline_is_refused(options):
    model, batch = zoo.skip_mlp()
    with pytest.raises(autopart.AutopartError, match="has no axis pp"):
        autopart.plan(model, "tp2", example_kwargs=batch, **options)

"""The simulated step: published bubbles and activations of every schedule, sends, memory, and orders that never end."""

import math
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.cost.predict.timeline import Durations, Timeline, execute, timeline
from autopart.errors import OptionError, StageError
from autopart.ir.run.schedule_actions import Action, actions, peak_activations
from autopart.ir.run.schedules import DELAYED, MULTI_STAGE, SCHEDULES, SINGLE_STAGE, V_SHAPED, can_run

SIZES = [(1, 4), (2, 2), (2, 9), (3, 6), (4, 4), (4, 32), (5, 7), (8, 8), (8, 64)]
TIMES = [(1.0, 2.0), (0.1, 0.3), (7.3, 3.1)]  # forward, backward


def equal(schedule, pp, per_rank, microbatches, forward, backward, inputs=0.0, weights=0.0, **options) -> Timeline:
    """Stages that all take the same."""
    stages = pp * per_rank
    durations = Durations([forward] * stages, [backward] * stages, [inputs] * stages, [weights] * stages)
    return timeline(schedule, stages, pp, microbatches, durations, **options)


def bubble_s(step: Timeline) -> float:
    """Idle seconds of every rank, which are the same where stages are equal."""
    assert len({round(busy, 9) for busy in step.busy_s}) == 1
    return step.pipeline_time_s - step.busy_s[0]


def own_bubble_s(step: Timeline) -> float:
    """Most idle seconds of a rank between its own first and last action."""
    pairs = zip(step.spans, step.busy_s, strict=True)
    return max(spans[-1].end_s - spans[0].start_s - busy for spans, busy in pairs)


# --- what runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "stages", "pp", "microbatches"),
    [(name, stages, pp, m) for name in SCHEDULES for pp in (1, 2, 4) for m in (1, 2, 8, 16)
     for stages in [pp if name in SINGLE_STAGE else 2 * pp] if can_run(name, stages, pp, m)],
)  # fmt: skip
def test_every_stage_runs_every_microbatch_once(schedule, stages, pp, microbatches):
    done = Counter(
        (action.stage, kind, action.microbatch)
        for order in actions(schedule, stages, pp, microbatches)
        for action in order
        for kind in {"B": "IW"}.get(action.kind, action.kind)
    )
    assert done == Counter((s, kind, m) for s in range(stages) for kind in "FIW" for m in range(microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_busy_is_the_sum_of_the_durations(schedule):
    stages = 4 if schedule in SINGLE_STAGE else 8
    given = {kind: [0.1 + 0.7 * part + 0.01 * s for s in range(stages)] for part, kind in enumerate("FBIW")}
    step = timeline(schedule, stages, 4, 8, Durations(*given.values()))
    for busy, order in zip(step.busy_s, actions(schedule, stages, 4, 8), strict=True):
        assert busy == pytest.approx(math.fsum(given[a.kind][a.stage] for a in order), rel=1e-12)


def test_without_a_pipeline_nothing_is_idle():
    step = timeline(None, 1, 1, 3, Durations([1.0], [2.0]))
    assert (step.step_time_s, step.bubble_fraction, step.in_flight) == (9.0, 0.0, ({0: 1},))


# --- bubbles and activations, as published -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), TIMES)
def test_bubble_of_gpipe_and_1f1b(schedule, p, m, forward, backward):
    """(p-1)/m: Narayanan et al. 2021, section 2.2."""
    step = equal(schedule, p, 1, m, forward, backward)
    assert step.bubble_fraction == pytest.approx((p - 1) / m, abs=1e-12)
    assert step.step_time_s == pytest.approx((m + p - 1) * (forward + backward), rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
@pytest.mark.parametrize(("forward", "backward"), TIMES)
def test_without_a_flush_nothing_is_idle(p, m, forward, backward):
    """Narayanan et al. 2021 (PipeDream-2BW), section 3.1; it holds as many activations as 1F1B."""
    once = {"optimizer_s": [1.0] * p, "grad_sum_s": [2.0] * p, "grad_sum_hidden": 0.5}
    durations = Durations([forward] * p, [backward] * p, **once)
    step = timeline("1f1b_2bw", p, p, m, durations)
    assert step.step_time_s == pytest.approx(m * (forward + backward) + 1.0 + 2.0 - min(1.0, backward), rel=1e-12)
    assert step.bubble_fraction == pytest.approx(0, abs=1e-12)
    assert step.in_flight == tuple({i: p - i} for i in range(p))


def test_unlike_stages_wait_for_the_heaviest():
    assert equal("1f1b_2bw", 4, 1, 4, 1, 2).step_time_s == 12
    durations = Durations([1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 3.0, 2.0])
    assert timeline("1f1b_2bw", 4, 4, 8, durations, overlap_sends=True).step_time_s == pytest.approx(8 * 4.5)


def test_tied_gradients_bring_some_of_the_bubble_back():
    """The last stage waits for the first to finish each batch."""
    durations = Durations([1.0] * 4, [2.0] * 4)
    free, tied, flush = (
        timeline(name, 4, 4, 8, replace(durations, tied=pairs)).step_time_s
        for name, pairs in (("1f1b_2bw", ()), ("1f1b_2bw", [(0, 3)]), ("1f1b", [(0, 3)]))
    )
    assert free == 24 and flush == 33
    assert free < tied <= flush


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0])
@pytest.mark.parametrize(("forward", "backward"), TIMES)
def test_bubble_of_interleaved_schedules(schedule, v, p, m, forward, backward):
    """(1/v)(p-1)/m: Narayanan et al. 2021, section 2.2; looped BFS idles as long (Lamy-Poirier 2022)."""
    step = equal(schedule, p, v, m, forward, backward)
    assert step.bubble_fraction == pytest.approx((p - 1) / (m * v), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_of_gpipe_and_1f1b(p, m):
    assert equal("gpipe", p, 1, m, 1, 2).in_flight == tuple({i: m} for i in range(p))
    assert equal("1f1b", p, 1, m, 1, 2).in_flight == tuple({i: min(m, p - i)} for i in range(p))


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 4), (4, 16), (8, 16)])
def test_activations_of_interleaved_1f1b(v, p, m):
    """p(1 + (p-1)/(pv)) of whole depth on the first rank (Korthikanti et al. 2022), so that times v in stages; no more
    than there are. Torch's order holds exactly that, two less on each rank after it."""
    held = [sum(counts.values()) for counts in equal("interleaved_1f1b", p, v, m, 1, 2).in_flight]
    assert held == [min(p * v + p - 1 - 2 * i, m * v) for i in range(p)]


def test_looped_bfs_holds_everything():
    step = equal("looped_bfs", 4, 2, 6, 1, 2)
    assert step.in_flight == tuple({i: 6, i + 4: 6} for i in range(4))


@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 7), (4, 16), (8, 32)])
@pytest.mark.parametrize(("f", "i", "w"), [(10, 10, 10), (10, 12, 8), (10, 15, 5), (10, 8, 10)])
def test_bubble_of_interleaved_zero_bubble_is_that_of_zb_h1(v, p, m, f, i, w):
    """(p-1)(T_F + T_B - T_W)/v: ZB-H1 (Qi et al. 2024, table 2), of each rank from its own start to its own end, with
    T in stages. The whole pipeline idles as long where T_W <= T_F <= T_B, as the paper has it; else a late rank's last
    weights stand over."""
    step = equal("interleaved_zero_bubble", p, v, m, f, i + w, i, w)
    assert own_bubble_s(step) == (p - 1) * (f + i - w)
    assert bubble_s(step) == (p - 1) * (f + i - w if w <= f <= i else max(f, w))


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 3), (2, 8), (4, 7), (4, 16), (8, 32)])
def test_bubble_of_zbv(p, m):
    """0 for T_F = T_B = T_W: so it is from each rank's own start to its own end, as the paper counts because ranks need
    not wait for each other before the optimizer. Torch's step ends for all together: each rank starts one stage after
    the one before it, so the step is p-1 stages longer."""
    step = equal("zbv", p, 2, m, 1, 2, 1, 1)
    assert own_bubble_s(step) == 0
    assert bubble_s(step) == p - 1


def test_bubble_of_zbv_with_too_few_microbatches():
    """Under 2p-1 microbatches torch leaves gaps where the others would have been."""
    assert own_bubble_s(equal("zbv", 4, 2, 6, 1, 2, 1, 1)) > 0


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
def test_bubble_of_dualpipev(p, m):
    """(PP/2 - 1)(F&B + B - 3W), PP = 2p stages, B the whole backward (DeepSeek's DualPipe): exact for T_F = T_B = T_W
    with F&B = F + B, because torch runs a pair one after the other. With a longer backward of the inputs torch's order
    idles a little less than the formula."""
    assert bubble_s(equal("dualpipev", p, 2, m, 1, 2, 1, 1)) == (p - 1) * (3 + 2 - 3)
    measured, formula = bubble_s(equal("dualpipev", p, 2, m, 10, 20, 12, 8)), (p - 1) * (30 + 20 - 3 * 8)
    assert 0.92 * formula < measured < formula


def test_a_pair_of_dualpipev_sends_after_both():
    """Were the forward of a pair sent at once, the bubble would be half as long."""
    orders, ones = actions("dualpipev", 8, 4, 16), [1.0] * 8
    durations = Durations(ones, [2.0] * 8, ones, ones)
    apart = [[action._replace(joined=False) for action in order] for order in orders]
    assert bubble_s(execute(orders, durations, overlap_sends=True)) == 6
    assert bubble_s(execute(apart, durations, overlap_sends=True)) == 3


# --- sends ---------------------------------------------------------------------------------------------------------


def gpipe_with_sends(p, m, forward, backward, send, overlap_sends=None):
    durations = Durations([forward] * p, [backward] * p, (), (), [send] * (p - 1), [send] * (p - 1))
    return timeline("gpipe", p, p, m, durations, overlap_sends=overlap_sends).step_time_s


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 8)])
def test_time_of_sends(p, m):
    forward, backward, send = 3.0, 5.0, 2.0
    hidden = (m + p - 1) * (forward + backward) + 2 * (p - 1) * send  # all but the first hop of each rank
    waited_for = forward + backward + (m + p - 2) * (forward + backward + 2 * send)
    assert gpipe_with_sends(p, m, forward, backward, send, overlap_sends=True) == hidden
    assert gpipe_with_sends(p, m, forward, backward, send) == waited_for  # as torch runs it


def test_a_slow_link_carries_one_value_at_a_time():
    assert gpipe_with_sends(2, 8, 3.0, 5.0, 100.0, overlap_sends=True) == 2 * (3 + 5 + 8 * 100)


def test_stages_on_one_rank_send_nothing():
    ones = [1.0] * 8
    sends = [100.0 if boundary == 3 else 0.0 for boundary in range(7)]  # the bottom of the V
    durations = Durations(ones, [2.0] * 8, ones, ones)
    step = timeline("zbv", 8, 4, 8, replace(durations, send_forward_s=sends, send_backward_s=sends))
    assert step == timeline("zbv", 8, 4, 8, durations)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchs_runtime_of_several_stages_overlaps_sends(schedule):
    stages = 4 if schedule in SINGLE_STAGE else 8
    durations = Durations([1.0] * stages, [2.0] * stages, [1.0] * stages, [1.0] * stages, [0.5] * (stages - 1))
    found = [timeline(schedule, stages, 4, 8, durations, overlap_sends=o).step_time_s for o in (None, True, False)]
    assert found[0] == found[1 if schedule in MULTI_STAGE else 2]
    assert found[1] < found[2]


# --- any durations -------------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 10, allow_nan=False)
FIELDS = ("forward_s", "backward_s", "input_backward_s", "weight_backward_s", "send_forward_s", "send_backward_s")


@st.composite
def steps(draw):
    """The arguments of `timeline` with random durations."""
    schedule, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 4))
    per_rank = 1 if schedule in SINGLE_STAGE else 2 if schedule in V_SHAPED else draw(st.integers(1, 3))
    stages = pp * per_rank
    microbatches = stages * draw(st.integers(1, 2))
    sizes = [stages] * 4 + [stages - 1] * 2
    drawn = [draw(st.lists(SECONDS, min_size=size, max_size=size)) for size in sizes]
    return schedule, stages, pp, microbatches, Durations(*drawn)


@given(steps(), st.booleans())
def test_a_step_takes_as_long_as_the_heaviest_rank(arguments, overlap_sends):
    step = timeline(*arguments, overlap_sends=overlap_sends)
    assert step.pipeline_time_s >= max(step.busy_s) * (1 - 1e-12)
    for spans in step.spans:
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))


@given(steps(), st.booleans(), st.sampled_from(FIELDS), st.integers(0, 99), SECONDS)
def test_nothing_gets_faster_where_a_duration_grows(arguments, overlap_sends, field, place, more):
    *what, durations = arguments
    values = list(getattr(durations, field))
    if values:
        values[place % len(values)] += more
    slower = timeline(*what, replace(durations, **{field: values}), overlap_sends=overlap_sends)
    before_s = timeline(*what, durations, overlap_sends=overlap_sends).step_time_s
    assert slower.step_time_s >= before_s * (1 - 1e-12 * (what[0] in DELAYED))  # there it is a difference


@given(steps())
def test_overlapped_sends_are_never_slower(arguments):
    overlapped, waited_for = (timeline(*arguments, overlap_sends=overlap).step_time_s for overlap in (True, False))
    assert overlapped <= waited_for * (1 + 1e-12)


# --- once a step ---------------------------------------------------------------------------------------------------


def test_gradient_sums_and_optimizer_come_after_a_rank_has_finished():
    durations = Durations([1.0] * 2, [2.0] * 2, grad_sum_s=[3.0, 8.0], optimizer_s=[5.0, 1.0])
    step = timeline("1f1b", 2, 2, 4, durations)
    assert step.pipeline_time_s == 15
    assert step.grad_sums == ((15.0, 18.0), (13.0, 21.0))  # the last stage is done one backward before the first
    assert step.optimizers == ((18.0, 23.0), (21.0, 22.0))
    assert step.step_time_s == 23
    assert step.bubble_fraction == 0.25


@pytest.mark.parametrize(("hidden", "end"), [(0.0, 18.0), (0.5, 16.5), (1.0, 16.0)])
def test_gradient_sums_hide_under_the_last_backward_alone(hidden, end):
    durations = Durations([1.0] * 2, [2.0] * 2, grad_sum_s=[3.0, 0.0], grad_sum_hidden=hidden)
    assert timeline("1f1b", 2, 2, 4, durations).step_time_s == end


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_what_the_order_holds(schedule):
    stages = 4 if schedule in SINGLE_STAGE else 8
    held, delayed = [100 + 7 * s for s in range(stages)], [10 + s for s in range(stages)]
    durations = Durations(*([1.0 + 0.1 * s for s in range(stages)] for _ in range(4)))
    step = timeline(schedule, stages, 4, 8, durations)
    for rank, order in enumerate(actions(schedule, stages, 4, 8)):
        mine = {action.stage for action in order}
        expected = peak_activations(order, {s: held[s] for s in mine}, {s: delayed[s] for s in mine}).size_bytes
        assert step.peak_memory_bytes(held, delayed)[rank] == expected
        curve = step.memory(held, delayed)[rank]
        begun = (3 - rank) * held[rank] if schedule in DELAYED else 0
        assert curve[0] == (0.0, begun) and curve[-1][1] == begun
        assert [time_s for time_s, _ in curve] == sorted(time_s for time_s, _ in curve)


def test_memory_over_time():
    step = timeline("gpipe", 2, 2, 2, Durations([1.0] * 2, [2.0] * 2))
    assert step.memory([5, 3])[1] == [(0.0, 0), (1.0, 3), (2.0, 6), (5.0, 3), (7.0, 0)]


# --- what cannot be ------------------------------------------------------------------------------------------------

ONES = Durations([1.0, 1.0], [1.0, 1.0])
REFUSED = {
    "too few": (ONES, {"forward_s": [1.0]}, "forward_s has 1 durations", "2 stages on 2 ranks need 2"),
    "too many": (ONES, {"send_forward_s": [1.0, 1.0]}, "send_forward_s has 2 durations", "need 1"),
    "negative": (ONES, {"backward_s": [1.0, -1.0]}, "backward_s has a duration of -1.0", "at least 0"),
    "not a number": (ONES, {"optimizer_s": [math.nan, 0.0]}, "optimizer_s has a duration of nan", "finite"),
    "more than all": (ONES, {"grad_sum_hidden": 1.5}, "grad_sum_hidden=1.5", "from 0 to 1"),
}


@pytest.mark.parametrize(("durations", "change", "what", "hint"), REFUSED.values(), ids=REFUSED)
def test_durations_that_do_not_fit(durations, change, what, hint):
    with pytest.raises(OptionError) as error:
        timeline("gpipe", 2, 2, 4, replace(durations, **change))
    assert what in str(error.value) and hint in str(error.value)


def test_a_split_backward_needs_the_time_of_its_parts():
    with pytest.raises(OptionError, match="input_backward_s has 0 durations"):
        timeline("zbv", 2, 1, 4, ONES)


def test_what_a_schedule_cannot_run():
    with pytest.raises(StageError, match="at least 2 microbatches"):
        timeline("1f1b_2bw", 2, 2, 1, ONES)
    with pytest.raises(StageError, match="2 stages on pp=2 need a schedule"):
        timeline(None, 2, 2, 1, ONES)


def order(text):
    return [Action(int(word[0]), word[1], int(word[2])) for word in text.split()]


@pytest.mark.parametrize(
    ("orders", "why"),
    [(("0F0 0B0", "1B0 1F0"), "rank 0 at 0B0 waits for 1B0; rank 1 at 1B0 waits for 1F0"),
     (("0F0 0B0", "1F1 1B1"), "rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1"),
     (("0F0 0W0 0I0", "1F0 1I0 1W0"), "rank 0 at 0W0 waits for 0B0")],
)  # fmt: skip
@pytest.mark.parametrize("overlap_sends", [True, False])
def test_an_order_that_never_ends(orders, why, overlap_sends):
    durations = replace(ONES, input_backward_s=[1.0, 1.0], weight_backward_s=[1.0, 1.0])
    with pytest.raises(StageError) as error:
        execute([order(text) for text in orders], durations, overlap_sends=overlap_sends)
    assert "the schedule never ends" in str(error.value) and why in str(error.value)


def test_the_largest_pipelines_take_little_time():
    """3,072 ranks of Narayanan et al. 2021: pp=64 and 512 microbatches. A third of a second; the limit is for slow
    machines."""
    start = time.process_time()
    assert equal("1f1b", 64, 1, 512, 1.0, 2.0).bubble_fraction == 63 / 512
    assert time.process_time() - start < 5

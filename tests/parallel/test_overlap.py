"""What is sent between ranks begins before it is needed: weights a block ahead, gradients while the backward runs.

The order of issue, recorded: collectives by what begins them, work by the shapes of its products. Every block of the
model is as wide as no other, so that a shape tells the block.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import dist
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopart
from autopart.ir.run.buckets import ALONE_BYTES
from autopart.runtime.gradients import reductions
from autopart.runtime.gradients.param_bucket import ParamBucket
from autopart.runtime.gradients.shard_collectives import ShardCollectives

WIDTHS = (256, 260, 264, 268)
"""Of the blocks' inner sides: each block is more than a megabyte, which makes a bucket, and less than two, which the
second bucket of a stage may have; the first one is that of the stem."""
OUTER = 288
PRODUCTS = 5
WIDE = 1824


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(OUTER, width, bias=False), nn.Linear(width, OUTER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(OUTER, OUTER, bias=False)
        self.blocks = nn.ModuleList(map(Block, WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Uneven(nn.Module):
    """The middle one is more than four megabytes, the others are less than one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(OUTER, OUTER, bias=False), nn.Linear(OUTER, WIDE), nn.Linear(WIDE, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Recorder(TorchDispatchMode):
    """`events`: ("work", block) of every matrix product, and what `note` is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default):
            for size in {size for a in args if isinstance(a, Tensor) for size in a.shape} & set(WIDTHS):
                self.events.append(("work", WIDTHS.index(size)))
        return func(*args, **(kwargs or {}))

    def note(self, what: str, names: tuple[str, ...]) -> None:
        for block in sorted({int(name.split(".")[1]) for name in names if name.startswith("blocks")}):
            self.events.append((what, block))


def noted(reduction: Any, note: Any) -> Any:
    """The same reduction; `note(number)` is called when it has launched a collective, `note(None)` when it ends."""
    for number in itertools.count():
        try:
            next(reduction)
        except StopIteration as end:
            note(None)
            return end.value
        note(number)
        yield


def events(mesh: str, options: dict[str, Any], own_backward: bool) -> list[tuple[str, int]]:
    """Of the second step of a rank, each run of the same event once."""
    model, batch = Blocks().double(), {"x": torch.randn(8, OUTER, dtype=torch.float64)}
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, **options)
    recorder = Recorder()
    gather, reduce = ShardCollectives.gather, ParamBucket.reduce

    def gathers(self: Any, *given: Any) -> Any:
        recorder.note("gather", self.names)
        return gather(self, *given)

    def reduces(self: Any, grads: Any, present: Any, *given: Any, **options: Any) -> Any:
        names = tuple(self.names[i] for i in present)
        whats = {0: "reduce", 1: "sum over replicas"}
        note = lambda number: recorder.note(whats[number], names) if number is not None else None  # noqa: E731
        return noted(reduce(self, grads, present, *given, **options), note)

    with (
        mock.patch.object(ShardCollectives, "gather", gathers),
        mock.patch.object(ParamBucket, "reduce", reduces),
    ):
        for _ in range(2):
            pm.zero_grad()
            recorder.events.clear()
            with recorder:
                if own_backward:
                    pm(**batch).backward()
                else:
                    pm.step(**batch)
    found = recorder.events
    return [event for i, event in enumerate(found) if i == 0 or found[i - 1] != event]


def first(found: list[tuple[str, int]], event: tuple[str, int], after: int = -1) -> int:
    return next(i for i, one in enumerate(found) if i > after and one == event)


def latest(found: list[tuple[str, int]], event: tuple[str, int]) -> int:
    return max(i for i, one in enumerate(found) if one == event)


LAST = len(WIDTHS) - 1


@pytest.mark.whole
@pytest.mark.parametrize("own_backward", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_sent_while_the_backward_runs(zero, own_backward):
    """Those of a block before the block before it is worked on; and all ranks send in the same order."""
    ranks = dist.run_ranks(events, 2, "dp2", {"zero": zero}, own_backward)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    backward = latest(found, ("work", LAST))
    assert [block for what, block in found if what == "reduce"] == list(range(LAST, -1, -1))
    for block in range(LAST, 0, -1):
        assert first(found, ("reduce", block)) < first(found, ("work", block - 1), backward)


@pytest.mark.parametrize("own_backward", [False, True], ids=["step", "backward"])
def test_weights_are_gathered_one_block_ahead(own_backward):
    """In the forward and, the other way, in the backward; and no two blocks ahead."""
    (found, _) = dist.run_ranks(events, 2, "dp2", {"zero": 3}, own_backward)
    turn = latest(found, ("work", LAST))
    for block in range(LAST):
        assert first(found, ("gather", block + 1)) < first(found, ("work", block))
        if block + 2 <= LAST:
            assert first(found, ("gather", block + 2)) > first(found, ("work", block))
    last = first(found, ("work", LAST))
    again = [i for i, (what, _) in enumerate(found) if what == "gather" and i > last]
    assert [found[i][1] for i in again] == list(range(LAST, -1, -1))
    for block in range(LAST, 0, -1):
        assert first(found, ("gather", block - 1), last) < latest(found, ("work", block))
    assert turn > last


def test_nothing_is_gathered_ahead_where_that_is_not_asked_for():
    (found, _) = dist.run_ranks(events, 2, "dp2", {"zero": 3, "prefetch": 0}, False)
    for block in range(LAST):
        assert first(found, ("gather", block + 1)) > first(found, ("work", block))


@pytest.mark.parametrize(("zero", "microbatches", "own_backward"), [
    (1, 2, False), (2, 2, False), (3, 2, False), (2, 1, True), (3, 1, True),
])  # fmt: skip
def test_parts_are_summed_over_replicas_while_the_backward_runs(zero, microbatches, own_backward):
    """Once a step, those of a block when the next has been scattered, before the work that follows."""
    options = {"zero": zero, "microbatches": microbatches}
    ranks = dist.run_ranks(events, 4, "dpr2,dp2", options, own_backward, timeout_s=120)
    assert all(found == ranks[0] for found in ranks)
    found = ranks[0]
    backward = latest(found, ("work", LAST))
    assert [block for what, block in found if what == "sum over replicas"] == list(range(LAST, -1, -1))
    for block in range(LAST, 1, -1):
        assert first(found, ("sum over replicas", block)) < first(found, ("work", block - 2), backward)


@pytest.mark.parametrize("own_backward", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("zero", [1, 2])
def test_what_lives_for_a_step_is_gathered_once(zero, own_backward):
    """Two blocks ahead of the work."""
    (found, _) = dist.run_ranks(events, 2, "dp2", {"zero": zero, "microbatches": 2}, own_backward)
    assert [block for what, block in found if what == "gather"] == list(range(LAST + 1))
    for block in range(LAST + 1):
        assert first(found, ("gather", min(block + 2, LAST))) < first(found, ("work", block))
        if block + 3 <= LAST:
            assert first(found, ("gather", block + 3)) > first(found, ("work", block))
    assert sum(what == "reduce" for what, _ in found) == len(WIDTHS) * (1 if own_backward else zero)


def most_copies_at_a_time():
    """How many buckets of small gradients, which are copied together, were under way at a time."""
    model, batch = Blocks().double(), {"x": torch.randn(8, OUTER, dtype=torch.float64)}
    pm = autopart.parallelize(model, "dp2", example_kwargs=batch)
    reduce, open_sums, most = ParamBucket.reduce, set(), 0

    def reduces(self: Any, *given: Any, **options: Any) -> Any:
        def note(number: int | None) -> None:
            nonlocal most
            if number is None:
                open_sums.discard(self.names)
            elif self.needs_buffer:
                open_sums.add(self.names)
            most = max(most, len(open_sums))

        return noted(reduce(self, *given, **options), note)

    with mock.patch.object(ParamBucket, "reduce", reduces):
        pm.step(**batch)
    assert not open_sums
    return most


def messages_of_a_step() -> list[tuple[int, bool]]:
    """The elements of what is summed at a time, and whether that is in the memory of a gradient."""
    torch.manual_seed(0)
    model, batch = Uneven().double(), {"x": torch.randn(8, OUTER, dtype=torch.float64)}
    pm = autopart.parallelize(copy.deepcopy(model), "dp2", example_kwargs=batch)
    begin_all_reduce, sent = reductions.begin_all_reduce, []

    def sums(flat: Tensor, groups: Any) -> Any:
        sent.append((flat.numel(), flat.data_ptr()))
        return begin_all_reduce(flat, groups)

    with mock.patch.object(reductions, "begin_all_reduce", sums):
        pm.step(**batch)
    model(**batch).backward()
    for own, expected in zip(pm.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, atol=1e-10, rtol=0)
    large = {p.grad.data_ptr() for p in pm.parameters() if p.grad is not None and p.grad.nbytes >= ALONE_BYTES}
    return [(elements, address in large) for elements, address in sent]


def test_a_large_gradient_is_summed_where_it_is():
    """As soon as it is there; small ones on both sides of it are copied together."""
    (found, _) = dist.run_ranks(messages_of_a_step, 2)
    assert found == [(WIDE * OUTER, True), (OUTER * OUTER + WIDE + WIDE * 4 + 4, False)]


class Sum(nn.Module):
    """The gradient of `late`, which a bucket has alone, is in the memory of that of tanh.

    The backward of tanh reads it after the backward of `slow`, by which time the reduction of `late` has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late, self.slow = (nn.Parameter(torch.randn(2 * OUTER, 4 * OUTER)) for _ in range(3))
        self.register_buffer("mixing", torch.eye(4 * OUTER))

    def forward(self, x: Tensor) -> Tensor:
        early, slow = torch.tanh(self.early), self.slow
        for _ in range(PRODUCTS):
            slow = slow @ self.mixing
        return (x @ (early + self.late + slow)).square().mean()


def gradients_in_one_memory(zero: int, own_backward: bool) -> None:
    model, batch = Sum().double(), {"x": torch.randn(8, 2 * OUTER, dtype=torch.float64)}
    pm = autopart.parallelize(copy.deepcopy(model), "dp2", example_kwargs=batch, zero=zero)
    if own_backward:
        pm(**batch).backward()
    else:
        pm.step(**batch)
    model(**batch).backward()
    for name, gradient in pm.full_grads().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=1e-10, rtol=0)


@pytest.mark.whole
@pytest.mark.parametrize("own_backward", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_gradient_in_the_memory_of_another_is_summed_elsewhere(zero, own_backward):
    dist.run_ranks(gradients_in_one_memory, 2, zero, own_backward)


def test_two_copies_are_under_way_at_a_time():
    """As a plan counts them."""
    assert dist.run_ranks(most_copies_at_a_time, 2) == [2, 2]


def test_gradients_of_several_microbatches_are_sent_once():
    (found, _) = dist.run_ranks(events, 2, "dp2", {"zero": 0, "microbatches": 4}, False)
    assert sum(what == "reduce" for what, _ in found) == len(WIDTHS)
    assert first(found, ("reduce", LAST)) > latest(found, ("work", LAST)) - 1


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_stages_send_their_own_gradients(schedule):
    """In the last microbatch's backward; a backward in two parts sends when the second ends. The first block of the
    second stage is more than its first bucket may have."""
    ranks = dist.run_ranks(events, 4, "pp2,dp2", {"schedule": schedule, "zero": 1}, False, timeout_s=120)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    for found in ranks:
        sent = [block for what, block in found if what == "reduce"]
        assert set(sent) == {block for what, block in found if what == "work"} and len(sent) <= 3

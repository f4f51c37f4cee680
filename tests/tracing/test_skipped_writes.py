"""Writes that a model skips by values, as loops over experts have them: run on no elements, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.errors import TraceError

WIDTH, EXPERTS, TOKENS = 8, 4, 8
EVEN, ONE_SIDED = (0.0,) * EXPERTS, (99.0, 98.0, 0.0, 0.0)


class Mixture(nn.Module):
    """Adds to every row what its experts make of it. `mix(self, rows, gates, chosen)` is how."""

    def __init__(self, mix, towards):
        super().__init__()
        self.mix, self.router = mix, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(EXPERTS))
        self.register_buffer("towards", torch.tensor(towards))

    def forward(self, rows):
        gates, chosen = (self.router(rows) + self.towards).softmax(-1).topk(2)
        return rows + self.mix(self, rows, gates, chosen)


class Model(nn.Module):
    def __init__(self, mix, towards=EVEN):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.mixture = Mixture(mix, towards)

    def forward(self, ids, labels):
        rows = self.mixture(self.embed(ids).reshape(-1, WIDTH))
        return F.cross_entropy(self.head(rows), labels.flatten())


def counts(self, rows, gates, chosen):
    """DeepSeek-V3's own."""
    mixed = torch.zeros_like(rows)
    numbers = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for i in range(EXPERTS):
        if numbers[i] == 0:
            continue
        expert = self.experts[i]
        token, top = torch.where(chosen == i)
        mixed[token] += expert(rows[token]) * gates[token, top, None]
    return mixed


def only_busy(self, rows, gates, chosen):
    """More than whether anything is selected decides."""
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        if (chosen == i).sum() < 5:
            continue
        token, top = torch.where(chosen == i)
        mixed[token] += expert(rows[token]) * gates[token, top, None]
    return mixed


def by_another(self, rows, gates, chosen):
    """Something else decides."""
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if rows.mean() > 0.1 * i - 0.1:
            mixed[mask] += expert(rows[mask])
    return mixed


def any_row(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        of_expert = chosen == i
        mask = of_expert.any(-1)
        if mask.any():
            share = (gates / gates.sum(-1, keepdim=True) * of_expert).sum(-1, keepdim=True)
            mixed[mask] += expert(rows[mask]) * share[mask]
    return mixed


def not_any(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        if not torch.any(mask):
            continue
        token, top = torch.where(mask)
        mixed.index_add_(0, token, expert(rows[token]) * gates[token, top, None])
    return mixed


def number(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.sum().item() > 0:
            own = rows[mask]
            made = expert(own)
            mixed[mask] = mixed[mask] + made * gates[mask, :1]
    return mixed


def length(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        token, top = torch.where(chosen == i)
        if len(token) == 0:
            continue
        mixed[token] += expert(rows[token]) * gates[token, top, None]
    return mixed


def columns(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        found = (chosen == i).nonzero()
        if found.numel() > 0:
            token, top = found[:, 0], found[:, 1]
            mixed.index_add_(0, token, expert(rows[token]) * gates[token, top, None])
    return mixed


def one_hot(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    masks = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for i, expert in enumerate(self.experts):
        if masks[i].sum() == 0:
            continue
        top, token = torch.where(masks[i])
        mixed = mixed.index_add(0, token, expert(rows[token]) * gates[token, top, None])
    return mixed


def names_of_others(self, rows, gates, chosen):
    """Other code uses the same names for what it makes itself."""
    mixed = torch.zeros_like(rows)
    own = rows.tanh()
    made = own * 2
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if i == 0:
            own = rows[mask]
            mixed[mask] += own
        elif mask.any():
            own = rows[mask]
            mixed[mask] += expert(own)
    for mask in (chosen == 1).unbind(-1):
        if not mask.any():
            continue
        own = rows[mask]
        mixed[mask] += made[mask] * own
    return mixed


def each_choice(self, rows, gates, chosen):
    """nanoGPT's and others: a loop in a loop."""
    mixed = torch.zeros_like(rows)
    for top in range(2):
        for i in range(EXPERTS):
            mask = chosen[:, top] == i
            if mask.any():
                mixed[mask] += gates[mask, top, None] * self.experts[i](rows[mask])
    return mixed


def in_a_function(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        _add(mixed, rows, (chosen == i).any(-1), expert)
    return mixed


def _add(mixed, rows, mask, expert):
    if not mask.any():
        return
    with torch.enable_grad():
        for _ in range(2):
            mixed[mask] += expert(rows[mask])


def skips_all_that_follows(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if i > 0:
            if not mask.any():
                continue
            mixed[mask] += gates[mask, :1]
        elif mask.all():
            continue
        mixed[mask] += expert(rows[mask])
    return mixed


def filled(self, rows, gates, chosen):
    mixed = rows.tanh()
    for i in range(EXPERTS):
        mask = (chosen == i).any(-1, keepdim=True)
        if mask.sum() > 3:
            mixed = mixed.masked_fill(mask, 0.5)
    return mixed


EXACT = [counts, only_busy, by_another, any_row, not_any, number, length, columns, one_hot, names_of_others,
         each_choice, in_a_function, skips_all_that_follows, filled]  # fmt: skip


def call():
    torch.manual_seed(0)
    return {"ids": torch.randint(0, 32, (4, TOKENS // 4)), "labels": torch.randint(0, 32, (4, TOKENS // 4))}


@pytest.mark.few
@pytest.mark.parametrize("mix", EXACT, ids=lambda mix: mix.__name__)
def test_no_elements_are_written(mix):
    """An expert of ONE_SIDED's has no row."""
    report = autopart.verify(Model(mix, ONE_SIDED).double(), "dp2", example_kwargs=call())
    assert report.ok, report
    assert any("skips writes: the program runs them on no elements" in note for note in report.notes)
    assert not any("were not compared" in note for note in report.notes)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2,tp2"])
@pytest.mark.parametrize("mix", EXACT, ids=lambda mix: mix.__name__)
def test_on_every_axis(mix, mesh):
    report = autopart.verify(Model(mix).double(), mesh, example_kwargs=call())
    assert report.ok, report


@pytest.mark.large
@pytest.mark.parametrize("mix", [any_row, counts], ids=lambda mix: mix.__name__)
def test_rows_come_in_microbatches_where_the_condition_is_of_what_is_selected(mix):
    report = autopart.verify(Model(mix, ONE_SIDED).double(), "pp2", example_kwargs=call(), microbatches=2)
    assert report.ok, report


@pytest.mark.large
def test_in_mixed_precision():
    """What the model gives no gradient has one of zero."""
    report = autopart.verify(Model(any_row, ONE_SIDED), "tp2", example_kwargs=call(), precision="bf16")
    assert report.ok, report


@pytest.mark.large
def test_one_plan_for_both_answers():
    """The condition is asked of every batch: a plan made of one in which all is written runs another."""
    plan = autopart.plan(Model(only_busy), "tp2", example_kwargs=call())
    report = autopart.verify(Model(only_busy, ONE_SIDED), "tp2", plan=plan, example_kwargs=call())
    assert report.ok, report


# --- What does more than to write ----------------------------------------------------------------------------------


def by_the_number(self, rows, gates, chosen):
    """Where no row is of an expert, the gradient of `rows` would be 0 times infinity."""
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            shares = rows / mask.sum()
            mixed[mask] += expert(shares[mask])
    return mixed


def kept_by_a_function(self, rows, gates, chosen):
    mixed, kept = torch.zeros_like(rows), {}
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            own = _kept(kept, i, expert(rows[mask]))
            mixed[mask] += own
    return mixed + sum(one.sum() for one in kept.values())


def _kept(kept, i, made):
    kept[i] = made
    return made


def in_one_line(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i in range(EXPERTS):
        # fmt: off
        if torch.where(chosen == i)[0].numel(): mixed[torch.where(chosen == i)[0]] += 1  # noqa: E701
        # fmt: on
    return mixed


def elsewhere(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            mixed[mask] += expert(rows[mask])
            mixed[0] += 1
    return mixed


def _doubled(mixed):
    return mixed.mul_(2)


def hidden_write(self, rows, gates, chosen):
    mixed = torch.ones_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            twice = _doubled(mixed)
            mixed[mask] += expert(twice[mask])
    return mixed


def skips_what_follows(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if i >= 0:
            if not mask.any():
                continue
            rows = rows.tanh()
        mixed[mask] += expert(rows[mask])
    return mixed


def carried_on(self, rows, gates, chosen):
    mixed, last = torch.zeros_like(rows), rows
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            mixed[mask] += expert(last[mask])
            last = mixed * 2
    return mixed


def read_behind(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    own = rows
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            own = rows * 2
            mixed[mask] += expert(own[mask])
    return mixed + own


def of_an_earlier_turn(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            if i % 2 == 0:
                own = rows[mask]
            mixed[mask] += expert(own.mean(0, keepdim=True))
    return mixed


def counters(self, rows, gates, chosen):
    mixed, used = torch.zeros_like(rows), [0] * EXPERTS
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            mixed[mask] += expert(rows[mask])
            used[i] += 1
    return mixed / sum(used)


def counter(self, rows, gates, chosen):
    mixed, used = torch.zeros_like(rows), 0
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            used += 1
            mixed[mask] += expert(rows[mask])
    return mixed / used


def other_branch(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            mixed[mask] += expert(rows[mask])
        else:
            mixed += 1
    return mixed


def leaves_the_loop(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if not mask.any():
            return mixed
        mixed[mask] += expert(rows[mask])
    return mixed


def two_questions(self, rows, gates, chosen):
    mixed = torch.zeros_like(rows)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(-1)
        if mask.any() and rows.sum() > 0:
            mixed[mask] += expert(rows[mask])
    return mixed


MORE = {
    by_the_number: "div would still change the result",
    elsewhere: "select_scatter would still change the result",
    hidden_write: "with no selected elements, ",
    kept_by_a_function: "with no selected elements, ",
    **dict.fromkeys((in_one_line, skips_what_follows, carried_on, read_behind, of_an_earlier_turn, counters, counter,
                     other_branch, leaves_the_loop, two_questions), "decides what to run by the values"),
}  # fmt: skip


@pytest.mark.parametrize("mix", MORE, ids=lambda mix: mix.__name__)
def test_what_does_more_is_refused(mix):
    with pytest.raises(TraceError) as caught:
        autopart.plan(Model(mix), "dp2", example_kwargs=call())
    assert MORE[mix] in str(caught.value) and "test_skipped_writes.py:" in str(caught.value)

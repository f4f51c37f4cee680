"""Copies of a parameter that ranks hold alike: what lets them drift apart is found, and what is rounding is mended."""

import math
import tempfile
import warnings

import dist
import pytest
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import nn

import autopart
from autopart.errors import OptionError, ReplicaError
from autopart.runtime.consistency.replicas import is_due

WIDTH = 8


class Model(nn.Module):
    """`norm` is on every rank of tp, `table` on the first and the last stage."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return (x @ self.table.weight.t()).log_softmax(-1).pow(2).mean()


def train(mesh, name, change, number_of_steps, options, purpose="step"):
    """Steps in which rank 1 alone changes a parameter after step 2: the step that raised and what was said, what was
    warned, and whether the replicas of `name` are the same at the end."""
    torch.manual_seed(0)
    ids = torch.arange(12).view(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm = autopart.parallelize(Model(), mesh, example_kwargs={"ids": ids}, **options)
        optimizer = torch.optim.SGD(pm.parameters(), lr=1e-3)
        error = 0, ""
        for number in range(1, number_of_steps + 1):
            optimizer.zero_grad()
            try:
                if purpose == "step":
                    pm.step(ids=ids)
                else:
                    pm(ids=ids).backward()
            except ReplicaError as raised:
                error = number, str(raised)
                break
            optimizer.step()
            if number == 2 and td.get_rank() == 1 and name:
                with torch.no_grad():
                    parameter = getattr(pm.get_parameter(name), "to_local", lambda: pm.get_parameter(name))()
                    parameter.view(-1)[1] = math.nan if change is None else parameter.view(-1)[1] * (1 + change)
    said = [str(w.message) for w in caught if "replicas of" in str(w.message)]
    numbers = None
    if name:
        everyones = [None] * td.get_world_size()
        td.all_gather_object(everyones, pm.get_parameter(name).detach())
        numbers = all(torch.equal(everyones[0], other) for other in everyones)
    return error, said, numbers


EPS = torch.finfo(torch.float32).eps
BEYOND = [
    ("dp2", "up.weight", 1e-3, "step"),
    ("tp2", "norm.weight", 1e-3, "step"),
    ("pp2", "table.weight", 1e-3, "step"),
    ("dp2", "norm.weight", None, "step"),
    ("tp2", "norm.weight", 1e-4, "forward"),
]


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "name", "change", "purpose"), BEYOND)
def test_drift_is_an_error(mesh, name, change, purpose):
    when = 4 if change else 3  # before one rank's NaN is in the gradients of all
    reports = dist.run_ranks(train, 2, mesh, name, change, 6, {} if change else {"check_replicas": 3}, purpose)
    assert reports[0][0] == reports[1][0]
    step, text = reports[0][0]
    assert step == when
    assert text.startswith(f"the replicas of '{name}' have different values\n")
    assert "why    the values of rank 1 and of rank 0 differ by up to" in text
    assert f"where  before step {when}" in text


@pytest.mark.parametrize(("mesh", "name"), [("dp2", "up.weight"), ("tp2", "norm.weight"), ("pp2", "table.weight")])
def test_rounding_is_mended_with_one_warning(mesh, name):
    first, second = dist.run_ranks(train, 2, mesh, name, 2 * EPS, 6, {})
    assert first[0] == second[0] == (0, "")
    (said,) = first[1]
    assert f"before step 4 the replicas of '{name}' on ranks 0, 1 differ by" in said and second[1] == []
    assert first[2]


@pytest.mark.large
@pytest.mark.parametrize(("option", "step"), [(3, 3), (1, 3), (5, 5), (True, 4), (False, 0), (0, 0)])
def test_the_steps_are_an_option(option, step):
    reports = dist.run_ranks(train, 2, "dp2", "up.weight", 1e-3, 6, {"check_replicas": option})
    assert [error[0] for error, _, _ in reports] == [step] * 2


def test_what_is_cut_is_not_compared():
    """Every rank has its own part of `up` under tp, and of everything under zero=3."""
    for mesh, options in (("tp2", {}), ("dp2", {"zero": 3})):
        reports = dist.run_ranks(train, 2, mesh, "up.weight", 1e-3, 6, {"check_replicas": 1, **options})
        assert [error for error, _, _ in reports] == [(0, "")] * 2


@pytest.mark.large
def test_on_two_axes_the_ranks_are_named():
    reports = dist.run_ranks(train, 4, "dp2,tp2", "up.weight", 1e-3, 6, {})
    assert len({error for error, _, _ in reports}) == 1
    assert "why    the values of rank 3 and of rank 1 differ by up to" in reports[0][0][1]


@pytest.mark.large
def test_nothing_is_said_of_a_right_loop():
    assert [r[:2] for r in dist.run_ranks(train, 4, "dp2,tp2", "", 0, 9, {"check_replicas": 1})] == [((0, ""), [])] * 4


def test_when():
    assert [step for step in range(1, 401) if is_due(None, step)] == [1, 2, 4, 8, 100, 200, 300, 400]
    assert not any(is_due(False, step) for step in range(1, 401))


@pytest.mark.parametrize("wrong", [-1, 1.5, "often"])
def test_other_values_are_refused(wrong):
    with pytest.raises(OptionError, match=r"check_replicas=.* is not a number of steps"):
        autopart.parallelize(Model(), "tp2", check_replicas=wrong)


def save(mesh, method):
    """What `method` raises after rank 1 alone has skipped an update between two comparisons of steps."""
    torch.manual_seed(0)
    ids = torch.arange(12).view(4, 3)
    pm = autopart.parallelize(Model(), mesh, example_kwargs={"ids": ids})
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for number in range(1, 6):
        optimizer.zero_grad()
        pm.step(ids=ids)
        if number < 5 or td.get_rank() == 0:
            optimizer.step()
    if method == "torch.distributed.checkpoint.save":
        pm.state_dict()  # a look at it is no save
        dcp.save({"other": torch.ones(2)}, checkpoint_id=tempfile.mkdtemp())
        with pytest.raises(dcp.api.CheckpointException) as refused:
            dcp.save({"model": pm.state_dict()}, checkpoint_id=tempfile.mkdtemp())
        errors = {str(error) for error, _ in refused.value.failures.values()}
        assert len(refused.value.failures) == 2 and len(errors) == 1
        return errors.pop()
    with pytest.raises(ReplicaError) as raised:
        pm.full_state_dict() if method == "full_state_dict" else pm.full_optimizer_state_dict(optimizer)
    return str(raised.value)


@pytest.mark.parametrize(
    "method", ["full_state_dict", "full_optimizer_state_dict", "torch.distributed.checkpoint.save"]
)
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_a_skipped_update_is_found_before_saving(mesh, method):
    first, second = dist.run_ranks(save, 2, mesh, method)
    assert first == second
    assert "have different values" in first and f"before {method}(), after step 5" in first

"""A rank that hangs or is gone: those that wait for it say so, after `timeout=` seconds."""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import dist
import pytest
import torch
import torch.distributed as td
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopart
from autopart.errors import HangError, InputError, OptionError
from autopart.runtime.comm.watchdog import Watch
from autopart.runtime.executable import Executable

WIDTH, TIMEOUT_S = 8, 1.5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(x)))
        return x.pow(2).mean()


def train(mesh, case, who=1, num_steps=4):
    """What this rank says of the others, when `who` stops coming at step 3, and after how many seconds."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, WIDTH)}
    if case == "device mesh":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pm = autopart.parallelize(Model(), mesh, example_kwargs=batch, timeout=TIMEOUT_S)
    pm.step(**batch)
    for number in range(2, num_steps + 1):
        if number == 3 and td.get_rank() == who:
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if case in ("skip", "device mesh"):
                stay_away()
                return "away", 0.0
            if case == "pause":
                with pm.pause_timeout():
                    time.sleep(3 * TIMEOUT_S)
            if case == "inside":
                with mock.patch.object(Executable, "step", lambda *_: (torch.zeros(()), stay_away())):
                    pm.step(**batch)
                return "away", 0.0
            if case == "save":
                return told(lambda: pm.full_state_dict())
        error = told(functools.partial(run, pm, batch, case, number == 3 and td.get_rank() == who))
        if error:
            return error
    return "done", 0.0


def run(pm, batch, case, is_away):
    if case != "backward":
        pm.step(**batch)
        return
    loss = pm(**batch)
    if is_away:
        stay_away()
    else:
        loss.backward()


def store():
    return td.distributed_c10d._get_default_store()


def stay_away():
    """Until another rank has said what it waits for."""
    while not store().check(["told"]):
        time.sleep(0.05)


def told(call):
    start = time.monotonic()
    try:
        call()
    except (HangError, InputError) as error:
        seconds = time.monotonic() - start
        store().set("told", "")
        return f"{type(error).__name__}: {error}", seconds
    return None


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_a_rank_that_does_not_come(mesh):
    (text, seconds), _ = dist.run_ranks(train, 2, mesh, "skip", timeout_s=90)
    first, why, *others = text.splitlines()
    assert first.startswith("HangError: rank 1 makes no call: rank 0 waited 1.5 s in step 3, at the comparison of the")
    assert why.startswith("  why    rank 0: step 3, at the comparison of the calls, for 1.5 s")
    assert "rank 1: after step 2, at test_hangs.py:" in others[0]
    assert seconds < 3 * TIMEOUT_S


@pytest.mark.large
def test_the_groups_of_a_users_device_mesh():
    (text, _), _ = dist.run_ranks(train, 2, None, "device mesh", timeout_s=90)
    assert "rank 1 makes no call: rank 0 waited 1.5 s in step 3" in text


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "place"), [("tp2", "at all_reduce"), ("pp2", "pipeline"), ("dp2", "gradients")])
def test_a_rank_that_hangs_inside_a_step(mesh, place):
    (text, seconds), _ = dist.run_ranks(train, 2, mesh, "inside", timeout_s=90)
    first, _, other, *_ = text.splitlines()
    assert first.startswith("HangError: the ranks wait in different calls: rank 0 waited")
    assert "in step 3, at " in first and place in first
    assert other.strip().startswith("rank 1: step 3, at test_hangs.py:")
    assert seconds < 4 * TIMEOUT_S
    if mesh == "tp2":
        assert "(test_hangs.py:" in first, "the line of the model"


@pytest.mark.large
def test_a_rank_that_does_not_come_to_the_backward():
    (text, _), _ = dist.run_ranks(train, 2, "tp2", "backward", timeout_s=90)
    assert "rank 1 makes no call: rank 0 waited" in text and "at the backward of " in text


def load():
    autopart.parallelize  # noqa: B018  # imported when it is first asked for, which takes seconds


@pytest.fixture(autouse=True)
def imported():
    dist.run_ranks(load, 3, timeout_s=120)


@pytest.mark.large
def test_a_rank_that_is_killed():
    with pytest.raises(dist.RankError) as error:
        dist.run_ranks(kill, 3, timeout_s=90)
    assert error.value.rank == 1
    for rank in (0, 2):
        text = error.value.errors[rank]
        assert "HangError: rank 1 is gone: rank" in text and "rank 1: does not answer: killed, or frozen" in text
        assert f"rank {rank} waited" in text and "in step 3" in text


def kill():
    text, _ = train("dp3", "kill")
    raise AssertionError(text)


@pytest.mark.large
@pytest.mark.parametrize("connects", ["before", "after"])
def test_the_rank_that_hosts_the_store_is_killed(connects):
    """`connects`: whether rank 1 has a connection to the store before it loses rank 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", f"import test_hangs; test_hangs.lose_the_store({connects!r})"]
    ranks = [subprocess.Popen(command, env=environment | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True) for rank in "01"]  # fmt: skip
    try:
        printed, _ = ranks[1].communicate(timeout=90)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "HangError: the process that hosts torch.distributed's store is gone: rank 1 waited" in printed
    assert "try    read the last lines of the output of rank 0, and of torchrun" in printed


def lose_the_store(connects):
    td.init_process_group("gloo")
    ask, made = Watch._ask, Watch.made

    def ask_later(watch):
        time.sleep(2)  # rank 0 has ended
        return ask(watch)

    def connect(watch):
        if connects == "before":
            watch._store()
        made(watch)

    later = mock.patch.object(Watch, "_ask", ask_later)
    with later, mock.patch.object(Watch, "made", connect), mock.patch(f"{__name__}.store"):
        text, _ = train("dp2", "kill", who=0)
    print(text, flush=True)
    os._exit(0)


def test_paused_ranks_are_waited_for():
    assert [text for text, _ in dist.run_ranks(train, 2, "tp2", "pause", timeout_s=90)] == ["done"] * 2


def test_saving_on_one_rank_alone_is_told():
    reports = dist.run_ranks(train, 2, "tp2", "save", timeout_s=90)
    for text, _ in reports:
        assert "InputError: the ranks are called with different inputs" in text
        assert "rank 0: step(" in text and "rank 1: full_state_dict()" in text


def different_times():
    """A first call may take ten times as long, and so may what comes before it."""
    if td.get_rank() == 1:
        time.sleep(1.5)
    batch = {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))}
    torch.manual_seed(0)
    pm = autopart.parallelize(Model(), "tp2", timeout=0.5)
    if td.get_rank() == 1:
        time.sleep(1.5)
    pm.step(**batch)
    return "done"


@pytest.mark.large
def test_first_calls_have_more_time():
    assert dist.run_ranks(different_times, 2) == ["done"] * 2


@pytest.mark.parametrize("wrong", [0, -1, "long", float("nan"), True])
def test_other_values_are_refused(wrong):
    with pytest.raises(OptionError, match=r"timeout=.* is not a number of seconds"):
        autopart.parallelize(Model(), "tp2", timeout=wrong)

"""The pool of worker processes: results, errors, hangs and output."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as td
from dist import GRACE_S, RankError, run_ranks, shutdown
from process_calls import process_id, sleep_on


def add_ranks(scale):
    value = torch.full((3,), scale * (td.get_rank() + 1.0))
    td.all_reduce(value)
    return td.get_rank(), value


def mesh_sums():
    """All-reduce over each axis of a 2 x 2 mesh."""
    mesh = td.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sums = []
    for axis in ("dp", "tp"):
        value = torch.tensor([10.0 ** td.get_rank()])
        td.all_reduce(value, group=mesh.get_group(axis))
        sums.append(value.item())
    return sums


def fail_on(rank):
    if td.get_rank() == rank:
        raise ValueError(f"planted on rank {rank}")
    td.all_reduce(torch.ones(1))
    return "not reached"


def fail_alone(rank):
    if td.get_rank() == rank:
        raise ValueError("planted")
    return td.get_rank()


def fail_while_others_sleep():
    if td.get_rank() == 0:
        raise ValueError("planted")
    time.sleep(1000)


def wait_for_each_other():
    """Rank 0 waits for rank 1 and rank 1 for rank 0."""
    td.recv(torch.ones(1), src=1 - td.get_rank())


def die_on(rank):
    if td.get_rank() == rank:
        os._exit(7)
    td.all_reduce(torch.ones(1))


def leave_early(rank):
    """Broadcast and return while the others have not begun to receive."""
    value = torch.full((1_000_000,), float(td.get_rank()))
    if td.get_rank() != rank:
        time.sleep(0.2)
    td.broadcast(value, src=rank)
    return value.mean().item()


def fail_to_make_a_group(rank):
    """One rank stays out, so that the others wait in vain."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError("planted")
    td.init_process_group("gloo", timeout=timedelta(seconds=1))


def environment():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    return [os.environ[name] for name in names], td.is_initialized(), os.environ.get("PLANTED_FLAG")


def init_by_itself():
    td.init_process_group("gloo")
    return add_ranks(1.0)[1]


def state():
    """What the previous task may have changed."""
    seen = os.environ.get("LEAK"), torch.get_default_dtype(), torch.rand(1).item(), torch.get_num_threads()
    os.environ["LEAK"] = "yes"
    torch.set_default_dtype(torch.float64)
    return seen


def print_much():
    print(f"hello from {os.environ['RANK']}")
    print("x" * 2_000_000)
    os.system("echo from a child process")
    print("last words", file=sys.stderr)


def unpicklable():
    return lambda: None


def running(pid):
    """Whether a process exists and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce(world_size):
    total = world_size * (world_size + 1) / 2
    results = run_ranks(add_ranks, world_size, scale=2.0)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, value in results:
        assert torch.equal(value, torch.full((3,), 2.0 * total))


def test_device_mesh():
    for _ in range(2):
        assert run_ranks(mesh_sums, 4) == [[101.0, 11.0], [1010.0, 11.0], [101.0, 1100.0], [1010.0, 1100.0]]


def test_workers_stay():
    first = run_ranks(process_id, 4)
    assert run_ranks(process_id, 4) == first
    assert run_ranks(process_id, 2) == first[:2]
    assert os.getpid() not in first


def test_exception_on_one_rank():
    first = run_ranks(process_id, 4)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 4, 2)
    assert time.monotonic() - start < GRACE_S
    assert caught.value.rank == 2
    assert "ValueError: planted on rank 2" in caught.value.traceback
    assert "in fail_on" in str(caught.value)
    assert set(caught.value.errors) == {0, 1, 2, 3}
    assert run_ranks(process_id, 4) == first, "an exception must not cost the pool"


def test_other_ranks_results_survive_an_exception():
    with pytest.raises(RankError) as caught:
        run_ranks(fail_alone, 3, 1)
    assert caught.value.results == {0: 0, 2: 2}
    assert set(caught.value.errors) == {1}


@pytest.mark.large
def test_exception_does_not_wait_for_sleepers():
    run_ranks(add_ranks, 2, 1.0)  # the processes start before the clock does
    start = time.monotonic()
    with pytest.raises(RankError, match="planted") as caught:
        run_ranks(fail_while_others_sleep, 2)
    assert time.monotonic() - start < GRACE_S + 5
    assert "in fail_while_others_sleep" in caught.value.errors[1]
    assert "stopped: no answer within 5 s of rank 0's failure" in caught.value.errors[1]
    assert len(run_ranks(add_ranks, 2, 1.0)) == 2


@pytest.mark.large
def test_hang_is_killed_and_pool_recovers():
    first = run_ranks(process_id, 4)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer from rank 1, 3 of 4 within 1\.5 s in sleep_on") as caught:
        run_ranks(sleep_on, 4, (1, 3), timeout_s=1.5)
    assert time.monotonic() - start < 10
    assert "in sleep_on" in str(caught.value), "the message shows where the ranks hang"
    assert not any(map(running, first))
    assert not set(run_ranks(process_id, 4)) & set(first)


@pytest.mark.large
def test_stuck_collective_raises_in_its_rank():
    with pytest.raises(RankError, match="wait_for_each_other"):
        run_ranks(wait_for_each_other, 2, timeout_s=3)


@pytest.mark.large
def test_failure_at_once_in_many_calls():
    """A rank that fails before its peers have connected must not spoil the next group."""
    for _ in range(20):
        with pytest.raises(RankError, match="rank 3 failed"):
            run_ranks(fail_on, 4, 3)
    assert len(run_ranks(add_ranks, 4, 1.0)) == 4


@pytest.mark.large
def test_failure_to_make_a_group_costs_the_pool():
    first = run_ranks(process_id, 3)
    with pytest.raises(RankError, match="planted"):
        run_ranks(fail_to_make_a_group, 3, 1, init=False)
    assert len(run_ranks(add_ranks, 3, 1.0)) == 3
    assert not set(run_ranks(process_id, 3)) & set(first)


def test_death_of_a_rank():
    with pytest.raises(RankError) as caught:
        run_ranks(die_on, 2, 1)
    assert caught.value.rank == 1, "the cause comes first, not the connections it closed"
    assert "exit code 7" in caught.value.traceback
    assert len(run_ranks(add_ranks, 2, 1.0)) == 2


@pytest.mark.large
def test_a_rank_may_finish_first():
    for _ in range(5):
        assert run_ranks(leave_early, 4, 2) == [2.0] * 4


def test_environment(monkeypatch):
    monkeypatch.setenv("PLANTED_FLAG", "seen")
    for rank, (values, initialized, flag) in enumerate(run_ranks(environment, 2, init=False)):
        assert values[:4] == [str(rank), "2", str(rank), "127.0.0.1"]
        assert int(values[4]) > 0
        assert not initialized
        assert flag == "seen"
    assert all(initialized for _, initialized, _ in run_ranks(environment, 2))


def test_without_init_a_function_can_make_its_own_group():
    for _ in range(10):
        assert [value[0].item() for value in run_ranks(init_by_itself, 2, init=False)] == [3.0, 3.0]


def test_tasks_start_clean():
    first = run_ranks(state, 2)
    assert run_ranks(state, 2) == first
    assert first[0][0] is None
    assert first[0][1] == torch.float32
    assert first[0][3] == 1


def test_much_output(capsys):
    run_ranks(print_much, 2)
    out = capsys.readouterr().out
    assert out.count("x" * 2_000_000) == 2
    assert out.index("printed by rank 0") < out.index("hello from 0") < out.index("hello from 1")
    assert out.count("from a child process") == out.count("last words") == 2
    run_ranks(process_id, 2)
    assert capsys.readouterr().out == "", "output is shown once"


def test_result_that_does_not_pickle():
    with pytest.raises(RankError, match="pickle"):
        run_ranks(unpicklable, 2)


def test_function_that_does_not_pickle():
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_ranks(lambda: None, 2)


def test_shutdown_then_run():
    first = run_ranks(process_id, 2)
    shutdown()
    shutdown()
    assert not set(run_ranks(process_id, 2)) & set(first)


PARENT = """
import os, sys
from dist import run_ranks
from process_calls import process_id, sleep_on
if __name__ == "__main__":
    print(*run_ranks(process_id, 2), flush=True)
    if sys.argv[1] == "killed":
        run_ranks(sleep_on, 2, (0, 1), timeout_s=1000)
"""


@pytest.mark.parametrize("how", ["exits", "killed"])
@pytest.mark.large
def test_workers_exit_with_the_parent(tmp_path, how):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, str(script), how], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if how == "killed":
            time.sleep(0.5)
            parent.kill()
    deadline = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, pids))

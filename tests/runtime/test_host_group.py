"""Ranks compare their calls in rounds of small groups, and one rank of a large mesh runs on torch's fake backend."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import dist
import pytest
import torch
from torch import nn

import autopart
from autopart.errors import HangError, InputError
from autopart.runtime.comm import host_group
from autopart.runtime.comm.host_group import groups_of_rounds, round_sizes


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 17, 96, 1000, 10_000, 16_384])
def test_rounds_reach_all_ranks(num_ranks):
    sizes = round_sizes(num_ranks)
    assert all(size <= host_group.MAX_RANKS for size in sizes) or num_ranks == 17
    rounds = groups_of_rounds(range(num_ranks), sizes or [1])
    reached = {0}
    for groups in rounds:
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(num_ranks))
        reached = {rank for ranks in groups if not reached.isdisjoint(ranks) for rank in ranks}
    assert len(reached) == num_ranks


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double()


def collectives(mesh):
    """Run all collectives of a host group in two rounds of two ranks."""
    host_group.MAX_RANKS = 2
    rank = torch.distributed.get_rank()
    pm = autopart.parallelize(mlp(), mesh, example_args=(torch.ones(8, 8).double(),))
    group = pm._process.host_group
    assert [one.size() for one in group.groups] == [2, 2]
    assert group.gather_objects(rank // 2) == [0, 0, 1, 1]
    total = torch.tensor([rank])
    group.all_reduce(total, torch.distributed.ReduceOp.SUM)
    assert total.item() == 6
    assert [group.broadcast(torch.tensor([rank]), first).item() for first in range(4)] == [0, 1, 2, 3]
    return group.begin_extremes([1.0, rank, rank % 2, rank], 2)()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mesh", "odd", "own"), [("tp4", 1.0, 3.0), ("dp2,tp2", 1.0, 1.0), ("pp2,dp2", 0.0, 2.0), ("dp4", 0.0, 0.0)]
)
def test_collectives_in_rounds(mesh, odd, own):
    """Ranks that compute the same samples: all of tp4; 0 and 1 of dp2,tp2; 0 and 2 of pp2,dp2; none of dp4."""
    for largest, differences in dist.run_ranks(collectives, 4, mesh):
        assert largest[:2] == [1.0, 3.0]
        assert differences == [0.0, 3.0, odd, own]


def compared(local_batch):
    """Return the errors of calls whose shape, whose values, and then nothing differs on rank 3."""
    host_group.MAX_RANKS = 2
    rank = torch.distributed.get_rank()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    if local_batch:
        x = x.chunk(2)[rank // 2]
    pm = autopart.parallelize(mlp(), "dp2,tp2", example_args=(x,), local_batch=local_batch)
    errors = []
    for given in (x[:2], x + 1):
        with pytest.raises(InputError) as error:
            pm(given if rank == 3 else x)
        errors.append(str(error.value))
    pm(x).sum().backward()
    return errors


@pytest.mark.whole
@pytest.mark.parametrize("local_batch", [False, True])
def test_calls_are_compared_in_rounds(local_batch):
    ranks = dist.run_ranks(compared, 4, local_batch)
    assert all(errors == ranks[0] for errors in ranks)
    shapes, values = ranks[0]
    assert ("different numbers of samples" if local_batch else "rank 3: forward(input f64[2,8])") in shapes
    assert f"rank 3 unlike rank {2 if local_batch else 0}" in values


def missing():
    host_group.MAX_RANKS = 2
    x = torch.ones(8, 8).double()
    pm = autopart.parallelize(mlp(), "dp2,tp2", example_args=(x,), timeout=3)
    pm(x)
    if torch.distributed.get_rank() == 3:
        time.sleep(12)
        return ""
    with pytest.raises(HangError) as error:
        pm(x)
    return str(error.value)


def test_a_missing_rank_is_named_in_every_round():
    for text in dist.run_ranks(missing, 4, timeout_s=120)[:3]:
        assert text.startswith("rank 3 makes no call"), text


FAKE = """
import sys, torch, autopart
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", rank=5, world_size=int(sys.argv[2]), store=FakeStore())
layers = (torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(4))
x = torch.ones(int(sys.argv[2]), 8)
pm = autopart.parallelize(torch.nn.Sequential(*layers), sys.argv[1], example_args=(x,))
optimizer = torch.optim.AdamW(pm.parameters())
for _ in range(2):
    pm.step(x, loss_fn=torch.nn.functional.mse_loss, target=x)
    optimizer.step()
print("group sizes", [group.size() for group in pm._process.host_group.groups])
"""


@pytest.mark.parametrize(("mesh", "num_ranks", "sizes"), [("dp64,tp8", 512, [8, 16, 4]), ("dp2,pp2,tp2", 8, [4, 2])])
def test_one_rank_runs_on_the_fake_backend(mesh, num_ranks, sizes):
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(FAKE), mesh, str(num_ranks)], capture_output=True,
                         text=True, timeout=240, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert f"group sizes {sizes}" in ran.stdout

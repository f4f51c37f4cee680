"""rng="fast": independent random numbers for shards, the same ones for what several ranks hold, by statistics."""

import math
from collections import defaultdict

import dist
import pytest
import torch
from random_models import MODELS, around
from torch import nn

import autopart
from autopart.ir.facts import facts
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.recipe.compiler import Compiler
from autopart.runtime.lockstep import run_lockstep
from autopart.runtime.shards.shard_state import shard_parameters

P, ROWS, WIDE = 0.3, 16, 512


class Ones(nn.Module):
    """Ones all the way, so that what comes out of a dropout is its mask: of a value that tensor parallelism cuts, and
    of one that it leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 8)
        self.inner, self.outer = nn.Dropout(P), nn.Dropout(P)
        for layer in (self.up, self.down):
            nn.init.zeros_(layer.weight)
            nn.init.ones_(layer.bias)

    def forward(self, x):
        whole = self.inner(self.down(self.outer(torch.relu(self.up(x)))))
        noise = torch.rand(x.shape[0], 8)
        return (self.out(whole.cos()) * noise + noise).mean()


def masks(mesh, microbatches=1, steps=1):
    """{(module or operator, step): {(rank, microbatch): value}} of the draws of `Ones`, all ranks in one process."""
    torch.manual_seed(0)
    model, x = Ones(), torch.ones(ROWS, WIDE)
    sizes = Mesh.parse(mesh)
    compiler = Compiler(model, sizes, Options(microbatches=microbatches))
    compiler.trace_example((x,), {})
    compiler.reseed(1)
    found = defaultdict(dict)
    for step in range(steps):
        program, inputs = compiler.program((x,), {}, purpose="step", training=True)
        local = {r: shard_parameters(model, program, sizes.coordinates(r)) for r in range(sizes.num_ranks)}

        def keep(stage, microbatch, node, value, step=step):
            names = {"inner/dropout": "inner", "outer/dropout": "outer"}
            name = names.get(facts(node).get("key"), "noise" if node.name.startswith("rand") else None)
            for rank, tensor in value.items():
                if name is not None and isinstance(tensor, torch.Tensor):
                    found[name, step][rank, microbatch] = tensor.detach()

        run_lockstep(program, local, {}, inputs, keep)
    return found


def kept(mask):
    assert set(mask.unique().tolist()) <= {0.0, *(torch.tensor([1 / (1 - P)]).tolist())}, mask.unique()
    return (mask > 0).double()


def assert_rate(mask):
    """As many are kept as should be, within four standard deviations."""
    assert abs(kept(mask).mean() - (1 - P)) < 4 * math.sqrt(P * (1 - P) / mask.numel())


def assert_independent(a, b):
    """A correlation of about zero: within four standard deviations."""
    both = torch.stack([a.double().flatten(), b.double().flatten()])
    assert abs(torch.corrcoef(both)[0, 1]) < 4 / math.sqrt(a.numel())


def test_shards_draw_apart_and_copies_alike():
    found = masks("dp2,tp2", microbatches=2, steps=2)
    inner, outer = found["inner", 0], found["outer", 0]  # ranks: dp outermost
    assert {tuple(m.shape) for m in inner.values()} == {(ROWS // 4, WIDE // 2)}
    assert {tuple(m.shape) for m in outer.values()} == {(ROWS // 4, WIDE)}
    for mask in (*inner.values(), *outer.values()):
        assert_rate(mask)
    for microbatch in (0, 1):
        assert_independent(inner[0, microbatch], inner[1, microbatch])  # shards over tp
        assert_independent(inner[0, microbatch], inner[2, microbatch])  # other rows of the batch
        assert_independent(outer[0, microbatch], outer[2, microbatch])
        for first, copy in ((0, 1), (2, 3)):
            assert torch.equal(outer[first, microbatch], outer[copy, microbatch])
    assert_independent(inner[0, 0], inner[0, 1])  # microbatches
    assert_independent(inner[0, 0], found["inner", 1][0, 0])  # steps
    assert_independent(outer[0, 0], found["outer", 1][0, 0])
    assert_independent(inner[0, 0], outer[0, 0][:, : WIDE // 2])  # operators


def test_other_draws_are_made_once_for_all_ranks():
    found = masks("dp2,pp2,tp2", microbatches=2, steps=2)
    rows = found["noise", 0]
    assert rows
    shapes = {tuple(value.shape) for value in rows.values()}
    assert shapes == {(ROWS // 4, 8)}
    by_rows = defaultdict(list)
    for (rank, microbatch), value in rows.items():
        by_rows[Mesh.parse("dp2,pp2,tp2").coordinates(rank)["dp"], microbatch].append(value)
    assert len(by_rows) == 4
    for copies in by_rows.values():
        assert all(torch.equal(copies[0], copy) for copy in copies)
    firsts = [copies[0] for copies in by_rows.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i]), "rows are repeated"
    assert not torch.equal(next(iter(rows.values())), next(iter(found["noise", 1].values()))), "steps are repeated"


@pytest.mark.parametrize("name", ["rand_like and randn_like", "stochastic depth", "no input"])
def test_every_step_and_seed_draws_anew(name):
    model, batch = around(name)
    model.double()
    compiler = Compiler(model, Mesh.parse("dp2,tp2"), Options())
    compiler.trace_example((), batch)
    losses = set()
    for seed in (0, 1):
        compiler.reseed(seed)
        for _ in range(2):
            program, inputs = compiler.program((), batch, purpose="step", training=True)
            local = {r: shard_parameters(model, program, Mesh.parse("dp2,tp2").coordinates(r)) for r in range(4)}
            before = torch.get_rng_state()
            found = run_lockstep(program, local, {}, inputs)
            assert torch.equal(before, torch.get_rng_state()), "a step moved the default generator on"
            losses.add(sum(float(out.detach()) for rank in (0, 2) for (out,) in found[rank]))
    assert len(losses) == 4


def trained_copies(name, mesh):
    """Three steps with dropout: the losses, and the parameters that this rank holds whole."""
    model, batch = MODELS[name]()
    torch.manual_seed(torch.distributed.get_rank())  # the first rank's seed counts
    pm = autopart.parallelize(model, mesh, example_kwargs=batch)
    before = torch.get_rng_state()
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(pm.step(**batch)))
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state()), "a step moved the default generator on"
    copies = {name: p.detach().clone() for name, p in pm.named_parameters() if type(p) is nn.Parameter}
    return losses, copies


@pytest.mark.few
@pytest.mark.parametrize("name", ["gpt2", "conv_net"])
def test_copies_of_a_weight_stay_equal_over_ranks(name):
    results = dist.run_ranks(trained_copies, 4, name, "dp2,tp2", timeout_s=120.0)
    losses, copies = results[0]
    assert len(set(losses)) == 3
    assert copies
    for other_losses, other in results[1:]:
        assert other_losses == losses
        assert other.keys() == copies.keys()
        assert all(torch.equal(other[name], copies[name]) for name in copies)

"""Gradients of outputs with `local_batch=True`: rows, what is the same on every rank, and sums over all rows."""

import copy

import dist
import pytest
import torch
import torch.distributed as td
import torch.distributed.nn as td_nn
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.ir.mesh import Mesh
from autopart.runtime.batch.local_batch import LocalBatch

TIMEOUT_S = 150.0


class Outputs(nn.Module):
    """Rows; a number and a table made of parameters; a loss, an auxiliary loss and a count of all rows."""

    def __init__(self, balances=True):
        super().__init__()
        self.balances = balances  # a statistic of the batch, which no microbatch has
        self.up, self.down, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.scale, self.table = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(5, 8))

    def forward(self, x, temperature):
        features = self.down(F.gelu(self.up(x)))
        shares = self.gate(x).softmax(-1)
        loss = features.square().mean()
        auxiliary = shares.mean(0).square().sum() * 4 if self.balances else shares.square().mean()
        table = self.down(F.gelu(self.up(self.table)))
        return {
            "rows": F.normalize(features, dim=-1), "scale": self.scale.exp(), "table": table,
            "warm": self.scale * temperature, "loss": loss, "auxiliary": auxiliary, "count": (shares > 0.25).sum(),
        }  # fmt: skip


def contrast(out, gather):
    """All pairs of rows, as open_clip's loss."""
    rows = gather(out["rows"])
    logits = out["scale"] * rows @ rows.roll(1, 0).T
    return F.cross_entropy(logits, torch.arange(len(rows)))


def classes(out, gather):
    """Rows beside a table that the model returns."""
    return F.cross_entropy(out["rows"] @ out["table"].T * out["warm"], torch.arange(len(out["rows"])) % 2)


def beside_auxiliary(out, gather):
    """Rows beside sums."""
    return (out["rows"] * out["scale"]).sin().mean() + 0.3 * out["auxiliary"] + 0.1 * out["loss"] * out["scale"]


def counted(out, gather):
    """A sum over this rank's rows, by a count of all: it is a term, and is not divided."""
    return (out["rows"] * out["scale"]).sin().sum() / out["count"] * out["divided"]


def of_tables(out, gather):
    """No rows: what the model returns of its parameters."""
    return out["table"].square().mean() * out["scale"]


TERMS = {loss.__name__: loss for loss in (contrast, classes, beside_auxiliary, counted, of_tables)}
SUMS = {
    "loss": lambda out, gather: out["loss"],
    "auxiliary": lambda out, gather: out["loss"] + 0.3 * out["auxiliary"].sqrt(),
}


def errors(mesh, names, planted=False, **options):
    """The largest error of any gradient, of each loss."""
    if planted:
        LocalBatch.as_loss_terms = lambda self, outputs: list(outputs)
    torch.manual_seed(0)
    model, x = Outputs("microbatches" not in options).double(), torch.randn(8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    ranks = Mesh.parse(mesh).data_parallel_size
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    index = Mesh.parse(mesh).row_index(Mesh.parse(mesh).coordinates(int(td.get_rank())))
    own = {"x": x.chunk(ranks)[index], "temperature": temperature}
    pm = autopart.parallelize(model, mesh, example_kwargs=own, local_batch=True, **options)
    rows_group = pm._process.groups.get("dp")

    def gathered(rows):
        return torch.cat(td_nn.all_gather(rows.contiguous(), rows_group)) if ranks > 1 else rows

    result = {}
    for name in names:
        pm.zero_grad()
        plain.zero_grad()
        whole = {"x": x, "temperature": temperature.detach().clone().requires_grad_()}
        temperature.grad = None
        loss_of = {**TERMS, **SUMS}[name]
        is_term, divided = name in TERMS, 1 if name == "counted" else ranks
        expected = loss_of({**plain(**whole), "divided": 1}, lambda rows: rows)
        expected.backward()
        loss = loss_of({**pm(**own), "divided": 1}, gathered)
        loss = loss / divided if is_term else loss
        (slope,) = torch.autograd.grad(loss, pm.get_parameter("gate.bias"), retain_graph=True, allow_unused=True)
        loss.backward()
        grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert pm.full_grads().keys() == grads.keys()
        pairs = [(full, grads[n]) for n, full in pm.full_grads().items()]
        assert (slope is None) == ("gate.bias" not in grads)
        if slope is not None and mesh == "dp2":  # the backward of a part of the loss's graph
            pairs.append((slope, grads["gate.bias"]))
        if whole["temperature"].grad is not None:
            pairs.append((temperature.grad, whole["temperature"].grad))
        result[name] = max((got - want).abs().max().item() for got, want in pairs)
    return result


def run(mesh, *args, **options):
    return dist.run_ranks(errors, Mesh.parse(mesh).num_ranks, mesh, *args, timeout_s=TIMEOUT_S, **options)


MESHES = {"dp2": {}, "dp2 zero3": {"zero": 3}, "dp2,tp2": {}, "tp2": {}, "dp2 microbatches": {"microbatches": 2}}


@pytest.mark.few
@pytest.mark.parametrize("case", MESHES)
def test_gradients_of_every_kind_of_output(case):
    names = [name for name in (*TERMS, *SUMS) if case != "dp2,tp2" or name != "contrast"]  # torch's gather of a group
    for result in run(case.split()[0], names, **MESHES[case]):
        assert max(result.values()) < 1e-10, result


def test_a_gradient_of_one_rank_alone_would_be_found():
    for result in run("dp2", [*TERMS, "loss"], planted=True):
        assert all(result[name] > 1e-4 for name in TERMS) and result["loss"] < 1e-10, result

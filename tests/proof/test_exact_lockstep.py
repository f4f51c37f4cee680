"""Every model on every kind of mesh, larger ones than there are processes for, and sizes that do not divide: all ranks
in one process, as by `verify`."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from traced import run_of, verified

import autopart

MESHES = ("tp2", "tp8", "pp4", "pp8", "dp4", "pp2,tp2", "dp2,pp2,tp2", "dp2,pp4,tp4")

AWKWARD = {  # sizes that tp does not divide: (model, its sizes, mesh)
    "6 heads on tp4": (zoo.gpt2, {"hidden": 24, "heads": 6}, "tp4"),
    "3 heads on tp2": (zoo.gpt2, {"hidden": 24, "heads": 3}, "tp2"),
    "6 heads of llama on tp4": (zoo.llama, {"hidden": 48, "heads": 6, "kv_heads": 3}, "tp4"),
    "5 heads of bert on tp4": (zoo.bert, {"hidden": 40, "heads": 5}, "tp4"),
    "3 heads of t5 on tp4": (zoo.t5, {"hidden": 24, "heads": 3}, "tp4"),
    "6 heads of torch on tp4": (zoo.transformer_encoder, {"hidden": 24, "heads": 6}, "tp4"),
    "2 kv heads on tp4": (zoo.llama, {"heads": 4, "kv_heads": 2}, "tp4"),
    "2 kv heads on dp2,pp2,tp4": (zoo.llama, {"heads": 8, "kv_heads": 2}, "dp2,pp2,tp4"),
    "2 fused kv heads on tp4": (zoo.phi3, {"heads": 4, "kv_heads": 2}, "tp4"),
    "1 kv head on tp2": (zoo.llama, {"heads": 4, "kv_heads": 1}, "tp2"),
    "hidden 30 on tp4": (zoo.skip_mlp, {"hidden": 30}, "tp4"),
    "classes 10 on tp4": (zoo.conv_net, {"classes": 10}, "tp4"),
    "vocabulary 97 on tp2": (zoo.llama, {"vocab": 97}, "tp2"),
    "vocabulary 97 on tp4": (zoo.gpt2, {"vocab": 97}, "tp4"),
    "vocabulary 97 of bert on tp4": (zoo.bert, {"vocab": 97}, "tp4"),
    "vocabulary 97 of t5 on tp4": (zoo.t5, {"vocab": 97}, "tp4"),
    "vocabulary 97 on pp2,tp4": (zoo.transformer_encoder, {"vocab": 97}, "pp2,tp4"),
    "vocabulary 50257 on tp4": (zoo.gpt2, {"vocab": 50257, "hidden": 8, "heads": 4, "num_layers": 1}, "tp4"),
    "vocabulary 50257 of llama on tp4": (
        zoo.llama,
        {"vocab": 50257, "hidden": 8, "heads": 4, "kv_heads": 4, "num_layers": 1},
        "tp4",
    ),
    "an odd sequence on tp4": (zoo.llama, {"seq": 13}, "tp4"),
    "batch 6 on dp3,tp2": (zoo.gpt2, {"rows": 6}, "dp3,tp2"),
}


def assert_exact(builder, mesh, sizes=None, **options):
    """Right, and not because little was compared: every gradient and every output is there."""
    found = verified(run_of(builder, **(sizes or {})), mesh, **options)
    assert found.ok, str(found)
    assert found.max_error < 1e-12 and found.first_mismatch is None
    compared = set(found.errors)
    _, _, grads = zoo.reference(*builder(**(sizes or {})))
    assert {name for name, grad in grads.items() if grad is not None} | {"loss", "output 0"} <= compared


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_zoo_model_on_mesh(name, mesh):
    assert_exact(zoo.ZOO[name], mesh)


@pytest.mark.large
@pytest.mark.parametrize("case", AWKWARD)
def test_sizes_that_do_not_divide(case):
    builder, sizes, mesh = AWKWARD[case]
    assert_exact(builder, mesh, sizes)


class WeightTerm(nn.Module):
    """A loss with a term of weights alone: every rank and microbatch has it whole, and it counts once."""

    def __init__(self, term):
        super().__init__()
        self.up, self.down, self.term = nn.Linear(8, 16), nn.Linear(16, 8), term

    def forward(self, x, y):
        loss = F.mse_loss(self.down(torch.tanh(self.up(x))), y)
        penalty = self.up.weight.pow(2).sum() + self.down.bias.abs().sum()
        if self.term == "added":
            return loss + 0.1 * penalty
        if self.term == "added, and a constant of the inputs":
            return loss + 0.1 * penalty + y.pow(2).mean()
        return loss * penalty if self.term == "multiplied" else penalty


WEIGHT_TERMS = ("added", "added, and a constant of the inputs", "multiplied", "alone")
CUTS = {"tp2": None, "tp1": 4, "dp2": None, "dp2,tp2": 2, "pp2": 4, "dp2,pp2": 2}


@pytest.mark.parametrize("mesh", CUTS)
@pytest.mark.parametrize("term", WEIGHT_TERMS)
def test_a_term_of_weights_alone_counts_once(term, mesh):
    if term == "alone" and "tp2" in mesh:
        return  # nothing to split
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    found = autopart.verify(WeightTerm(term).double(), mesh, example_kwargs={"x": x, "y": y}, microbatches=CUTS[mesh])
    assert found.ok, str(found)


@pytest.mark.few
@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("name", ["gpt2", "bert", "conv_net"])
def test_microbatches_without_stages(name, microbatches):
    assert_exact(zoo.ZOO[name], "tp2", microbatches=microbatches)


@pytest.mark.large
def test_deep_model_on_many_stages():
    assert_exact(zoo.gpt2, "dp2,pp8,tp2", {"num_layers": 8, "hidden": 16, "heads": 2}, microbatches=4)


class JoinsWithNothing(nn.Module):
    """What an empty cache of keys becomes: `cat` takes a tensor of shape [0] beside any others."""

    def __init__(self):
        super().__init__()
        self.inner, self.empty = nn.Linear(8, 8), nn.Buffer(torch.zeros(0))

    def forward(self, x):
        keys = torch.cat([self.empty, self.inner(x)], dim=-2)
        return torch.cat([self.empty, keys, x], dim=1).square().sum()


def test_empty_operands_of_cat_count_for_nothing():
    model = JoinsWithNothing()
    found = autopart.verify(model, "dp2,tp2", example_kwargs={"x": torch.randn(4, 3, 8)})
    assert found.ok, str(found)


class ReadsValuesTwice(nn.Module):
    """Operators that read one value of the batch as two operands: one sharded, one whole."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 6)

    def forward(self, x, numbers):
        h = self.inner(x)
        rows, ordered, ordered_values = h.mean(1), numbers.sort().values, h.detach()[:, 0, 0].sort().values
        scores = rows @ rows.mT + torch.cdist(rows, rows) + rows[numbers[numbers]] @ rows.mT
        scores = scores + rows[torch.searchsorted(ordered, ordered)] + rows[torch.bucketize(ordered, ordered)]
        scores = scores * torch.isin(numbers, numbers)[:, None]
        scores = scores + rows[torch.searchsorted(ordered_values, ordered_values)]
        attended = F.scaled_dot_product_attention(h, h, h)
        return scores.logsumexp(1).sum() + attended.square().sum()


@pytest.mark.parametrize("mesh", ["dp2", "dp3", "dp2,tp2", "tp4", "dp2,cp2"])
def test_a_value_may_be_several_operands(mesh):
    batch = {"x": torch.randn(6, 4, 8), "numbers": torch.tensor([2, 0, 5, 1, 1, 3])}
    found = autopart.verify(ReadsValuesTwice(), mesh, example_kwargs=batch)
    assert found.ok, str(found)


class ReadsAnIntegerTable(nn.Module):
    """An embedding whose table is quantised: a rank has zeros for the rows of other ranks, to be summed."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randint(-100, 100, (64, 32), dtype=torch.int8), requires_grad=False)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, ids):
        return self.down(torch.tanh(self.up(F.embedding(ids, self.table) / 100))).square().sum()


@pytest.mark.parametrize("pins", [None, {"table": {"tp": "S(0)"}}])
def test_a_table_of_integers_may_be_cut(pins):
    ids = torch.arange(24).reshape(4, 6) * 2
    found = autopart.verify(ReadsAnIntegerTable(), "tp2", example_kwargs={"ids": ids}, pins=pins)
    assert found.ok, str(found)

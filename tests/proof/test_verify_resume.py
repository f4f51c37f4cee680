"""`autopart.verify_resume`: values that one mesh saves and another one loads, and the next loss."""

from __future__ import annotations

import pytest
import torch
import zoo
from expert_models import mixture

import autopart
from autopart.errors import OptionError
from autopart.runtime.saves import chunk_storage

PAIRS = [
    ("tp2", "dp2", {}, {"zero": 3}),
    ("dp3", "tp2,pp2", {"zero": 3}, {"zero": None}),
    ("tp4", "dp2,pp2", {}, {"zero": 1, "recompute": "full"}),
    ("cp2,tp2", "dp4", {"zero": 3}, {"zero": 0}),
    ("pp2,dp2", "pp2,dp2", {"zero": 1}, {}),
]


@pytest.mark.few
@pytest.mark.parametrize(("first", "second", "options", "options_b"), PAIRS, ids=str)
def test_values_are_equal_bit_for_bit(first, second, options, options_b):
    model, batch = zoo.gpt2(rows=12)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[:2] = torch.tensor([-0.0, 1e-310])
    result = autopart.verify_resume(
        model, first, second, example_kwargs=batch, steps=2, options_b=options_b, max_norm=1.0, **options
    )
    assert result.ok, str(result)
    assert result.num_values > 80 and not result.different
    assert (result.loss_error == 0.0) or first != second
    assert "values equal bit for bit" in str(result) and str(result).startswith("exact resume from ")


def _muon(named):
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    ids = set(map(id, matrices))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW([p for _, p in named if id(p) not in ids])]


@pytest.mark.large
@pytest.mark.parametrize(("make", "meshes", "optimizer"), [
    (mixture, ("ep2,dp2", "tp2"), None),
    (zoo.llama, ("dp2,tp2", "pp2"), _muon),
], ids=["experts", "Muon"])  # fmt: skip
def test_experts_and_optimizers_of_full_tensors(make, meshes, optimizer):
    model, batch = make()
    result = autopart.verify_resume(model, *meshes, example_kwargs=batch, steps=2, optimizer=optimizer)
    assert result.ok, str(result)


def test_a_planted_fault_is_found(monkeypatch):
    model, batch = zoo.skip_mlp()
    read = chunk_storage.IndexedReader._read

    def wrong(self, name, chunk):
        tensor = read(self, name, chunk)
        if name.endswith("exp_avg"):
            tensor.view(torch.int64)[-1] ^= 1  # the last bit
        return tensor

    monkeypatch.setattr(chunk_storage.IndexedReader, "_read", wrong)
    result = autopart.verify_resume(model, "tp2", "dp2", example_kwargs=batch, steps=1)
    assert not result and all(name.endswith("exp_avg") for name in result.different)
    assert str(result).startswith("WRONG resume from tp2 to dp2 after 1 step")


def test_delayed_gradients_are_refused():
    model, batch = zoo.skip_mlp()
    with pytest.raises(OptionError, match="1f1b_2bw"):
        autopart.verify_resume(model, "pp2", "dp2", example_kwargs=batch, schedule="1f1b_2bw")

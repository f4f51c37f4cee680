"""CTC, the loss of speech recognition: torch's own has sizes that depend on values, autopart's operator has none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.ir.graph import operator_name
from autopart.tracing.autograd.decompositions import TRACE_DECOMPOSITIONS

TIME, ROWS, CLASSES = 6, 4, 8
TARGETS = torch.tensor([[1, 2, 3], [4, 4, 0], [5, 0, 0], [1, 1, 1]])
INPUT_LENGTHS, TARGET_LENGTHS = torch.tensor([6, 5, 4, 6]), torch.tensor([3, 2, 1, 3])


class Recogniser(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.encoder, self.head, self.loss = nn.Linear(12, 16), nn.Linear(16, CLASSES), nn.CTCLoss(**options)

    def forward(self, sound: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        log_probs = self.head(self.encoder(sound).relu()).log_softmax(-1)
        return self.loss(log_probs.transpose(0, 1), targets, input_lengths, target_lengths)


def batch() -> dict[str, Tensor]:
    sound = torch.randn(ROWS, TIME, 12, generator=torch.Generator().manual_seed(0))
    return {
        "sound": sound, "targets": TARGETS, "input_lengths": INPUT_LENGTHS, "target_lengths": TARGET_LENGTHS,
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "blank": 7}, {"zero_infinity": True}], ids=str)
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2", "dp2,tp2"])
def test_exact(mesh, options):
    result = autopart.verify(Recogniser(**options), mesh, example_kwargs=batch())
    assert result.ok and not any("compared" in note for note in result.notes), result


def test_its_rows_are_cut_and_its_targets_may_stand_one_behind_the_other():
    plan = autopart.plan(Recogniser(), "dp2", example_kwargs=batch())
    assert not [row for row in json.loads(plan.to_json())["unsharded"] if row["operator"] == "ctc_loss"]
    joined = torch.cat([row[:length] for row, length in zip(TARGETS, TARGET_LENGTHS, strict=True)])
    result = autopart.verify(Recogniser(), "dp2", example_kwargs=batch() | {"targets": joined})
    assert result.ok, result


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("form", ["rows", "joined", "one row", "lengths as lists"])
def test_the_operator_is_torchs(form, reduction, zero_infinity):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(TIME, ROWS, CLASSES, dtype=torch.float64, generator=generator).log_softmax(-1)
    call: tuple[Any, ...] = (log_probs, TARGETS, INPUT_LENGTHS, TARGET_LENGTHS)
    if zero_infinity:
        call = (*call[:2], torch.tensor([6, 5, 4, 2]), TARGET_LENGTHS)
    if form == "joined":
        joined = torch.cat([row[:length] for row, length in zip(TARGETS, TARGET_LENGTHS, strict=True)])
        call = (call[0], joined, *call[2:])
    elif form == "one row":
        call = (log_probs[:, 0], TARGETS[0], torch.tensor(6), torch.tensor(3))
    elif form == "lengths as lists":
        call = (*call[:2], call[2].tolist(), call[3].tolist())
    found = []
    for function in (F.ctc_loss, TRACE_DECOMPOSITIONS[F.ctc_loss]):
        leaf = call[0].clone().requires_grad_()
        loss = function(leaf, *call[1:], reduction=reduction, zero_infinity=zero_infinity)
        found.append((loss, *torch.autograd.grad(loss.square().sum(), leaf)))
    torch.testing.assert_close(found[1], found[0])


def test_the_trace_has_it_once():
    graph = autopart.parallelize(Recogniser(), "dp1", example_kwargs=batch()).graph().graph
    assert [operator_name(n) for n in graph.nodes if "ctc" in operator_name(n)] == ["autopart::ctc_loss"]

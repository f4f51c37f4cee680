"""Training and evaluation, with and without labels: each derives the programs of its own lengths and batch sizes."""

import copy
import warnings
from unittest import mock

import dist
import pytest
import torch
import zoo

import autopart

BUILDERS = {"llama": zoo.llama, "t5": zoo.t5, "bert": zoo.bert}


class Modes:
    """A partitioned model beside the model itself, in the modes of a training run."""

    def __init__(self, name, mesh, **options):
        self.name, (self.model, _) = name, BUILDERS[name](num_layers=1, seq=64)
        self.pm = autopart.parallelize(
            copy.deepcopy(self.model), mesh, example_kwargs=self.batch(6, 12, True), **options
        )  # fmt: skip

    def batch(self, rows, seq, labels):
        batch = BUILDERS[self.name](num_layers=1, rows=rows, seq=seq)[1]
        if not labels:
            removed = batch.pop("labels")
            if self.name == "t5":
                batch["decoder_input_ids"] = removed.clamp(min=0)
        return batch

    def train(self, *sizes):
        """Train on batches of these sizes. Returns the number of traces."""
        with mock.patch("autopart.recipe.make_plan.trace", wraps=autopart.recipe.make_plan.trace) as traces:
            for rows, seq in sizes:
                batch = self.batch(rows, seq, True)
                loss = self.model(**batch, **zoo.no_cache(self.model)).loss
                loss.backward()
                zoo.assert_close_outputs(self.pm.step(**batch), loss.detach(), where=f"loss of {rows} x {seq}")
                zoo.assert_same_grads(self.pm.full_grads(), {n: p.grad for n, p in self.model.named_parameters()})
                self.model.zero_grad()
                self.pm.zero_grad()
        return traces.call_count

    @torch.no_grad()
    def evaluate(self, *sizes, labels):
        """Evaluate batches of these sizes. Returns the number of traces."""
        self.model.eval()
        self.pm.eval()
        with mock.patch("autopart.recipe.make_plan.trace", wraps=autopart.recipe.make_plan.trace) as traces:
            for rows, seq in sizes:
                batch = self.batch(rows, seq, labels)
                expected, actual = self.model(**batch, **zoo.no_cache(self.model)), self.pm(**batch)
                zoo.assert_close_outputs(actual.logits, expected.logits, where=f"logits of {rows} x {seq}")
                if labels:
                    zoo.assert_close_outputs(actual.loss, expected.loss, where=f"loss of {rows} x {seq}")
        self.model.train()
        self.pm.train()
        return traces.call_count


def run_modes(name, mesh, options):
    warnings.simplefilter("ignore")  # of batches that dp does not divide
    modes = Modes(name, mesh, **options)
    counts = {"train": modes.train((6, 40), (6, 24), (6, 20), (6, 33))}
    counts["labels"] = modes.evaluate((6, 12), (6, 44), (6, 26), (6, 30), labels=True)
    counts["no labels"] = modes.evaluate((6, 12), (6, 44), (6, 26), labels=False)
    counts["short"] = modes.train((5, 40), (5, 12), (5, 24)) + modes.evaluate((5, 40), labels=False)
    counts["again"] = modes.train((6, 37), (5, 30)) + modes.evaluate((6, 15), (6, 37), labels=True)
    counts["again"] += modes.evaluate((6, 30), (6, 42), labels=False)
    return counts


@pytest.mark.parametrize(("name", "mesh", "options"), [
    ("llama", "tp2", {}), ("bert", "dp2", {}), ("t5", "pp2", {"microbatches": 2}),
])  # fmt: skip
@pytest.mark.large
def test_each_mode_has_its_own_lengths(name, mesh, options):
    counts = dist.run_ranks(run_modes, 2, name, mesh, options, timeout_s=400.0)[0]
    assert counts["train"] <= 2 and counts["labels"] <= 3 and counts["no labels"] <= 3, counts
    assert counts["short"] <= 4 and not counts["again"], counts

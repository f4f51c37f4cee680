"""transformers' Trainer on partitioned models: logs, weights and checkpoints equal those of one process."""

import copy
import functools
import inspect

import dist
import pytest
import torch
import trainer_cases as cases
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import autopart
from autopart.errors import UsageError

TIMEOUT_S = 280.0
MESHES = {
    "tp2": {}, "pp2": {}, "dp2": {}, "dp2 zero3": {"zero": 3}, "dp2 local": {"local_batch": True}, "dp2,tp2": {},
    "pp2,tp2": {"microbatches": 2},
}  # fmt: skip
FAST = ("tp2", "dp2 zero3")
CHECKPOINTS = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 3,
}  # fmt: skip


@functools.cache
def plain(num_data_ranks, dropout=0.0):
    """Return (log, weights) of one process that trains on the batches of all data ranks."""
    cases.forget_processes()
    rows = cases.ROWS * num_data_ranks
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    made = cases.trainer(cases.gpt2(dropout), "unused", **sizes)
    return cases.trained(made), copy.deepcopy(made.model.state_dict())


def train(mesh, options, expected, dropout):
    cases.forget_processes()
    pm = cases.partitioned(mesh, dropout, **options)
    made = cases.trainer(pm, "unused")
    log, weights = expected
    wrong = cases.differences(cases.trained(made), log)
    assert not wrong, (mesh, options, wrong)
    cases.check_weights(pm, weights, mesh)
    assert isinstance(made, Trainer) and made.label_names == ["labels"] and made.model is pm
    return made.get_total_train_batch_size(made.args)


@pytest.mark.parametrize("case", [pytest.param(m, marks=() if m in FAST else pytest.mark.large) for m in MESHES])
def test_training_equals_one_process(case):
    mesh = case.split()[0]
    sizes = autopart.Mesh.parse(mesh)
    expected = plain(sizes.data_parallel_size)
    totals = dist.run_ranks(train, sizes.num_ranks, mesh, MESHES[case], expected, 0.0, timeout_s=TIMEOUT_S)
    assert totals == [2 * cases.ROWS * sizes.data_parallel_size] * sizes.num_ranks


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2"])
def test_dropout_equals_one_process(mesh):
    expected = plain(autopart.Mesh.parse(mesh).data_parallel_size, 0.2)
    dist.run_ranks(train, 2, mesh, {"rng": "exact"}, expected, 0.2, timeout_s=TIMEOUT_S)

"""Options of transformers' Trainer on partitioned models: each equals one process, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dist
import numpy as np
import pytest
import torch
import trainer_cases as cases
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import autopart
from autopart.errors import AutopartError

TIMEOUT_S = 900.0
MESHES = {"tp2": {}, "pp2": {}, "dp2": {"zero": 3}}


class Stream(IterableDataset):
    """The samples of a dataset without a length."""

    def __init__(self, size: int) -> None:
        self.tokens = cases.Tokens(size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.tokens)


class Batched:
    """Metrics that are computed batch by batch."""

    def __init__(self) -> None:
        self.rows, self.total = 0, 0.0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self.rows += len(prediction.predictions)
        self.total += float(prediction.predictions.abs().sum())
        result = {"rows": self.rows, "sum": self.total} if compute_result else {}
        if compute_result:
            self.__init__()
        return result


def guesses(prediction: Any) -> dict[str, float]:
    return {"rows": len(prediction.predictions), "sum": float(prediction.predictions.sum())}


def of_inputs(prediction: Any) -> dict[str, float]:
    return {"rows": len(prediction.inputs), "sum": float(np.sum(prediction.inputs) + np.sum(prediction.losses))}


def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def sgd(model: torch.nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return cases.loss_in_double(outputs["logits"], labels, cases.VOCABULARY, num_items_in_batch)


def own_metrics(metrics: Any, preprocess: Any = None) -> dict[str, Any]:
    return {"compute_metrics": metrics, "preprocess_logits_for_metrics": preprocess}


BEST = {"save_strategy": "best", "metric_for_best_model": "loss", "load_best_model_at_end": True}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1,
           "metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1}}  # fmt: skip
EARLY = {"save_strategy": "epoch", "metric_for_best_model": "rows", "load_best_model_at_end": True}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adagrad": ({"optim": "adagrad"}, {}),
    "rmsprop": ({"optim": "rmsprop"}, {}),
    "fused adamw": ({"optim": "adamw_torch_fused"}, {}),
    "sgd with arguments": ({"optim": "sgd", "optim_args": "momentum=0.9"}, {}),
    "reduce on plateau": (PLATEAU, {}),
    "own optimizer": ({}, {"optimizers": sgd}),
    "argmax of logits": ({}, own_metrics(guesses, argmax)),
    "metrics of inputs": ({"include_for_metrics": ["inputs", "loss"]}, own_metrics(of_inputs)),
    "metrics by batch": ({"batch_eval_metrics": True}, {"compute_metrics": Batched}),
    "eval accumulation": ({"eval_accumulation_steps": 1, "eval_on_start": True}, {}),
    "loss only": ({"prediction_loss_only": True}, {"compute_metrics": None}),
    "gather objects": ({"eval_use_gather_object": True}, {}),
    "two eval sets": ({}, {"eval_dataset": {"a": cases.Tokens(5), "b": cases.Tokens(6)}}),
    "iterable dataset": ({"max_steps": 4}, {"train_dataset": Stream(40)}),
    "uneven last batch": ({}, {"train_dataset": cases.Tokens(27)}),
    "dropped last batch": ({"dataloader_drop_last": True}, {"train_dataset": cases.Tokens(26)}),
    "split batches": ({"accelerator_config": {"split_batches": True}}, {}),
    "own data seed": ({"data_seed": 5, "average_tokens_across_devices": False}, {}),
    "sequential": ({"train_sampling_strategy": "sequential"}, {}),
    "memory": ({"skip_memory_metrics": False}, {}),
    "early stopping": (EARLY, {"callbacks": [EarlyStoppingCallback(1)]}),
    "best model": (BEST, {}),
    "tensorboard": ({"report_to": ["tensorboard"]}, {}),
}  # fmt: skip
REFUSED = {
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True does not work"),
    "debug": ({"debug": "underflow_overflow"}, "TrainingArguments(debug="),
    "checkpointing": ({"gradient_checkpointing": True}, "parallelize(..., recompute='full')"),
    "fp16": ({"fp16": True}, "parallelize(..., precision='fp16')"),
    "find batch size": ({"auto_find_batch_size": True}, "TrainingArguments(auto_find_batch_size=True)"),
}  # fmt: skip


def made(name: str, model: Any, folder: str, rows: int) -> Any:
    arguments, options = OPTIONS[name]
    options = {"train_dataset": cases.Tokens(cases.NUM_TRAIN), "eval_dataset": cases.Tokens(cases.NUM_EVAL),
               "compute_metrics": cases.accuracy, **copy.deepcopy(options)}  # fmt: skip
    if options["compute_metrics"] is Batched:
        options["compute_metrics"] = Batched()
    if "optimizers" in options:
        options["optimizers"] = options["optimizers"](model)
    args = TrainingArguments(**{**cases.default_arguments(folder, rows), **arguments})
    return Trainer(model=model, args=args, **options)


def results(name: str, model: Any, folder: str, rows: int) -> tuple[Any, dict[str, float], list[str]]:
    """Train, predict and evaluate. Returns the log, metrics of both, and which ranks wrote for tensorboard."""
    cases.forget_processes()
    trainer = made(name, model, folder, rows)
    log = copy.deepcopy(cases.trained(trainer))
    metrics = {}
    if OPTIONS[name][1].get("compute_metrics") is None:
        prediction = trainer.predict(cases.Tokens(7))
        metrics = {**prediction.metrics, **trainer.evaluate(cases.Tokens(5), metric_key_prefix="mine")}
        if prediction.predictions is not None:
            metrics["sum of predictions"] = float(np.abs(prediction.predictions).sum())
    events = sorted(path.name.split(".")[0] for path in Path(folder).rglob("events*"))
    return log, metrics, events


def wrong_values(log: Any, expected: Any) -> list[str]:
    ignored = ("runtime", "second", "mem_", "compilation_time", "preparation_time")
    wrong = [] if len(log) == len(expected) else [f"{len(log)} entries, not {len(expected)}"]
    for got, right in zip(log, expected, strict=False):
        for key in sorted({*got, *right}):
            if any(word in key for word in ignored):
                continue
            if key not in got or key not in right or abs(got[key] - right[key]) > 1e-10 * max(1.0, abs(right[key])):
                wrong.append(f"{key}: {got.get(key)}, not {right.get(key)}")
    return wrong


def all_options(mesh: str, options: dict[str, Any], base: str, expected: dict[str, Any]) -> None:
    """Train with one option after another, each time from the same weights."""
    pm = cases.partitioned(mesh, **options)
    start = copy.deepcopy(cases.gpt2().state_dict())
    for name, (log, metrics, weights) in expected.items():
        pm.load_state_dict(start)
        pm.train()
        found, found_metrics, events = results(name, pm, f"{base}/{name}", cases.ROWS)
        wrong = wrong_values([*found, found_metrics], [*log, metrics])
        assert not wrong, (mesh, name, wrong)
        cases.check_weights(pm, weights, f"{mesh} {name}")
        assert len(events) == (name == "tensorboard"), (mesh, events)


@pytest.mark.large
@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", MESHES)
def test_options_equal_one_process(mesh, tmp_path):
    expected = {}
    rows = cases.ROWS * autopart.Mesh.parse(mesh).data_parallel_size
    for name in OPTIONS:
        model = cases.gpt2()
        log, metrics, _ = results(name, model, str(tmp_path / "plain" / name), rows)
        expected[name] = (log, metrics, copy.deepcopy(model.state_dict()))
    dist.run_ranks(all_options, 2, mesh, MESHES[mesh], str(tmp_path), expected, timeout_s=TIMEOUT_S)


# --- refused ---------------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    pm = cases.partitioned("tp2")
    texts = {}
    for name, (arguments, _) in REFUSED.items():
        cases.forget_processes()
        with pytest.raises(AutopartError) as error:
            cases.trainer(pm, "unused", **arguments).train()
        texts[name] = str(error.value)
    return texts


@pytest.mark.large
def test_options_that_are_refused():
    for texts in dist.run_ranks(refusals, 2, timeout_s=TIMEOUT_S):
        for name, (_, text) in REFUSED.items():
            assert text in texts[name], texts[name]


# --- fp16 ------------------------------------------------------------------------------------------------------------


def fp16(mesh: str) -> None:
    """A batch that overflows skips the optimizer step, also if a later batch of the step does not overflow."""
    cases.forget_processes()
    pm = autopart.parallelize(cases.gpt2().float(), mesh, example_kwargs=cases.batch(), precision="fp16")
    start = pm.full_state_dict()
    pm._loss_scaling.scale = 2.0**17  # gradients of the first batches overflow
    trainer = cases.trainer(pm, "unused", fp16=True, max_steps=1, eval_strategy="no")
    trainer.train()
    assert pm.skipped_steps in (1, 2) and pm.loss_scale < 2.0**17
    for name, value in pm.full_state_dict().items():
        assert torch.equal(value, start[name]), name
    assert trainer.lr_scheduler.last_epoch == 0


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_steps_with_overflow_are_skipped(mesh):
    dist.run_ranks(fp16, 2, mesh, timeout_s=TIMEOUT_S)

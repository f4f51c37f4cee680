"""A small GPT-2 in float64 and a dataset, trained by transformers' Trainer: one process, or ranks of a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autopart

VOCABULARY, LENGTH, ROWS, NUM_TRAIN, NUM_EVAL = 64, 12, 4, 24, 11
SIZES = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows", "eval_sum", "train_loss",
            "total_flos", "epoch", "step", "num_input_tokens_seen")  # fmt: skip


class DoubleGPT2(GPT2LMHeadModel):
    """GPT-2 whose loss stays in float64. Transformers computes its loss in float32."""

    @property
    def loss_function(self) -> Any:
        return loss_in_double

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        pass


def loss_in_double(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.reshape(-1, vocab_size), target, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Tokens(Dataset):
    """Random tokens; a part of the labels is ignored, and `name` is no input of the model."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.size:
            raise IndexError(index)  # ends an iteration over the items
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels, "name": torch.zeros(1)}


def gpt2(dropout: float = 0.0) -> DoubleGPT2:
    torch.manual_seed(0)
    config = GPT2Config(**SIZES, **dict.fromkeys(DROPOUTS, dropout), use_cache=False, attn_implementation="eager")
    return DoubleGPT2(config).double()


def batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    items = [Tokens(rows)[index] for index in range(rows)]
    return {name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")}


def accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    right = (guesses == labels)[labels != -100]
    rows, total = len(labels), float(np.abs(prediction.predictions).sum())
    return {"accuracy": float(right.mean()), "rows": rows, "sum": total}


def trainer(
    model: Any, folder: str | Path, kind: Any = Trainer, options: Any = None, num_eval: int = NUM_EVAL, **arguments: Any
) -> Any:  # fmt: skip
    """Return a trainer of this dataset. `arguments`: of TrainingArguments; `options`: of the trainer."""
    args = TrainingArguments(**{**default_arguments(folder), **arguments})
    given = {"compute_metrics": accuracy, **(options or {})}
    return kind(model=model, args=args, train_dataset=Tokens(NUM_TRAIN), eval_dataset=Tokens(num_eval), **given)


def default_arguments(folder: str | Path, rows: int = ROWS) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows,
        "num_train_epochs": 2, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "epoch", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "seed": 0,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
        "include_num_input_tokens_seen": "all", "logging_nan_inf_filter": False,
    }  # fmt: skip


def trained(made: Any, **how: Any) -> list[dict[str, Any]]:
    """Train, with sums of losses in float64, and return the log."""
    torch.set_default_dtype(torch.float64)
    try:
        made.train(**how)
    finally:
        torch.set_default_dtype(torch.float32)
    return made.state.log_history


def forget_processes() -> None:
    """Make accelerate read the processes of this test; it keeps those of the first use."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def partitioned(mesh: str, dropout: float = 0.0, **options: Any) -> autopart.ParallelModule:
    return autopart.parallelize(gpt2(dropout), mesh, example_kwargs=batch(), **options)


def differences(log: Any, expected: Any) -> list[str]:
    """Return the logged values that differ by more than 1e-10, relative to 1 or their size."""
    assert len(log) == len(expected), (log, expected)
    wrong = []
    for got, right in zip(log, expected, strict=True):
        for name in COMPARED:
            if (name in got) != (name in right):
                wrong.append(f"{name}: {got} {right}")
            elif name in right and abs(got[name] - right[name]) > 1e-10 * max(1.0, abs(right[name])):
                wrong.append(f"{name} at step {right['step']}: {got[name]}, not {right[name]}")
    return wrong


def check_weights(pm: Any, expected: dict[str, torch.Tensor], case: str) -> None:
    for name, value in pm.full_state_dict().items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{case} {n} {text}"
        )

"""transformers' Trainer for partitioned models: `Trainer(model=pm, args=args, ...)`.

If the model is partitioned, `Trainer.__init__` changes the class of the trainer: it gets the methods of
`PartitionedTrainer`. They replace the parts of Trainer that assume one full model per process: data loading, the
training step, saving and loading.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_pt_utils import safe_globals
from transformers.utils.generic import can_return_loss, find_labels

from autopart.errors import UsageError
from autopart.integrations.accelerate import STATE, adopt, torch_optimizer
from autopart.integrations.sharded_checkpoint import load_sharded, save_sharded
from autopart.integrations.trl import connect_trainer
from autopart.runtime.module import ParallelModule

SCHEDULER, TRAINING_ARGS = "scheduler.pt", "training_args.bin"
REFUSED = {
    "activation_checkpointing": "parallelize(..., recompute='full')",
    "gradient_checkpointing": "parallelize(..., recompute='full')",
    "torch_compile": "parallelize(..., compile=True)",
    "use_liger_kernel": "apply the kernels to the model before parallelize()",
    "neftune_noise_alpha": "add the noise in the model's forward, before parallelize()",
    "fp16_full_eval": "parallelize(..., precision='fp16')",
    "bf16_full_eval": "parallelize(..., precision='bf16')",
    "auto_find_batch_size": "plan.memory, or autopart.search, for the largest batch",
    "deepspeed": "parallelize(..., zero=3)",
    "fsdp": "parallelize(..., zero=3)",
    "parallelism_config": "the mesh of parallelize(model, 'dp2,tp2')",
    "debug": "autopart.verify(model, mesh, ...), which names the first value that is wrong",
}
"""{option of TrainingArguments: what to use with a partitioned model}."""


class TrainerMetrics(TrainerCallback):
    """Callback that adds `pm.metrics()` to each log of a training loss, with names such as `autopart/mfu`."""


class PartitionedTrainer(Trainer):
    """Methods of a Trainer whose model is partitioned.

    A data rank is a group of ranks that compute equal samples. The global batch has `per_device_train_batch_size`
    samples for each data rank. Every rank loads the global batch, or with `local_batch=True` only the samples of its
    data rank.
    """

    model: ParallelModule

    # --- set up --------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Create the accelerator, and change its class so that it accepts the partitioned model."""
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator, self.model)
        gather = self.accelerator.gather_for_metrics  # the method before `adopt` gathers from all ranks
        self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _users_model(self: Any) -> Any:
        """Return the model before it was partitioned, without PEFT's wrapper."""
        model = self.model._source.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _inspect_partitioned(self: Any) -> None:
        """Set the trainer's label names and loss settings from the class of the user's model."""
        inner = self._users_model()
        self._signature_columns = None
        if self.args.label_names is None:
            self.label_names = find_labels(type(inner))
        self.can_return_loss = can_return_loss(type(inner))
        parameters = inspect.signature(inner.forward).parameters.values()
        takes_any = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.model_accepts_loss_kwargs = getattr(inner, "accepts_loss_kwargs", takes_any)

    def _set_signature_columns_if_needed(self: Any) -> None:
        """Keep the dataset columns that the user's model takes, unless the trainer's class chooses columns."""
        inherited = super()._set_signature_columns_if_needed
        if inherited.__func__ is not Trainer._set_signature_columns_if_needed:
            inherited()
        elif self._signature_columns is None:
            inputs = inspect.signature(self._users_model().forward).parameters
            self._signature_columns = list(dict.fromkeys([*inputs, "label", "label_ids", *self.label_names]))

    def _move_model_to_device(self: Any, model: Any, device: torch.device) -> None:
        """Do not move the model: each rank has its shards on its device.

        Raises UsageError if the trainer's device has another type.
        """
        if model.device.type != torch.device(device).type:
            raise UsageError(
                f"the partitioned model is on {model.device.type}, and TrainingArguments choose {device}",
                why="a partitioned model cannot move to another device",
                hint="TrainingArguments(use_cpu=True)" if model.device.type == "cpu" else "use_cpu=False",
            )

    def _wrap_model(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return model

    # --- data ----------------------------------------------------------------------------------------------------

    def _get_dataloader(self: Any, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """Return a data loader of the global batch.

        With `local_batch=True`, it loads this data rank's samples only.
        """
        if not self.model._local_batch:
            batch_size *= self.model.num_data_ranks
        return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    def get_total_train_batch_size(self: Any, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.model.num_data_ranks

    def get_tp_size(self: Any) -> int:
        """Return the number of processes that Trainer treats as one, because they have a common loss.

        The model's loss is global, so all processes of the accelerator count. With `local_batch=True`, a loss that the
        trainer computes from outputs is that of this data rank.
        """
        is_local = self.compute_loss_func is not None or self.label_smoother is not None
        return 1 if is_local else self.accelerator.num_processes

    def _get_num_items_in_batch(self: Any, batch_samples: list, device: torch.device) -> Any:
        """Return the number of labels in the global batch."""
        num_items = super()._get_num_items_in_batch(batch_samples, device)
        num_shards = self.accelerator.num_processes
        if num_items is None or num_shards == 1 or not self.args.average_tokens_across_devices:
            return num_items
        return torch.round(num_items * self.get_tp_size())  # Trainer has divided the sum by `get_tp_size()`

    # --- training and evaluation ---------------------------------------------------------------------------------

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one batch. If the model computes the loss, `pm.step` runs both.

        Raises UsageError if the trainer computes the loss from outputs, and the mesh has `pp` or the precision is fp16.
        """
        custom = self._custom_loss()
        if custom is not None:
            if model.mesh.size("pp") > 1 or model._loss_scaling is not None:
                raise UsageError(
                    f"{custom} does not work with pp or precision='fp16'",
                    why="the loss must be a part of the programs, so that step() can differentiate it",
                    hint="let the model's forward return the loss, or use a mesh without pp, and precision='bf16'",
                )
            return super().training_step(model, inputs, num_items_in_batch).to(self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        is_divided = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if is_divided:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        scale = 1.0 if is_divided else 1 / self.current_gradient_accumulation_steps
        loss = model.step(**inputs, loss_scale=None if scale == 1.0 else scale)
        self._drop_overflowed_gradients()
        return (loss * scale).to(self.args.device)

    def _drop_overflowed_gradients(self: Any) -> None:
        """Skip the optimizer step if fp16 gradients of any of its batches overflowed, as GradScaler does."""
        scaling = self.model._loss_scaling
        if scaling is None:
            return
        self._has_overflowed = getattr(self, "_has_overflowed", False) or scaling.overflowed
        if self.accelerator.sync_gradients:
            if self._has_overflowed:
                self.model.zero_grad()
                scaling.overflowed = True
            self._has_overflowed = False

    def _custom_loss(self: Any) -> str | None:
        """Return the name of the code that computes a loss outside of the model, or None."""
        if self.compute_loss_func is not None:
            return "compute_loss_func="
        if self.label_smoother is not None:
            return "label_smoothing_factor="
        own = type(self).compute_loss
        return None if own is Trainer.compute_loss else f"{own.__qualname__}()"

    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return (loss, logits, labels) of the global batch, or with `local_batch=True` of this data rank."""
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and not self.model._local_batch:
            loss = loss.expand(self.model.num_data_ranks)  # Trainer repeats it per_device_eval_batch_size times
        return loss, logits, labels

    def floating_point_ops(self: Any, inputs: Mapping[str, Any]) -> float:
        """Return this rank's share of the batch's FLOPs. Trainer adds the shares of all processes."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        if not hasattr(self, "_flops_per_element"):
            self._flops_per_element = 6 * self.model.num_parameters(exclude_embeddings=True)
        share = self.accelerator.num_processes / max(1, self.args.world_size)
        return self._flops_per_element * inputs[name].numel() * share

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values. With the callback `TrainerMetrics`, also log `pm.metrics()` with each training loss."""
        if "loss" in logs and any(isinstance(one, TrainerMetrics) for one in self.callback_handler.callbacks):
            logs |= {f"autopart/{name}": value for name, value in self.model.metrics().items()}
        super().log(logs, *args, **kwargs)

    # --- saving --------------------------------------------------------------------------------------------------

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that `from_pretrained` loads. Every rank must call it."""
        folder = self.args.output_dir if output_dir is None else output_dir
        self.model.save_pretrained(folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, Path(folder) / TRAINING_ARGS)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        save_sharded(self.model, [torch_optimizer(self.optimizer)], Path(output_dir) / STATE)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # the first rank has written the trainer's state, and deleted old folders

    # --- loading -------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / STATE).is_dir():  # else the weights are loaded with the optimizer
            self.model.load_pretrained(resume_from_checkpoint)

    def _load_best_model(self: Any) -> None:
        self.model.load_pretrained(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Load the states of the optimizer and the scheduler. They may have been saved on another mesh."""
        if checkpoint is None:
            return
        if not (Path(checkpoint) / STATE).is_dir():
            raise UsageError(
                f"{checkpoint} has no optimizer state of a partitioned model",
                why=f"there is no folder {STATE}: another trainer saved it, or save_only_model=True",
                hint="resume from a checkpoint of a partitioned model; from_pretrained loads the weights of this one",
            )
        load_sharded(self.model, [torch_optimizer(self.optimizer)], Path(checkpoint) / STATE)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        """Load the random state of this rank, or of the first rank if fewer ranks saved the checkpoint."""
        if checkpoint is None:
            return
        own = Path(checkpoint) / f"rng_state_{self.args.process_index}.pth"
        single, first = Path(checkpoint) / "rng_state.pth", Path(checkpoint) / "rng_state_0.pth"
        source = next((path for path in (own, first, single) if path.is_file()), None)
        if source is None or source == (own if self.args.world_size > 1 else single):
            return super()._load_rng_state(checkpoint)
        with safe_globals():
            state = torch.load(source, weights_only=True)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])


@functools.cache
def partitioned(kind: Any) -> Any:
    """Return a subclass of a Trainer class that trains a partitioned model.

    `Trainer(model=pm)`, or a subclass of Trainer with such a model, changes its class to this one.
    """
    return type(kind.__name__, (PartitionedTrainer, kind), {"__module__": kind.__module__})


def connect() -> None:
    """Make `Trainer(model=pm)` and its subclasses train partitioned models."""
    original = Trainer.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialise(self: Any, model: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        if not isinstance(model, ParallelModule):
            return original(self, model, args, *rest, **options)
        _check(args, options, model)
        if not isinstance(self, PartitionedTrainer):
            kind: Any = type(self)
            self.__class__ = partitioned(kind)
            connect_trainer(kind)
        original(self, model, args, *rest, **options)
        self._inspect_partitioned()

    Trainer.__init__ = initialise


def _check(args: Any, options: Mapping[str, Any], model: ParallelModule) -> None:
    """Raise UsageError for options of Trainer that do not work with a partitioned model.

    Gradient checkpointing, a default of TRL, is switched off if the model is partitioned with `recompute=`.
    """
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # one is an alias of the other
        if getattr(args, name, False) and model.plan.recompute != "none":
            setattr(args, name, False)
    if options.get("model_init") is not None:
        raise UsageError("model_init= does not work with a partitioned model",
                         why="a hyperparameter search would partition a model per trial",
                         hint="model=autopart.parallelize(...)")  # fmt: skip
    for name, instead in REFUSED.items():
        if getattr(args, name, None):
            raise UsageError(
                f"TrainingArguments({name}={getattr(args, name)!r:.40}) does not work with a partitioned model",
                why="the option changes a model that is not partitioned",
                hint=instead,
            )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise UsageError("train_sampling_strategy='batch_rebalance' does not work with a partitioned model",
                         why="it shares out samples over all ranks", hint="'group_by_length'")  # fmt: skip


connect()

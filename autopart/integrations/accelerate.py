"""accelerate for partitioned models: `Accelerator().prepare(pm, optimizer, dataloader, scheduler)`.

A partitioned model distributes itself and returns the loss of the global batch. Accelerate therefore treats all ranks
as one process. With `local_batch=True`, accelerate treats all ranks with equal samples (a data rank) as one process,
but only for data loading and gathering.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, DynamoBackend, recursively_apply

from autopart.errors import UsageError
from autopart.integrations.sharded_checkpoint import load_sharded, save_sharded
from autopart.runtime.checkpoint.saved_shard import contains_shards
from autopart.runtime.gradients.no_sync import sharded_error
from autopart.runtime.module import ParallelModule

STATE = "autopart"
"""Folder of a checkpoint with the shards of the model and optimizers."""
PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16"}
OTHER_MODES = {
    DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.FSDP: "FSDP", DistributedType.MEGATRON_LM: "Megatron-LM",
}  # fmt: skip


class PartitionedAccelerator(Accelerator):
    """Accelerator whose model is partitioned. `adopt` gives a user's Accelerator this class.

    Attributes:
        partitioned: the partitioned model.
    """

    partitioned: ParallelModule
    _models: list[Any]
    _optimizers: list[Any]

    @property
    def num_processes(self) -> int:
        """Number of different batches per step: 1, or the number of data ranks with `local_batch=True`."""
        return self.partitioned.num_data_ranks if self.partitioned._local_batch else 1

    @property
    def optimizer_step_was_skipped(self) -> bool:
        scaling = self.partitioned._loss_scaling
        return scaling.overflowed if scaling is not None else super().optimizer_step_was_skipped

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Register the partitioned model. It is neither wrapped nor moved."""
        if isinstance(model, ParallelModule) and evaluation_mode:
            return model
        if model is not self.partitioned:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that takes `num_processes` steps per optimizer step, as accelerate's does."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.__class__ = DataRankScheduler
        prepared.split_batches, prepared.num_data_ranks = True, 1 if self.split_batches else self.num_processes
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a data loader of the global batch.

        With `local_batch=True`, it loads this data rank's samples only.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise UsageError(
                "dispatch_batches=True does not work with a partitioned model",
                why="it sends different samples to ranks that compute the same samples",
                hint="leave it out: every rank loads the samples that it needs",
            )
        is_local = self.partitioned._local_batch
        rank = self.partitioned.data_rank if is_local else 0
        seeding = data_loader.worker_init_fn
        if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:  # of transformers
            data_loader.worker_init_fn = functools.partial(seeding, rank=rank)
        prepared = prepare_data_loader(
            data_loader, self.device, num_processes=self.num_processes, process_index=rank,
            split_batches=self.split_batches and is_local,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=["torch", "generator"], dispatch_batches=False, even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler, data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking, use_stateful_dataloader=self.use_stateful_dataloader,
        )  # fmt: skip
        self._dataloaders.append(prepared)
        return prepared

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Run backward of the global loss.

        Raises UsageError on a pipeline and with `precision="fp16"`, which need `pm.step`.
        """
        if self.partitioned._loss_scaling is not None:
            raise UsageError(
                "accelerator.backward() does not scale the loss of a model with precision='fp16'",
                why="the partitioned model scales the loss inside of step()",
                hint="loss = model.step(**batch) in place of the call and backward(), or precision='bf16'",
            )
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Context manager in which gradients accumulate without being reduced.

        If parameters are sharded over data ranks, or `model` is another model, gradients are reduced as usual.
        """
        program = getattr(model, "_program", None)
        if model is not self.partitioned or program is None or sharded_error(program) is not None:
            yield
            return
        with model.no_sync():
            yield

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all data ranks. Without `local_batch=True`, return the global tensor unchanged."""
        if self.num_processes == 1:
            return tensor
        firsts = torch.tensor(self._first_ranks)

        def select(gathered: torch.Tensor) -> torch.Tensor:
            by_rank = gathered.reshape(dist.get_world_size(), -1, *gathered.shape[1:])
            return by_rank[firsts.to(gathered.device)].flatten(0, 1)

        return recursively_apply(select, super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the tensors of all data ranks, and drop samples that were repeated to fill the last batch."""
        if self.num_processes > 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        return super().gather_for_metrics(input_data) if _is_of_tensors(input_data) else input_data

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        if self.num_processes == 1:
            return tensor
        return super().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over the data ranks."""
        if self.num_processes == 1 or reduction == "none":
            return tensor

        def reduced(value: torch.Tensor) -> torch.Tensor:
            total = self.gather(value[None]).sum(0) * scale
            return total / self.num_processes if reduction == "mean" else total

        return recursively_apply(reduced, tensor)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the full state dict, on every rank. A collective call."""
        return model.full_state_dict() if model is self.partitioned else super().get_state_dict(model, unwrap)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object on the first process. Raises UsageError if it has shards of a partitioned model."""
        if contains_shards(obj):
            raise UsageError(
                "accelerator.save() of a partitioned model's state_dict() would write one rank's shards",
                why="state_dict() has the shards of this rank",
                hint="accelerator.save(accelerator.get_state_dict(model), path), with get_state_dict on every rank; "
                "accelerator.save_state(folder) to resume",
            )
        super().save(obj, f, safe_serialization)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing if every rank loads the global batch.

        Raises UsageError with `local_batch=True`, because ranks must pass equally many samples.
        """
        if self.num_processes > 1:
            raise UsageError(
                "join_uneven_inputs() does not work with local_batch=True",
                why="all ranks compute one global batch, so they must pass equally many samples",
                hint="leave it out: the last batch is filled up; or parallelize(...) without local_batch=True",
            )
        yield

    def save_model(self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", **kwargs: Any) -> None:
        """Write the weights as safetensors files. Every rank must call it."""
        if model is not self.partitioned:
            return super().save_model(model, save_directory, max_shard_size, **kwargs)
        model.save_pretrained(save_directory, max_shard_size=max_shard_size)

    def save_state(self, output_dir: Any = None, **kwargs: Any) -> Any:
        """Save the state of the model, optimizers, schedulers, random generators and registered objects.

        Every rank must call it. The model and optimizers can be loaded on another mesh.
        """
        with self._without_model_and_optimizers():
            folder = super().save_state(output_dir, **kwargs)
        save_sharded(self.partitioned, [torch_optimizer(one) for one in self._optimizers], Path(folder) / STATE)
        return folder

    def load_state(self, input_dir: Any = None, **kwargs: Any) -> None:
        """Load a state that `save_state` wrote on any mesh. Every rank must call it."""
        with self._without_model_and_optimizers():
            super().load_state(input_dir, **kwargs)
        if input_dir is None:
            folders = (Path(self.project_dir) / "checkpoints").iterdir()
            input_dir = max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))
        load_sharded(self.partitioned, [torch_optimizer(one) for one in self._optimizers], Path(input_dir) / STATE)

    @contextlib.contextmanager
    def _without_model_and_optimizers(self) -> Iterator[None]:
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [m for m in models if m is not self.partitioned], []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    @functools.cached_property
    def _first_ranks(self) -> list[int]:
        """For each data rank (group of ranks with equal samples), its first rank.

        The first access is a collective call.
        """
        data_ranks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(data_ranks, self.partitioned.data_rank)
        return [data_ranks.index(data_rank) for data_rank in range(self.num_processes)]


class DataRankScheduler(AcceleratedScheduler):
    """Learning rate scheduler that takes `num_data_ranks` steps per optimizer step.

    Users of accelerate compute the number of steps before data loaders are sharded, so a sharded loader has fewer
    batches than the scheduler has steps.
    """

    num_data_ranks = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.num_data_ranks):
            super().step(*args, **kwargs)


def adopt(accelerator: Accelerator, module: ParallelModule) -> None:
    """Change the class of a user's Accelerator to `PartitionedAccelerator`.

    Raises UsageError for options of the Accelerator that do not work with the partitioned model.
    """
    if isinstance(accelerator, PartitionedAccelerator):
        if accelerator.partitioned is not module:
            raise UsageError("an Accelerator can prepare one partitioned model", why="it has prepared another one",
                             hint="an Accelerator for each partitioned model")  # fmt: skip
        return
    if accelerator._dataloaders or accelerator._optimizers or accelerator._schedulers:
        raise UsageError(
            "the partitioned model is prepared too late",
            why="the Accelerator has prepared data loaders or optimizers for a model that is not partitioned",
            hint="accelerator.prepare(pm, optimizer, dataloader, scheduler) in one call, or prepare(pm) first",
        )
    _check(accelerator, module)
    kind = type(accelerator)
    accelerator.__class__ = (
        PartitionedAccelerator if kind is Accelerator else type(kind.__name__, (PartitionedAccelerator, kind), {})
    )
    accelerator.partitioned = module
    module._process.averages_losses = True
    accelerator.scaler, accelerator.native_amp = None, False  # `step` casts and scales


def _check(accelerator: Accelerator, module: ParallelModule) -> None:
    mode = OTHER_MODES.get(accelerator.distributed_type)
    if mode is not None or accelerator.parallelism_config is not None:
        raise UsageError(
            f"{mode or 'parallelism_config='} does not work with a partitioned model",
            why="the model is partitioned already, and would be sharded twice",
            hint="leave it out: parallelize(model, 'dp2,tp2', zero=3) shards parameters, gradients and optimizer state",
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise UsageError("torch.compile of a partitioned model compiles nothing",
                         why="it runs graphs that autopart compiles itself",
                         hint="parallelize(..., compile=True), without the option of the library")  # fmt: skip
    requested, precision = accelerator.mixed_precision, precision_of(module)
    if requested not in PRECISIONS:
        raise UsageError(f"mixed_precision={requested!r} does not work with a partitioned model", hint="'bf16'")
    if requested != "no" and PRECISIONS[requested] != precision:
        raise UsageError(
            f"{requested} mixed precision is requested, and the model is partitioned with precision={precision!r}",
            why="the compute dtype is a part of the partitioned model's programs",
            hint=f"parallelize(..., precision={requested!r})",
        )


def precision_of(module: ParallelModule) -> str | None:
    """Return the option `precision` of a partitioned model."""
    precision: Any = module._compiler
    compute = None if precision.precision is None else precision.precision.compute
    return {torch.bfloat16: "bf16", torch.float16: "fp16", None: None}.get(compute, str(compute))


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _is_of_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_of_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_of_tensors, value))
    return isinstance(value, torch.Tensor)


def connect() -> None:
    """Make `Accelerator.prepare` and `prepare_model` accept a partitioned model."""
    for name in ("prepare", "prepare_model"):
        _adopt_first(name)
    original = LocalSGD.__init__

    @functools.wraps(original)
    def initialise(self: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, ParallelModule):
            raise UsageError("LocalSGD does not work with a partitioned model",
                             why="it averages parameters over all ranks, and ranks store different shards",
                             hint="parallelize(..., dp_sync='local:8')")  # fmt: skip
        original(self, accelerator, model, *args, **kwargs)

    LocalSGD.__init__ = initialise


def _adopt_first(name: str) -> None:
    original = getattr(Accelerator, name)

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = [one for one in (*args, *kwargs.values()) if isinstance(one, ParallelModule)]
        is_reference = isinstance(self, PartitionedAccelerator) and kwargs.get("evaluation_mode", False)
        if not modules or is_reference:
            return original(self, *args, **kwargs)
        is_new = not isinstance(self, PartitionedAccelerator)
        for module in modules:
            adopt(self, module)
        return getattr(self, name)(*args, **kwargs) if is_new else original(self, *args, **kwargs)

    setattr(Accelerator, name, prepare)


connect()

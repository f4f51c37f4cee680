"""Lightning for partitioned models: `Trainer(strategy=AutopartStrategy("dp2,tp2"), devices=4)`.

The strategy partitions the submodules of a LightningModule. Its hooks, such as `training_step`, run unchanged on every
rank, with the global batch or, with `local_batch=True`, with the samples of the data rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from autopart.compat.torch_internals import tree_map
from autopart.errors import UsageError
from autopart.integrations.sharded_checkpoint import load_sharded, save_sharded
from autopart.ir.mesh import Mesh
from autopart.options import RunOptions
from autopart.runtime.gradients.no_sync import sharded_error
from autopart.runtime.module import ParallelModule
from autopart.runtime.training.surrounding_code import calling_instead

MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
"""{precision of a Lightning Trainer: option `precision` of `parallelize`}."""
CONVERTED = ("32-true", "64-true", "bf16-true", "16-true")
"""Precisions for which Lightning converts the model before it is partitioned."""
STATE, REST = "autopart", "meta.pt"
"""Entries of a checkpoint folder: shards of model and optimizers, and the other entries of Lightning's checkpoint."""


class AutopartStrategy(DDPStrategy):
    """Lightning strategy that partitions the submodules of a LightningModule.

    Each submodule is traced at its first call: in `forward(example_input_array)` if the LightningModule has that
    attribute, else in its `training_step` (or `validation_step`, ...) with the first batch.

    Args:
        mesh: mesh with named axes, such as "dp2,tp2", as in `parallelize`.
        modules: names of the submodules to partition.  [default: all direct submodules that have parameters]
        **options: `RunOptions`.

    Example:
        >>> trainer = L.Trainer(strategy=AutopartStrategy("dp2,tp2", zero=3), devices=4)    # doctest: +SKIP
    """

    precision_plugin: Any

    def __init__(self, mesh: Any, modules: tuple[str, ...] | None = None, **options: Unpack[RunOptions]) -> None:
        super().__init__()
        self._mesh = Mesh.parse(mesh)
        self._options: dict[str, Any] = dict(options)
        self._names = (modules,) if isinstance(modules, str) else modules
        self._steps: list[_Step] = []

    @property
    def partitioned(self) -> list[ParallelModule]:
        """The partitioned submodules of the LightningModule."""
        return [one for one in self.lightning_module.modules() if isinstance(one, ParallelModule)]

    @property
    def is_local(self) -> bool:
        """True if each data rank loads its own samples."""
        return bool(self._options.get("local_batch"))

    # --- set up --------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        states = _collect_rng_states(include_cuda=False)  # Lightning seeds again if there are several processes
        super().setup_environment()
        if not self.is_local:  # all ranks load the same batches
            _set_rng_states(self.broadcast(states))

    def setup(self, trainer: Any) -> None:
        """Partition the submodules, then create the optimizers of their shards."""
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler &= self.is_local
        self._map_precision()
        self._check_callbacks(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self._partition(trainer)
        self._localize_metrics()
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _map_precision(self) -> None:
        """Replace Lightning's mixed precision by the option `precision=` of the partitioned model."""
        name, plugin = self.precision_plugin.precision, self.precision_plugin
        if isinstance(plugin, MixedPrecision) and name in MIXED:
            if self._options.setdefault("precision", MIXED[name]) != MIXED[name]:
                raise UsageError(
                    f"Trainer(precision={name!r}) and "
                    f"AutopartStrategy(precision={self._options['precision']!r}) differ",
                    why="one of them is ignored", hint=f"Trainer(precision={name!r}) alone",
                )  # fmt: skip
            self.precision_plugin = Precision()
        elif name not in CONVERTED:
            raise UsageError(
                f"Trainer(precision={name!r}) does not work with a partitioned model",
                why="it replaces layers of the model",
                hint="'bf16-mixed', '16-mixed' or '32-true'",
            )

    def _check_callbacks(self, trainer: Any) -> None:
        averaging = [one for one in trainer.callbacks if isinstance(one, (StochasticWeightAveraging, WeightAveraging))]
        if averaging and self._mesh.size("pp") > 1:
            raise UsageError(
                f"{type(averaging[0]).__name__} does not work on a mesh with pp",
                why="it averages a copy of the model, and each stage has other parameters",
                hint="a mesh without pp",
            )

    def _partition(self, trainer: Any) -> None:
        module = self.lightning_module
        own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
        pending = own if self._names is None else set(self._names)
        pending = {name for name in pending if not isinstance(module.get_submodule(name), ParallelModule)}
        if pending:
            with isolate_rng():
                example = _Example(trainer, self)
                while pending:
                    name, args, kwargs = example.first_call(pending)
                    module.set_submodule(name, self._partitioned(module.get_submodule(name), args, kwargs))
                    pending.remove(name)
        self.model_to_device()

    def _partitioned(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> ParallelModule:
        from autopart.api import parallelize

        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self.root_device)
        module = parallelize(model, self._mesh, example_args=args, example_kwargs=kwargs, **self._options)
        module._process.averages_losses = True
        return module

    def _localize_metrics(self) -> None:
        """Make torchmetrics reduce over data ranks only, so that ranks with equal samples count once."""
        for metric in self.lightning_module.modules():
            if hasattr(metric, "distributed_available_fn"):
                if self.is_local and self.num_data_ranks > 1:
                    metric.process_group = self._data_group
                else:
                    metric.distributed_available_fn = _never

    def teardown(self) -> None:
        """Clean up without moving the model to the CPU, because a partitioned model cannot move."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # --- data ranks ----------------------------------------------------------------------------------------------

    @property
    def num_data_ranks(self) -> int:
        """Number of different batches per step: 1, or the number of data ranks with `local_batch=True`."""
        return self._mesh.data_parallel_size if self.is_local else 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_data_ranks, "rank": self._data_rank}

    @property
    def _data_rank(self) -> int:
        return self._mesh.row_index(self._mesh.coordinates(self.global_rank)) if self.is_local else 0

    @functools.cached_property
    def _data_group(self) -> dist.ProcessGroup:
        """Process group over the data ranks: this rank, and one rank of every other data rank.

        A data rank is a group of ranks that compute equal samples. The i-th ranks of all data ranks form a group.
        """
        mesh = self._mesh
        by_data_rank: dict[int, list[int]] = {}
        for rank in range(mesh.num_ranks):
            by_data_rank.setdefault(mesh.row_index(mesh.coordinates(rank)), []).append(rank)
        groups = list(zip(*(by_data_rank[index] for index in sorted(by_data_rank)), strict=True))
        return next(group for ranks in groups if (group := dist.new_group(list(ranks))) and self.global_rank in ranks)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over the data ranks.

        Without `local_batch=True`, every rank has the value of the global batch already, so it is returned unchanged.
        """
        if self.num_data_ranks == 1 or not isinstance(tensor, Tensor):
            return tensor
        return super().reduce(tensor, self._data_group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(float(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather the tensors of all data ranks, and stack them along a new first dim.

        Without `local_batch=True`, return the tensor unchanged.
        """
        if self.num_data_ranks == 1:
            return tensor
        return super().all_gather(tensor, self._data_group, sync_grads)

    # --- training ------------------------------------------------------------------------------------------------

    @property
    def _calls_step(self) -> bool:
        """True if `pm.step` must compute the gradients: on a pipeline, or if the loss is scaled (fp16)."""
        return self._mesh.size("pp") > 1 or any(one._loss_scaling is not None for one in self.partitioned)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's hook `training_step`.

        On a pipeline or with fp16, calls of the model run `pm.step` instead, which includes the backward.
        """
        with ExitStack() as stack:
            for module in self.partitioned if self._calls_step else ():
                stack.enter_context(calling_instead(module, self._step))
            return super().training_step(*args, **kwargs)

    def _step(self, module: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        step = _Step(module, args, kwargs)
        self._steps.append(step)
        return step.outputs

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward. Then add the gradients that calls of `pm.step` in `training_step` have computed."""
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        steps, self._steps = self._steps, []
        for step in steps:
            step.add_gradients()
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager in which gradients accumulate without being reduced.

        If parameters are sharded over data ranks, or if `pm.step` computes the gradients, they are reduced as usual.
        `_Step` stores the gradients of earlier batches separately, so that they are not reduced again.
        """
        with ExitStack() as stack:
            for module in self.partitioned if not self._calls_step else ():
                if sharded_error(module._traced("no_sync()")) is None:
                    stack.enter_context(module.no_sync())
            yield

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty state dict, because `save_checkpoint` writes the shards of every rank."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, which can be loaded on another mesh. Every rank must call it."""
        folder = Path(self.broadcast(filepath))
        optimizers = self.optimizers if checkpoint.get("optimizer_states") else []
        save_sharded(self.lightning_module, optimizers, folder / STATE)
        if self.is_global_zero:
            torch.save({**checkpoint, "saved_optimizers": bool(optimizers)}, folder / REST)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint that `save_checkpoint` wrote on any mesh."""
        folder = Path(self.broadcast(checkpoint_path))
        if not (folder / STATE).is_dir():
            raise UsageError(
                f"{folder} is not a checkpoint of a partitioned model", why=f"it has no folder {STATE}",
                hint="load its weights into the LightningModule before fit(): load_from_checkpoint(path)",
            )  # fmt: skip
        rest = torch.load(folder / REST, weights_only=bool(weights_only), map_location="cpu")
        load_sharded(self.lightning_module, self.optimizers if rest["saved_optimizers"] else [], folder / STATE)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the shards."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded the shards."""


class LightningMetrics(Callback):
    """Callback that logs `pm.metrics()` every `log_every_n_steps` steps, under names like `autopart/mfu`."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics of the first partitioned model."""
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            module = next((one for one in pl_module.modules() if isinstance(one, ParallelModule)), None)
            metrics = {} if module is None else module.metrics()
            pl_module.log_dict({f"autopart/{name}": float(value) for name, value in metrics.items()})


class _Step:
    """A call of `pm.step` in the hook `training_step`. It stores its gradients until `add_gradients`.

    `.grad` cannot store them, because Lightning zeroes it between `training_step` and `backward`. `outputs` require
    gradients, so that Lightning's backward computes the derivative of the user's loss by the model's loss.
    """

    def __init__(self, module: ParallelModule, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        earlier = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        loss, outputs = module.step(*args, outputs=True, **kwargs)
        self.gradients = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, earlier, strict=True):
            parameter.grad = gradient
        self.leaves: list[Tensor] = []
        self.outputs = tree_map(self._leaf, outputs)
        self.loss = next((leaf for leaf in self.leaves if leaf.dim() == 0 and torch.equal(leaf, loss)), None)

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1]

    def add_gradients(self) -> None:
        """Add the stored gradients to `.grad`, times the derivative of the user's loss by the model's loss."""
        if any(leaf.grad is not None for leaf in self.leaves if leaf is not self.loss) or self.loss is None:
            raise UsageError(
                "the loss is computed from outputs of a model on a pipeline",
                why="step() has run the backward of the model's own loss only",
                hint="let the model's forward return the loss, or use a mesh without pp",
            )
        if self.loss.grad is None:
            return
        scale = float(self.loss.grad)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None:
                gradient = gradient if scale == 1.0 else gradient * scale
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _Called(Exception):
    """Exception that stops a run at the first call of a submodule. It contains the call's arguments."""

    def __init__(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.call = (name, args, kwargs)


class _Example:
    """A trial call of the LightningModule, which records the inputs of its submodules."""

    def __init__(self, trainer: Any, strategy: AutopartStrategy) -> None:
        self.trainer, self.strategy, self.module = trainer, strategy, strategy.lightning_module
        self.given = self.module.example_input_array
        fn = trainer.state.fn
        loops = {TrainerFn.FITTING: trainer.fit_loop, TrainerFn.VALIDATING: trainer.validate_loop,
                 TrainerFn.TESTING: trainer.test_loop, TrainerFn.PREDICTING: trainer.predict_loop}  # fmt: skip
        names = {TrainerFn.FITTING: "training_step", TrainerFn.VALIDATING: "validation_step",
                 TrainerFn.TESTING: "test_step", TrainerFn.PREDICTING: "predict_step"}  # fmt: skip
        self.loop, self.step = loops[fn], names[fn]

    def first_call(self, names: set[str]) -> tuple[str, tuple, Mapping[str, Any]]:
        """Return (name of the submodule, args, kwargs) of the first call of one of these submodules.

        The run stops there: the submodule's forward is not executed.
        """
        flags = {parameter: parameter.requires_grad for parameter in self.module.parameters()}
        hooks = []
        for name in names:
            hook = functools.partial(_stop, name)
            hooks.append(self.module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        source = "forward(example_input_array)" if self.given is not None else self.step
        try:
            with torch.no_grad():
                self._run()
        except _Called as called:
            return called.call
        except Exception as error:
            raise UsageError(
                f"{source} fails before it calls a submodule that is to be partitioned",
                why=f"{type(error).__name__}: {error}",
                hint="set self.example_input_array to an input of forward(), which calls the submodules",
            ) from error
        finally:
            for handle in hooks:
                handle.remove()
            for parameter, flag in flags.items():  # the run may have stopped after `toggle_optimizer`
                parameter.requires_grad_(flag)
        raise UsageError(
            f"{source} does not call {', '.join(sorted(names))}",
            why="AutopartStrategy traces a submodule at its first call",
            hint="AutopartStrategy(mesh, modules=('model',)) with the names of the submodules that are called",
        )

    def _run(self) -> None:
        if self.given is not None:
            array = self.strategy.batch_to_device(self.trainer.precision_plugin.convert_input(self.given))
            _call(self.module, array)
            return
        step = getattr(self.module, self.step)
        required = [one for one in inspect.signature(step).parameters.values()
                    if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]  # fmt: skip
        with self._without_logging():
            step(self.batch, *[0] * (len(required) - 1))

    @functools.cached_property
    def batch(self) -> Any:
        """The first batch of the data loaders. The iterators of the training loop do not advance."""
        loaders = self.loop._data_source.dataloader()
        if not isinstance(loaders, CombinedLoader):
            loaders = CombinedLoader(loaders, "max_size_cycle" if self.step == "training_step" else "sequential")
        owners = [*loaders.flattened, *(getattr(loader, "sampler", None) for loader in loaders.flattened)]
        generators = [one.generator for one in owners if isinstance(getattr(one, "generator", None), torch.Generator)]
        states = [generator.get_state() for generator in generators]
        batch, _, _ = next(iter(CombinedLoader(loaders.iterables, loaders._mode)))
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.strategy.batch_to_device(batch)

    @contextmanager
    def _without_logging(self) -> Iterator[None]:
        """Context manager that replaces methods of the LightningModule that need a running loop or optimizers."""
        module: Any = self.module
        replaced: dict[str, Any] = dict.fromkeys(("log", "log_dict", "manual_backward"), _ignore)
        if not module.automatic_optimization:
            replaced["optimizers"] = functools.cache(self._unused_optimizers)
        module.__dict__.update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                del module.__dict__[name]

    def _unused_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the user's optimizers, created for the parameters before partitioning. They take no steps."""
        self.strategy.setup_optimizers(self.trainer)
        optimizers = self.strategy.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers


def _stop(name: str, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    raise _Called(name, args, kwargs)


def _call(module: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        module(**inputs)
    else:
        module(*(inputs if isinstance(inputs, tuple) else (inputs,)))


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of `self.log`."""


def _never() -> bool:
    return False

"""Public functions: partition a model, plan without running, and verify a training loop.

`parallelize` traces the model, chooses a plan, writes one program per stage and returns the module that runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist
from torch import nn

from autopart.common.hub import Pretrained, pretrained_folder
from autopart.errors import InputError, MeshError, OptionError
from autopart.integrations import connect_imported_libraries
from autopart.ir.mesh import Mesh
from autopart.ir.run.mixed_precision import Precision
from autopart.options import (
    OPTIONS,
    TOLERANCE,
    Options,
    PlanOptions,
    RunOptions,
    SearchOptions,
    read_options,
    with_options,
)
from autopart.plans.plan import Plan
from autopart.proof.training_loop.verify_loop import LoopVerification, prove
from autopart.recipe.compiler import Compiler
from autopart.recipe.make_plan import can_be_folded, make_plan, prepare
from autopart.recipe.pretrained_model import meta_model
from autopart.recipe.sizes.example_lengths import ExampleLengths, read_lengths
from autopart.runtime.module import ParallelModule
from autopart.runtime.training.layers import LayerProxy
from autopart.runtime.training.module_methods import partitioned_in
from autopart.runtime.weights.load_weights import Weights
from autopart.tracing.trace_model import bind_call
from autopart.tuning.advice import advised
from autopart.tuning.search import search

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@with_options(RunOptions)
def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int | None = None,
    *,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    **options: Unpack[RunOptions],
) -> ParallelModule:
    """Partition an unmodified model over a device mesh.

    Every rank makes the same call with the same weights. Without an example, the model is traced at the first call.

    Args:
        model: any traceable module with its weights, or on `meta` with `weights=`.
        mesh: `{"dp": 2, "tp": 2}`, `"dp2,tp2"`, a DeviceMesh with named dims, or a number of devices (then
            `autopart.search` chooses the axes).  [default: the mesh of `plan`, or the number of processes]
        example_args, example_kwargs: one call of the model. Its batch is the global batch; with `local_batch`, the
            samples of one data rank.
        plan: a Plan, or the path of one, to use instead of choosing a plan.
        **options: `RunOptions`.
    Returns a ParallelModule: call it like the model, or train with `pm.step(**batch)`.
    Raises a subclass of AutopartError (`autopart.errors`) that states what is wrong, why, where, and what to try.

    Example (under `torchrun --nproc-per-node 4`):
        >>> loss = autopart.parallelize(model, "pp2,tp2", example_kwargs=batch).step(**batch)    # doctest: +SKIP
    """
    _check_model(model)
    asked = read_options(parallelize, options)
    chosen = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if mesh is None:
        mesh = _number_of_processes() if chosen is None else chosen.mesh_object()
    if type(mesh) is int and chosen is None:
        chosen, asked = _searched(model, mesh, example_args, example_kwargs, asked)
    sizes = Mesh.parse(chosen.mesh_object() if type(mesh) is int and chosen is not None else mesh)
    weights = None if asked.weights is None else Weights(model, asked.weights)
    full_model = model if weights is None else weights.model
    compiler = Compiler(full_model, sizes, replace(asked, weights=None), chosen)  # ranks compare these options
    if (example_args or example_kwargs is not None) and (weights is None or weights.problem is None):
        compiler.trace_example(example_args, example_kwargs or {})  # trace; make or read the plan
    # Shard the weights, bind mesh axes to process groups. Each new call is traced and its program is written.
    return _module(full_model, mesh, sizes, compiler, weights)


@with_options(RunOptions)
def from_pretrained(
    name_or_folder: str | Path,
    mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int | None = None,
    *,
    task: str | type | None = None,
    dtype: Any = None,
    revision: str | None = None,
    config: Mapping[str, Any] | None = None,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    **options: Unpack[RunOptions],
) -> ParallelModule:
    """Partition a pretrained model of transformers. Each rank reads only its shards of the weights.

    As `from_pretrained` of transformers, it returns the model in eval mode: call `pm.train()` before training.
    Parameters that the files lack, such as a new classification head, are initialised from torch's random state, which
    must be equal on every rank.

    Args:
        name_or_folder: a folder with `config.json` and safetensors files, or a name on the Hugging Face hub. Files of
            the hub come from its local cache or from the network.
        mesh, example_args, example_kwargs, plan: as in `parallelize`.
        task: a task such as "causal-lm" or "sequence-classification", or a class of transformers.  [default: the class
            that the config names]
        dtype: dtype of the parameters.  [default: the dtype in the config]
        revision: branch, tag or commit on the hub.
        config: changes to the config, such as {"num_labels": 3}.
        **options: `RunOptions`.
    Raises CheckpointError if the files cannot be read or do not fit, and the errors of `parallelize`.

    Example (under `torchrun --nproc-per-node 4`):
        >>> pm = autopart.from_pretrained("openai-community/gpt2", "dp2,tp2")    # doctest: +SKIP
    """
    if options.get("weights") is not None:
        raise OptionError("from_pretrained() has no option weights=", why="the weights are those of the folder",
                          hint="parallelize(model, mesh, weights=...)")  # fmt: skip
    folder = pretrained_folder(name_or_folder, revision=revision)
    model = meta_model(folder, task, dtype, dict(config or {}))
    given: Any = {**options, "weights": Pretrained(folder)}
    return parallelize(model, mesh, example_args=example_args, example_kwargs=example_kwargs, plan=plan, **given)


@with_options(PlanOptions)
def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int,
    *,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    lengths: Iterable[int] | str | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Choose a plan without running anything: no process group, no GPU, and the model can be on `meta`.

    Args:
        model, mesh, example_args, example_kwargs: as in `parallelize`. An example is required.
        lengths: sequence lengths of later calls, such as range(16, 513). The plan and its predicted time and memory
            are for the longest; `plan.cost.at(s=...)` predicts other lengths.
        **options: `PlanOptions`.
    Raises the errors of `parallelize`.

    Example:
        >>> with torch.device("meta"):                                       # doctest: +SKIP
        ...     model = LlamaForCausalLM(config)
        >>> print(autopart.plan(model, "dp8,tp8", example_kwargs=batch).explain())    # doctest: +SKIP
    """
    _check_model(model)
    asked = read_options(plan, options)
    if not example_args and example_kwargs is None:
        raise InputError("plan() needs an example call", why="the model is traced on it",
                         hint="plan(model, mesh, example_kwargs={'input_ids': ids, 'labels': labels})")  # fmt: skip
    if (longest := max(read_lengths(lengths), default=None)) is not None:
        example = ExampleLengths(bind_call(model, example_args, example_kwargs or {}), asked.sequence_dims)
        example_args, example_kwargs = example.at((example_args, dict(example_kwargs or {})), longest)
    if type(mesh) is int:
        return _searched(model, mesh, example_args, example_kwargs, asked)[0]
    sizes = Mesh.parse(mesh)
    precision = Precision.parse(asked.precision, asked.reduce_dtype)
    call = bind_call(model, example_args, example_kwargs or {})
    # Trace the model, normalize its operators, and annotate each with its sharding rule.
    traced = prepare(model, call, precision=precision, fold=can_be_folded(sizes, asked))
    # Choose layouts, stages and storage; write the program; count its time and memory.
    chosen = make_plan(model, traced, sizes, asked)
    return advised(chosen, asked)


@with_options(RunOptions)
def verify_loop(
    fn: Callable[[Any, Any], Any],
    mesh: Mesh | Mapping[str, int] | str,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    tolerance: float = TOLERANCE,
    time_limit_s: float = 600.0,
    **options: Unpack[RunOptions],
) -> LoopVerification:
    """Prove that a training function trains the partitioned model as it trains the original model.

    The model runs in one process; the partitioned model runs on every rank. All runs are in float64 on the CPU, in
    forked processes with one seed. The comparison covers each loss (of `backward()` and `step`), all gradients before
    and all weights after each optimizer step, the final weights, and the function's return value. The result names the
    first value that differs with its step, rank and line. Use a small model and few batches: gradients and weights of
    every step are stored on disk.

    Args:
        fn: `fn(model, batches)` trains. In one process, `model` is the model itself, extended by `step`,
            `clip_grad_norm_`, `no_sync`, `full_state_dict`, `full_grads` and `data_rank` of a ParallelModule.
        mesh, model, plan: as in `parallelize`. The axes of the mesh must be named.
        batches: passed to `fn` as a list; floating-point tensors become float64.
        example_args, example_kwargs: one call of the model, as in `parallelize`.  [default: the first batch; if it is a
            dict, its entries that the model accepts]
        tolerance: largest difference, relative to the largest value.
        time_limit_s: time limit of one run, in seconds.
        **options: `RunOptions`.
    Returns a LoopVerification: `.ok`, `.max_error`, `.first_mismatch`, and a text.
    Raises the error that autopart raises on a rank; InputError if `fn` fails in one process or trains nothing.

    Example:
        >>> result = autopart.verify_loop(train, "dp2,tp2", model, batches)    # doctest: +SKIP
        >>> assert result.ok, result                                           # doctest: +SKIP
    """
    read_options(verify_loop, options)
    sizes = Mesh.parse(mesh)
    example = {"example_args": example_args, "example_kwargs": example_kwargs}
    given = {name: value for name, value in example.items() if value}
    asked = {"rng": "exact", **options, **({} if plan is None else {"plan": plan})}
    return prove(fn, sizes, model, batches, parallelize, given, asked, tolerance, time_limit_s)


def _number_of_processes() -> int:
    """Return the number of processes of the launcher. Raises MeshError if there is none."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" not in os.environ:
        raise MeshError("no mesh is given", why="without one, autopart searches a mesh for all processes of torchrun",
                        hint="torchrun --nproc-per-node 4 script.py, or mesh='dp2,tp2'")  # fmt: skip
    return int(os.environ["WORLD_SIZE"])


def _check_model(model: Any) -> None:
    """Raise InputError for a model that is partitioned or wrapped already."""
    if not isinstance(model, nn.Module):
        return  # the trace will raise the error
    kind = type(model).__name__
    if isinstance(model, ParallelModule):
        raise InputError(
            "the model is partitioned already", why="it is a result of parallelize(), not a model",
            hint="pass the original model; the plan of the partitioned model is pm.plan",
        )  # fmt: skip
    if isinstance(model, LayerProxy):
        raise InputError(
            "this is a layer of a partitioned model",
            why="it holds this rank's shards of parameters, and cannot be run alone",
            hint="pass the original model's layer",
        )
    inside = partitioned_in(model)
    if inside is not None:
        raise InputError(
            f"the submodule '{inside}' of the model is partitioned already",
            why="a partitioned model cannot contain another partitioned model",
            hint="parallelize the outer model with the original submodule",
        )
    wrappers = {"DistributedDataParallel": "module", "DataParallel": "module", "FullyShardedDataParallel": "module",
                "OptimizedModule": "_orig_mod"}  # fmt: skip
    if kind in wrappers and hasattr(model, wrappers[kind]):
        raise InputError(f"the model is wrapped in {kind}", why="autopart partitions the model itself",
                         hint=f"parallelize(model.{wrappers[kind]}, ...)")  # fmt: skip
    if any(base.__name__ == "FSDPModule" for base in type(model).__mro__):
        raise InputError(
            "fully_shard() was applied to the model", why="its parameters are shards already",
            hint="parallelize the model without it: zero=3 shards parameters in the same way",
        )  # fmt: skip


def _module(
    model: nn.Module, mesh: Any, sizes: Mesh, compiler: Compiler, weights: Weights | None
) -> ParallelModule:  # fmt: skip
    """Return the module that runs the programs. It uses the user's DeviceMesh if one was passed."""
    name, compiled = compiler.options.schedule, compiler.options.compile
    if compiler.has_plan:
        name, compiled = compiler.plan.schedule.name, compiler.plan.compile
    device_mesh = mesh if hasattr(mesh, "mesh_dim_names") else None
    options = compiler.options
    module = ParallelModule(
        compiler.source, sizes, compiler, schedule=name, device_mesh=device_mesh, compile=compiled,
        timeout=options.timeout, check_replicas=options.check_replicas, local_batch=options.local_batch,
        weights=weights, scales_loss=compiler.scales_loss,
    )  # fmt: skip
    compiler.reseed(module.initial_seed)
    connect_imported_libraries()
    return module


def _searched(
    model: nn.Module, devices: int, example_args: tuple, example_kwargs: Mapping[str, Any] | None, options: Options
) -> tuple[Plan, Options]:
    """Search over meshes. Return the best plan, and the options that only `RunOptions` has."""
    if not example_args and example_kwargs is None:
        raise InputError(
            f"mesh={devices} needs an example call",
            why="the search traces the model on it to choose the axes",
            hint="example_kwargs={'input_ids': ids, 'labels': labels}",
        )
    kept = {name: getattr(options, name) for name in OPTIONS if name not in PlanOptions.__annotations__}
    asked = [name for name in PlanOptions.__annotations__ if name not in SearchOptions.__annotations__
             and getattr(options, name) != OPTIONS[name].default]  # fmt: skip
    if options.local_batch:
        raise OptionError(
            f"local_batch=True cannot be combined with mesh={devices}",
            why="the search chooses over how many ranks the batch is split",
            hint="name the axes, for example mesh='dp2,tp4'",
        )
    if asked:
        raise OptionError(
            f"{asked[0]}= cannot be combined with mesh={devices}",
            why="the search chooses this option together with the mesh axes",
            hint="name the axes, for example mesh='dp2,tp4'",
        )
    example = bind_call(model, example_args, example_kwargs or {})
    (best, *_) = search(
        model, devices, hardware=options.hardware, memory=options.memory, precision=options.precision,
        reduce_dtype=options.reduce_dtype, balance=options.balance, sequence_dims=options.sequence_dims,
        optimizer=options.optimizer, example_kwargs=example,
    )  # fmt: skip
    return best, Options(**kept)

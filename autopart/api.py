"""The public functions. `parallelize` is the whole recipe: trace, plan, write programs, run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from autopart.compiler import Compiler, make_plan, prepare
from autopart.errors import InputError, OptionError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Rng
from autopart.ir.recomputation import Recompute
from autopart.options import Options, read_options
from autopart.passes.choose.shard import SequenceParallel
from autopart.plans.pins import Pins
from autopart.plans.plan import Plan
from autopart.runtime.module import ParallelModule
from autopart.tracing.trace import bind_call
from autopart.tuning.advice import advised
from autopart.tuning.search import search

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int,
    *,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    virtual_stages: int | None = None,
    sequence_parallel: SequenceParallel = "auto",
    hardware: str | None = None,
    pins: Pins | Mapping[str, Any] | str | Path | None = None,
    zero: int | None = None,
    memory: int | str | None = None,
    recompute: Recompute | None = None, compile: bool | None = None, rng: Rng = "fast",
    timeout: float | None = None, check_replicas: int | bool | None = None, **unknown: Any,
) -> ParallelModule:  # fmt: skip
    """Partition an unmodified model over a device mesh.

    The same call on every rank, with the same weights. Without an example the model is traced at the first call.

    Args:
        model: any traceable module with its weights.
        mesh: `{"dp": 2, "tp": 2}`, `"dp2,tp2"`, a DeviceMesh with named dims, or how many devices (`autopart.search`).
        example_args, example_kwargs: one call of the model; its batch is the global batch.
        plan: a Plan or the path of one; then nothing is chosen.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev" or "looped_bfs".
        microbatches, virtual_stages: parts that a step cuts a rank's rows into; pipeline stages per rank.
        sequence_parallel: whether what lies between matrix products is cut along the sequence; "auto": where faster.
        hardware: the profile that prices choices, a name or a path.
        pins: what is fixed first, or a JSON file of it: `{"h.*.up.weight": {"tp": "S(0)"}}`; see `autopart.plans.pins`.
        zero: 3: a rank of `dp` stores its part of every matrix, gathered where it is read (ZeRO-3, FSDP); 0: all of it.
        memory: what a rank has, "80GB", "24GiB" or bytes: `sequence_parallel` and `zero` are then chosen to fit.
        recompute: run again: "none", "selective" (the core of attention), "full" (blocks); by block `{"h.0": "full"}`.
        compile: each stage's graph is run through `torch.compile`; chains of pointwise operators are one kernel then.
        rng: "fast": each rank draws the masks of dropout of what it holds. "exact": all random numbers are those of one
            device after the same `torch.manual_seed`, which every rank must call; it draws whole masks.
        timeout: seconds (120; first calls ten times that) to wait for other ranks; then all say who waits for whom.
        check_replicas: every n steps copies of parameters are compared (False: never; default: 1, 2, 4, 8, each 100th).
    Returns a ParallelModule: call it like the model, or train with `pm.step(**batch)`.
    Raises AutopartError: one of its kinds in `autopart.errors`, each with what, why, where and what to try.

    Example (under `torchrun --nproc-per-node 4`):
        >>> loss = autopart.parallelize(model, "pp2,tp2", example_kwargs=batch).step(**batch)    # doctest: +SKIP
    """
    options = read_options(
        unknown, schedule=schedule, microbatches=microbatches, virtual_stages=virtual_stages, hardware=hardware,
        rng=rng, sequence_parallel=sequence_parallel, pins=pins, zero=zero, memory=memory, recompute=recompute,
        compile=compile, timeout=timeout, check_replicas=check_replicas,
    )  # fmt: skip
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if type(mesh) is int and given is None:
        given, options = _searched(model, mesh, example_args, example_kwargs, options)
    sizes = Mesh.parse(given.mesh_object() if type(mesh) is int and given is not None else mesh)
    compiler = Compiler(model, sizes, options, given)
    if example_args or example_kwargs:
        compiler.trace_example(example_args, example_kwargs or {})
    return _module(model, mesh, sizes, compiler)


def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int,
    *,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    virtual_stages: int | None = None,
    sequence_parallel: SequenceParallel = "auto",
    hardware: str | None = None,
    pins: Pins | Mapping[str, Any] | str | Path | None = None,
    zero: int | None = None,
    memory: int | str | None = None,
    recompute: Recompute | None = None,
    compile: bool | None = None,
    **unknown: Any,
) -> Plan:
    """Choose a plan without running anything: no process group, no GPU, the model may be on `meta`.

    Arguments and errors as `parallelize`.

    Example:
        >>> with torch.device("meta"):                                       # doctest: +SKIP
        ...     model = LlamaForCausalLM(config)
        >>> print(autopart.plan(model, "dp8,tp8", example_kwargs=batch).explain())    # doctest: +SKIP
    """
    options = read_options(
        unknown, schedule=schedule, microbatches=microbatches, virtual_stages=virtual_stages, hardware=hardware,
        sequence_parallel=sequence_parallel, pins=pins, zero=zero, memory=memory, recompute=recompute, compile=compile,
    )  # fmt: skip
    if not example_args and not example_kwargs:
        raise InputError("plan() needs an example call", why="the model is traced on it",
                         hint="plan(model, mesh, example_kwargs={'input_ids': ids, 'labels': labels})")  # fmt: skip
    if type(mesh) is int:
        return _searched(model, mesh, example_args, example_kwargs, options)[0]
    sizes = Mesh.parse(mesh)
    traced = prepare(model, bind_call(model, example_args, example_kwargs or {}))
    return advised(make_plan(model, traced, sizes, options), traced, options)


def _module(model: nn.Module, mesh: Any, sizes: Mesh, compiler: Compiler) -> ParallelModule:
    """The module that runs what the compiler makes, on the user's own DeviceMesh where there is one."""
    name, compiled = compiler.options.schedule, compiler.options.compile
    if compiler.has_plan:
        name, compiled = compiler.plan.schedule.name, compiler.plan.compile
    device_mesh = mesh if hasattr(mesh, "mesh_dim_names") else None
    options = compiler.options
    module = ParallelModule(compiler.source, sizes, compiler, schedule=name, device_mesh=device_mesh, compile=compiled,
                            timeout=options.timeout, check_replicas=options.check_replicas)  # fmt: skip
    module.train(model.training)
    compiler.reseed(module.initial_seed)
    return module


def _searched(
    model: nn.Module, devices: int, example_args: tuple, example_kwargs: Mapping[str, Any] | None, options: Options
) -> tuple[Plan, Options]:
    """The best plan for a number of devices, and the options that are not the plan's."""
    if not example_args and not example_kwargs:
        raise InputError(f"mesh={devices} needs an example call", why="the axes are chosen for what it computes",
                         hint="example_kwargs={'input_ids': ids, 'labels': labels}")  # fmt: skip
    kept = {name: getattr(options, name) for name in ("rng", "timeout", "check_replicas")}
    asked = [f.name for f in fields(Options) if f.name not in ("hardware", "memory", *kept)
             and getattr(options, f.name) != f.default]  # fmt: skip
    if asked:
        raise OptionError(f"{asked[0]}= with mesh={devices}", why="the search chooses it with the axes",
                          hint="name the axes, for example mesh='dp2,tp4'")  # fmt: skip
    example = bind_call(model, example_args, example_kwargs or {})
    (best, *_) = search(
        model, devices, hardware=options.hardware, memory=options.memory, example_kwargs=example, count=1
    )  # fmt: skip
    return best, Options(**kept)

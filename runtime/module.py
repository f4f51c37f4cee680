"""`ParallelModule`: the partitioned model as one `nn.Module`, called the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autopart.calls import MAX_CALLS, Recent, format_call
from autopart.compat import tree_unflatten
from autopart.errors import StageError, TraceError
from autopart.mesh import Mesh
from autopart.program import Program
from autopart.runtime.executable import Executable
from autopart.runtime.placement import placement_of, stages_at
from autopart.runtime.processes import check_agreement, check_values, connect, first_ranks_seed
from autopart.runtime.sharing import Originals, part_of_another, remember
from autopart.runtime.state import gather, names_with_gradient, settled, shard_parameters

Purpose = Literal["forward", "step"]


class Compiler(Protocol):
    """What makes programs for a ParallelModule. It traces where needed and returns the same Program for equal calls."""

    @property
    def plan(self) -> Any:
        """The plan that the programs follow."""

    def program(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        purpose: Purpose,
        training: bool,
        loss_fn: Callable[..., Tensor] | None = None,
        target: Any = None,
    ) -> tuple[Program, tuple[Tensor, ...]]:
        """The program for a call, and the call's tensors in `input_names` order. Raises errors for a bad call."""

    def ready(self) -> Program | None:
        """A program that was traced when the module was made, if any."""


class ParallelModule(nn.Module):
    """A model partitioned over a device mesh.

    Every rank makes it from the same model and calls it with the same global batch. Parameters have the model's own
    names and hold this rank's shards; `full_state_dict` and `full_grads` put them together.

    Example (the same on every rank, under torchrun):
        pm = autopart.parallelize(model, "dp2,tp2", example_kwargs=batch)
        optimizer = torch.optim.AdamW(pm.parameters())
        loss = pm.step(**batch)
        optimizer.step()

    Raises RuntimeSetupError at construction where the processes do not fit the mesh, TraceError where parameters are
    asked for before the model is traced.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        compiler: Compiler,
        *,
        schedule: str | None = None,
        device_mesh: DeviceMesh | None = None,
        compile: bool = False,
    ):
        super().__init__()
        self._process = connect(mesh, _device_of(model), device_mesh)
        self._compiler = compiler
        self._schedule, self._compile = schedule, compile
        self._source = _Source(model)
        self._originals = Originals()
        self._executables: Recent[Executable] = Recent(2 * MAX_CALLS)  # a call and a training step of each
        self._program: Program | None = None
        self._local_parameters: dict[str, nn.Parameter] = {}
        self._local_buffers: dict[str, Tensor] = {}
        self._copies: dict[int, Tensor] = {}  # by the id of the model's buffer: one that has two names stays one
        program = compiler.ready()
        if program is not None:
            self._adopt(program)

    @property
    def plan(self) -> Any:
        """The plan that is run."""
        return self._compiler.plan

    @property
    def mesh(self) -> Mesh:
        return self._process.mesh

    @property
    def initial_seed(self) -> int:
        """The first rank's random seed (`torch.initial_seed()`), on every rank. A collective call."""
        return first_ranks_seed(self._process)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._process.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, for the global batch, on every rank.

        Without a pipeline axis it is differentiable: after `loss.backward()` this rank's gradients are complete, those
        of inputs that need one too, so it can stand for a module inside a larger model.
        With one it runs without gradients; use `step` to train.
        """
        self._originals.warn_of_changes()
        program, inputs = self._compiler.program(args, kwargs, purpose="forward", training=self.training)
        return tree_unflatten(self._executable(program, inputs, "forward").forward(inputs), program.output_spec)

    def step(
        self, *args: Any, loss_fn: Callable[..., Tensor] | None = None, target: Any = None, **kwargs: Any
    ) -> Tensor:
        """Forward and backward of one global batch through the schedule.

        Adds complete gradients to `.grad` of this rank's parameters and returns the loss of the global batch, a
        detached scalar, on every rank. `loss_fn(outputs, target)` is for a model that returns no loss; it is traced
        with the model. A batch of another shape is traced when it first comes.
        """
        self._originals.warn_of_changes()
        if loss_fn is None and target is not None:  # an input of the model that has this name
            kwargs, target = {**kwargs, "target": target}, None
        program, inputs = self._compiler.program(
            args, kwargs, purpose="step", training=self.training, loss_fn=loss_fn, target=target
        )
        return self._executable(program, inputs, "step").step(inputs)

    def graph(self, stage: int | None = None) -> fx.GraphModule:
        """The graph of a stage (None: this rank's first), with axis names in its collectives."""
        program = self._traced("graph")
        if stage is None:
            stage = self._stages(program)[0]
        if not 0 <= stage < len(program.stages):
            count = f"{len(program.stages)} stage{'s' * (len(program.stages) > 1)}"
            hint = "graph(0)" if len(program.stages) == 1 else f"graph(0) to graph({len(program.stages) - 1})"
            raise StageError(f"there is no stage {stage}", why=f"the program has {count}", hint=hint)
        return program.stages[stage].graph

    def report(self, path: str | Path) -> None:
        """Write one page of HTML (`Plan.report`) with the graphs of this rank's stages. A path for each rank."""
        program = self._traced("report")
        graphs = {f"Graph of stage {stage}": program.stages[stage].graph for stage in self._stages(program)}
        self.plan.report(path, graphs)

    def full_state_dict(self) -> dict[str, Any]:
        """{name: full tensor} as the model's own `state_dict`, on every rank. A collective call."""
        program = self._traced("full_state_dict")
        placement = placement_of(self._schedule)
        gathered = gather(self._local_parameters, program, self._process, placement, list(program.parameters))
        stored_name = _stored_names(program)
        result: dict[str, Any] = {}
        for name, value in self._source.model.state_dict().items():
            if name in stored_name:
                result[name] = gathered[stored_name[name]]
            elif isinstance(value, Tensor):
                result[name] = self._local_buffers.get(name, value).detach().to(self.device, copy=True)
            else:
                result[name] = value
        return result

    def full_grads(self) -> dict[str, Tensor]:
        """{name: full gradient} for the model's `named_parameters` that have one, on every rank. A collective call."""
        program = self._traced("full_grads")
        placement = placement_of(self._schedule)
        present = names_with_gradient(self._local_parameters, program, self._process, placement)
        grads = {name: p.grad for name, p in self._local_parameters.items() if p.grad is not None}
        gathered = gather(grads, program, self._process, placement, present)
        stored_name = _stored_names(program)
        names = [name for name, _ in self._source.model.named_parameters()]
        return {name: gathered[stored_name[name]] for name in names if stored_name.get(name) in gathered}

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._traced("parameters()")  # what a module around this one asks for them by
        return super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._traced("parameters()")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        self._traced("buffers()")
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards by their names; `full_state_dict` has the full tensors."""
        self._traced("state_dict()")
        return super().state_dict(*args, **kwargs)

    def _traced(self, asked: str) -> Program:
        if self._program is None:
            raise TraceError(
                f"{asked} is not known yet",
                why="the model is traced at the first call, and its parameters are partitioned then",
                hint="parallelize(model, mesh, example_kwargs=batch), or call the module once before",
            )
        return self._program

    def _stages(self, program: Program) -> list[int]:
        """The stages of this rank."""
        return stages_at(program, self._process.pp, placement_of(self._schedule))

    def _executable(self, program: Program, inputs: Sequence[Tensor], purpose: Purpose) -> Executable:
        mode = "train" if self.training else "eval"
        check_agreement(self._process, f"{purpose}({format_call(program.input_names, inputs)}) in {mode} mode")

        def make() -> Executable:
            check_values(self._process, program.input_names, inputs)
            adopted = self._adopt(program)
            return Executable(
                adopted, self._process, self._local_parameters, self._local_buffers, self._schedule, self._compile
            )

        return self._executables.get(program, make)

    def _adopt(self, program: Program) -> Program:
        """The program with every parameter where earlier programs have it. Registers what this rank's stages read and
        no earlier program did; a rank whose stages read no parameter (of a tiny model) holds an empty one."""
        model = self._source.model
        if self._program is not None:
            program = replace(program, parameters=settled(program.parameters, self._program.parameters))
        stages = self._stages(program)
        parameters = shard_parameters(
            model, program, self._process.coordinates, stages=stages, device=self._process.device
        )
        for name, parameter in parameters.items():
            if name not in self._local_parameters:
                full, stored = model.get_parameter(name), program.parameters[name]
                mesh = str(program.mesh)
                shared = part_of_another(model, name, full, mesh, stored.layout)
                parameter = parameter if shared is None else shared
                remember(model, full, parameter, mesh, stored.layout)
                self._originals.add(name, full)
                self._local_parameters[name] = parameter
                for alias in (name, *program.parameters[name].aliases):
                    holder, last = _holder(self, alias)
                    holder.register_parameter(last, parameter)
        if not self._local_parameters:  # so that every rank can make an optimizer
            self.register_parameter("no_parameters_here", nn.Parameter(torch.empty(0, device=self._process.device)))
        persistent = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name not in self._local_buffers and not buffer.is_meta:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer.detach().to(self._process.device, copy=True)
                local = self._copies[id(buffer)]
                self._local_buffers[name] = local
                holder, last = _holder(self, name)
                holder.register_buffer(last, local, persistent=name in persistent)
        self._program = program
        return program


class _Source:
    """The user's model, out of sight of `nn.Module`'s own bookkeeping."""

    def __init__(self, model: nn.Module):
        self.model = model


class _Branch(nn.Module):
    """A node of the tree that gives the local tensors their dotted names."""


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds `name` below `root`, made where it is missing, and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        # By the dict: a part may have the name of one of ParallelModule's own attributes.
        if part not in root._modules:
            root._modules[part] = _Branch()
        child = root._modules[part]
        assert child is not None
        root = child
    return root, last


def _stored_names(program: Program) -> dict[str, str]:
    """{any name of a parameter: the name it is stored under}."""
    return {alias: name for name, stored in program.parameters.items() for alias in (name, *stored.aliases)}


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")

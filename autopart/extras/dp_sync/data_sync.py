"""Data-parallel synchronisation of one module: runs its `dp_sync` methods and stores their state.

With `zero=1`, a method still gets full gradients, and each rank keeps its shard of the result. The state and random
numbers of a method are therefore the same with and without ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import at_end_of_backward
from autopart.errors import UsageError
from autopart.extras.dp_sync.ddp_hooks import Hook, check_hook, check_hookable, in_group, run_hook
from autopart.extras.dp_sync.gradient_methods import MethodSeeds, State, servers, summed, synchronised
from autopart.extras.dp_sync.model_averaging import after_step, before_step, means
from autopart.extras.dp_sync.sync_checkpoint import load_state, state_of
from autopart.extras.dp_sync.sync_options import HOOK, DpSync, Method
from autopart.extras.dp_sync.transports import GroupTransport
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.run.buckets import bucket_by_kind
from autopart.ir.sharding import DimSharding
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.gradient_sync import GradientSync
from autopart.runtime.gradients.step_reduction import accumulate_earlier, gradient_of
from autopart.runtime.shards.shard_state import splits_of


class DataSync(GradientSync):
    """Data-parallel synchronisation of one module on this rank, by `dp_sync` methods.

    Attributes:
        steps: number of gradient synchronisations so far.
        updates: number of steps of the attached optimizer so far.
        state: state of the methods, such as compression errors.
        stored: {name: this rank's parameter}.
        parameters: {name: parameter whose `.grad` is the full gradient}. For a sharded parameter, this is an unsharded
            placeholder whose storage is freed. All other parameters are as in `stored`.
    """

    methods: dict[str, Method]

    def __init__(self, process: Process):
        super().__init__(process)
        self.sync = DpSync()
        self.parameters: Mapping[str, Tensor] = {}
        self.stored: Mapping[str, Tensor] = {}
        self.cuts: dict[str, tuple[DimSharding, int]] = {}
        """{name: how its full tensor is sharded, and the index of this rank's shard}"""
        self.layouts: dict[str, StoredTensor] = {}
        """{name: shape and layout of the parameter; unsharded if it has a placeholder in `parameters`}."""
        self.parts: dict[str, str] = {}
        self.hook: tuple[Any, Hook] | None = None
        self.powersgd: dict[int, Any] = {}
        """{rank of the approximation: torch's PowerSGD state}"""
        self.state: State = {}
        self.steps = self.updates = 0
        self.is_attached = self.is_in_backward = False
        self.wire: GroupTransport | None = None

    @on_local_values  # parameters have the shapes of their shards
    def adopt(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        self.sync = program.dp_sync if isinstance(program.dp_sync, DpSync) else DpSync()
        self.stored = parameters
        layouts = {name: program.parameters[name] for name in program.parameters if name in parameters}
        self.methods = {
            name: cast(Method, stored.method) for name, stored in layouts.items() if stored.method is not None
        }
        for name in self.methods:
            unsharded = layouts[name].unsharded_to_sync(program.mesh)
            if unsharded is not None:
                self._create_unsharded(name, layouts[name], program.mesh)
                layouts[name] = unsharded
        self.layouts, self.parameters = layouts, self.with_unsharded(parameters)
        coordinates = self.process.coordinates
        self.parts = {name: " ".join(f"{axis}{coordinates[axis]}"
                                     for axis, _ in splits_of(layouts[name], program.mesh))
                      for name in self.methods}  # fmt: skip
        if self.methods and self.wire is None:
            self.wire = GroupTransport(self.process.groups[program.mesh.along("rows")[0]])
        self.process.apart = program.mesh.along("rows")[:1] if self.changes_models else ()

    def _create_unsharded(self, name: str, stored: StoredTensor, mesh: Mesh) -> None:
        """Create an unsharded placeholder, with freed storage, for the full gradient of a sharded parameter."""
        zero_axis = mesh.stored_over(stored.layout)
        cut, shard = dict(splits_of(stored, mesh))[str(zero_axis)], self.stored[name]
        self.cuts[name] = cut, mesh.index(self.process.coordinates, str(zero_axis))
        if name not in self.unsharded:
            shape = (*shard.shape[: cut.dim], cut.size, *shard.shape[cut.dim + 1 :])
            self.unsharded[name] = nn.Parameter(shard.new_empty(shape), requires_grad=shard.requires_grad)
            self.unsharded[name].untyped_storage().resize_(0)

    def with_unsharded(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self.unsharded:
            return parameters
        for name, unsharded in self.unsharded.items():
            unsharded.requires_grad_(self.stored[name].requires_grad)
        return {name: self.unsharded.get(name, parameter) for name, parameter in parameters.items()}

    def release_full_gradients(self) -> None:
        for unsharded in self.unsharded.values():
            unsharded.grad = None

    @property
    def changes_models(self) -> bool:
        return self.sync.changes_models and bool(self.methods)

    def check_optimizer_attached(self) -> None:
        if self.changes_models and not self.is_attached and self.steps:
            raise UsageError(
                f"dp_sync='{self.sync}' needs an attached optimizer",
                why="every data rank has its own model, and the method averages the models after the optimizer's step",
                hint="call pm.attach(optimizer) once, before the first step",
            )

    def check_gradients(self, call: str) -> None:
        if self.changes_models:
            raise UsageError(
                f"{call} is not available with dp_sync='{self.sync}'",
                why="every data rank has its own model, and its gradients are those of its local batch",
                hint="p.grad of this rank's parameters",
            )

    def problem(self, in_step: bool) -> UsageError | None:
        has_own_backward = not in_step and "pp" not in self.process.groups
        for name in self.methods if has_own_backward else ():
            if self.stored[name]._backward_hooks or self.stored[name]._post_accumulate_grad_hooks:
                return UsageError(
                    f"the gradient hook of '{name}' cannot run with dp_sync='{self.sync}' and your own backward()",
                    why="ranks synchronise gradients after the backward, and the hook would run before that",
                    hint="pm.step(**batch), which gives hooks complete gradients; or change p.grad before "
                    "optimizer.step()",
                )
        return None

    @on_local_values  # called also at the end of a backward that the user starts
    @torch.no_grad()
    def reduce_by_method(self, loss_scale: float = 1.0) -> None:
        if self.wire is None:
            return
        for method, names in self._buckets():
            partial = {name: gradient_of(self.parameters[name]) for name in names}
            if loss_scale != 1.0:
                partial = {name: part / loss_scale for name, part in partial.items()}
            gradients = self._synchronise(method, partial)
            for name, value in gradients.items():
                self._store_gradient(name, value if loss_scale == 1.0 else value * loss_scale)
        self.steps += 1

    def _store_gradient(self, name: str, value: Tensor) -> None:
        """Store the synchronised gradient of a parameter, or this rank's shard of that gradient, in `.grad`."""
        gradient = self.parameters[name].grad
        assert gradient is not None
        if name not in self.unsharded:
            gradient.copy_(value)
            return
        cut, index = self.cuts[name]
        self.stored[name].grad = cut.take(value, index).clone()
        self.unsharded[name].grad = None

    def synchronise_in_backward(self, outputs: Sequence[Any], leave: Callable[[], bool]) -> tuple[Any, ...]:
        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._start_backward(leave))
        return tuple(outputs)

    def _start_backward(self, leave: Callable[[], bool]) -> None:
        check_differentiated_once(
            f"dp_sync='{self.sync}'",
            "ranks synchronise gradients when a backward has ended, and that has no derivative",
            "dp_sync='all_reduce'",
        )
        if self.is_in_backward or leave():
            return
        self.is_in_backward = True
        before = {self.stored[name]: self.stored[name].grad for name in self.methods}
        for parameter in before:
            parameter.grad = None

        @on_local_values
        @torch.no_grad()
        def ends() -> None:
            self.is_in_backward = False
            self.reduce_by_method()
            accumulate_earlier(before)

        at_end_of_backward(ends)

    def _synchronise(self, method: Method, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.wire is not None
        if method.changes == "models":
            return {name: part * self.wire.num_ranks for name, part in parts.items()}
        if method == HOOK:
            assert self.hook is not None
            return run_hook(*self.hook, _in_buckets(parts), self.parameters, self.wire.num_ranks)
        if method.name == "powersgd":
            return run_hook(*self._powersgd(method), _in_buckets(parts), self.parameters, self.wire.num_ranks)
        if self.steps < self.sync.from_step:
            flat = [{name: part.reshape(-1) for name, part in parts.items()}]
            return {name: value.view(parts[name].shape) for name, value in summed(flat, self.wire)[0].items()}
        draws = MethodSeeds(self.sync.seed, self.steps, self.parts)
        return synchronised(method, [parts], [self.state], self.wire, draws)[0]

    def _powersgd(self, method: Method) -> tuple[Any, Hook]:
        """Return the state and hook of torch's PowerSGD. Its first steps (at least two) are uncompressed."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        assert self.wire is not None
        if method.rank not in self.powersgd:
            self.powersgd[method.rank] = powerSGD_hook.PowerSGDState(
                self.wire.group, matrix_approximation_rank=method.rank,
                start_powerSGD_iter=max(2, self.sync.from_step), random_seed=self.sync.seed,
            )  # fmt: skip
        return self.powersgd[method.rank], powerSGD_hook.powerSGD_hook

    def _buckets(self) -> list[tuple[Method, Sequence[str]]]:
        """Return buckets of parameters whose gradients are synchronised together, as (method, names).

        The parameters of a bucket have one method and one dtype. A parameter without a gradient is included if it has
        state, and counts as having a zero gradient. For a DDP hook, all parameters of a dtype are in one bucket, which
        `_in_buckets` divides later. As in DDP, the last parameter comes first.
        """
        candidates = {name: self.parameters[name] for name in self.methods
               if self.parameters[name].grad is not None or name in self.state}  # fmt: skip
        buckets = list[tuple[Method, Sequence[str]]]()
        for names in bucket_by_kind(candidates, self.methods, most_bytes=None):
            method = self.methods[names[0]]
            is_hook = method == HOOK or method.name == "powersgd"
            chunks = [names[::-1]] if is_hook else bucket_by_kind({name: candidates[name] for name in names})
            buckets += [(method, chunk) for chunk in chunks]
        return buckets

    def served(self) -> set[str]:
        """Return the parameters for which this rank is the server: it sums their gradients and sends the sums."""
        if self.wire is None:
            return set()
        parameters, names = self._parameters_with_method(), set[str]()
        for row in bucket_by_kind(parameters, self.methods):
            server_of = servers(
                self.methods[row[0]], {name: parameters[name].numel() for name in row}, self.wire.num_ranks
            )
            names |= {name for name in row if server_of[name] == self.wire.here[0]}
        return names

    def _parameters_with_method(self) -> dict[str, Tensor]:
        return {name: self.parameters[name] for name in self.methods}

    # --- Models

    def attach(self, optimizer: Optimizer) -> None:
        """Register hooks on an optimizer, so that each of its steps averages the model replicas.

        Raises UsageError for a second optimizer.
        """
        if self.is_attached:
            raise UsageError(
                "attach() is called for a second optimizer", why="replicas would be averaged twice",
                hint="pass all parameters to one optimizer",
            )  # fmt: skip
        self.is_attached = True
        optimizer.register_step_pre_hook(lambda *_: self._before_optimizer())
        optimizer.register_step_post_hook(lambda *_: self._after_optimizer())

    @on_local_values
    @torch.no_grad()
    def _before_optimizer(self) -> None:
        if self.changes_models and self.wire is not None:
            for parameter in (
                self._parameters_with_method().values() if self.sync.method.name == "gradient_tracking" else ()
            ):
                gradient_of(parameter)
            for names in self._same_dtype_buckets():
                before_step(self.sync.method, [names], [self.state], self.wire, self.updates)

    @on_local_values
    @torch.no_grad()
    def _after_optimizer(self) -> None:
        if self.changes_models and self.wire is not None:
            for names in self._same_dtype_buckets():
                after_step(self.sync.method, [names], [self.state], self.wire, self.updates)
            self.updates += 1

    def _same_dtype_buckets(self) -> list[dict[str, Tensor]]:
        parameters = self._parameters_with_method()
        return [{name: parameters[name] for name in row} for row in bucket_by_kind(parameters)]

    @torch.no_grad()
    def replica_mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.changes_models or self.wire is None:
            return dict(values)
        replicated = {name: values[name].detach() for name in self.methods if name in values}
        rows = [{name: replicated[name] for name in row} for row in bucket_by_kind(replicated, most_bytes=None)]
        return dict(values) | {name: value for row in rows for name, value in means([row], self.wire)[0].items()}

    # --- Hooks and checkpoints

    def register_hook(self, program: Program, parameters: Mapping[str, Tensor], state: Any, hook: Hook) -> Program:
        """Reduce the gradients of all parameters by the user's DDP communication hook. Return the new program.

        Raises UsageError or OptionError if the hook cannot reduce the gradients of this program.
        """
        check_hook(hook)
        if self.hook is not None:
            raise UsageError(
                "a communication hook is registered already", why="both hooks would reduce the gradients",
                hint="register one hook that does both",
            )  # fmt: skip
        check_hookable(program)
        axis = program.mesh.along("rows")[0]
        hooked = {name: replace(stored, method=HOOK if axis in stored.grad_axes else None)
                  for name, stored in program.parameters.items()}  # fmt: skip
        program = replace(program, parameters=hooked)
        self.adopt(program, parameters)
        assert self.wire is not None
        self.hook = in_group(state, hook, self.wire.group), hook
        return program

    def state_dict(self, data_ranks: int | None = None) -> dict[str, Any]:
        """Return the state of the methods, for `ParallelModule.dp_sync_state_dict`."""
        return state_of(self, data_ranks)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the state of the methods, for `ParallelModule.load_dp_sync_state_dict`."""
        load_state(self, saved)


def _in_buckets(parts: Mapping[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
    return [{name: parts[name] for name in row} for row in bucket_by_kind(parts)]

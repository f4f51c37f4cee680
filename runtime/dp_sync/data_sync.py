"""What the data-parallel ranks of one module send each other in place of a sum of gradients, and what they remember.

Where a rank stores parts of parameters (`zero=1`), a method is given the whole gradients, as without, and each rank
keeps its parts of what comes of them: so all that methods remember and draw is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import at_end_of_backward
from autopart.errors import UsageError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.run.buckets import alike
from autopart.ir.run.dp_sync import ALL_REDUCE, HOOK, Method
from autopart.ir.sharding import Cut
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.dp_sync.ddp_hooks import Hook, in_group, run_hook
from autopart.runtime.dp_sync.gradient_methods import Draws, State, servers, summed, synchronised
from autopart.runtime.dp_sync.model_averaging import after_step, before_step, means
from autopart.runtime.dp_sync.transports import Group
from autopart.runtime.gradients.step_reduction import add_earlier, gradient_of
from autopart.runtime.shards.shard_state import stored_cuts


class DataSync:
    """The methods of one module, on this rank. `steps`: how often gradients were brought together. `updates`: how many
    steps the attached optimizer has made. `state`: what methods remember.

    `stored`: {name: this rank's parameter}. `wholes`: {name: what stands for all of one that is stored in parts; it has
    no memory, and between a step's backward and its end the whole gradient}. `parameters`: the stored ones, or their
    wholes.
    """

    def __init__(self, process: Process):
        self.process, self.sync = process, ALL_REDUCE
        self.parameters: Mapping[str, Tensor] = {}
        self.stored: Mapping[str, Tensor] = {}
        self.wholes: dict[str, Tensor] = {}
        self.cuts: dict[str, tuple[Cut, int]] = {}
        """{name: how its whole is cut, and which shard this rank stores}"""
        self.layouts: dict[str, StoredTensor] = {}
        """How parameters are stored, those of `wholes` as if each were whole."""
        self.methods: dict[str, Method] = {}
        self.parts: dict[str, str] = {}
        self.hook: tuple[Any, Hook] | None = None
        self.powersgd: dict[int, Any] = {}
        """{rank of the approximation: torch's state}"""
        self.state: State = {}
        self.steps = self.updates = 0
        self.is_attached = self.is_in_backward = False
        self.wire: Group | None = None

    def adopt(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Take the module's newest program, which has the parameters of all before it: {name: local parameter}."""
        self.sync, self.stored = program.dp_sync, parameters
        layouts = {name: program.parameters[name] for name in program.parameters if name in parameters}
        self.methods = {name: one.method for name, one in layouts.items() if one.method is not None}
        for name in self.methods:
            whole = layouts[name].whole_to_send(program.mesh)
            if whole is not None:
                self._stand_in(name, layouts[name], program.mesh)
                layouts[name] = whole
        self.layouts, self.parameters = layouts, self.with_wholes(parameters)
        here = self.process.coordinates
        self.parts = {name: " ".join(f"{axis}{here[axis]}" for axis, _ in stored_cuts(layouts[name], program.mesh))
                      for name in self.methods}  # fmt: skip
        if self.methods and self.wire is None:
            self.wire = Group(self.process.groups[program.mesh.along("rows")[0]])
        self.process.apart = program.mesh.along("rows")[:1] if self.changes_models else ()

    def _stand_in(self, name: str, stored: StoredTensor, mesh: Mesh) -> None:
        """What stands for the whole of a parameter that is stored in parts."""
        over = mesh.stored_over(stored.layout)
        cut, part = dict(stored_cuts(stored, mesh))[str(over)], self.stored[name]
        self.cuts[name] = cut, mesh.index(self.process.coordinates, str(over))
        if name not in self.wholes:
            shape = (*part.shape[: cut.dim], cut.size, *part.shape[cut.dim + 1 :])
            self.wholes[name] = nn.Parameter(part.new_empty(shape), requires_grad=part.requires_grad)
            self.wholes[name].untyped_storage().resize_(0)

    def with_wholes(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """{name: parameter}, of those that are stored in parts what has the whole gradient."""
        if not self.wholes:
            return parameters
        for name, whole in self.wholes.items():
            whole.requires_grad_(self.stored[name].requires_grad)
        return {name: self.wholes.get(name, parameter) for name, parameter in parameters.items()}

    def let_go(self) -> None:
        """Forget the whole gradients of a step that has ended."""
        for whole in self.wholes.values():
            whole.grad = None

    @property
    def changes_models(self) -> bool:
        """Whether every data rank has a model of its own."""
        return self.sync.changes_models and bool(self.methods)

    def check_attached(self) -> None:
        """Raises UsageError before a second step whose replicas nothing brings together."""
        if self.changes_models and not self.is_attached and self.steps:
            raise UsageError(
                f"dp_sync='{self.sync}' and no optimizer is attached",
                why="every data rank has a model of its own; they are brought together after the optimizer's step",
                hint="pm.attach(optimizer), once, before the first step",
            )

    def check_gradients(self, asked: str) -> None:
        """Raises UsageError where there is no one gradient to give."""
        if self.changes_models:
            raise UsageError(f"{asked} with dp_sync='{self.sync}'", why="every data rank has a model of its own, and "
                             "the gradient of its own rows", hint="p.grad of this rank's parameters")  # fmt: skip

    def problem(self, in_step: bool) -> UsageError | None:
        """Why hooks on gradients would see other ones; the same on every rank. `in_step`: they are held back."""
        has_own_backward = not in_step and "pp" not in self.process.groups
        for name in self.methods if has_own_backward else ():
            if self.stored[name]._backward_hooks or self.stored[name]._post_accumulate_grad_hooks:
                return UsageError(
                    f"'{name}' has a hook on its gradient, with dp_sync='{self.sync}' and a backward of your own",
                    why="ranks bring gradients together when the backward has ended, and the hook would run before",
                    hint="pm.step(**batch), which gives hooks complete gradients; or change p.grad before "
                    "optimizer.step()",
                )
        return None

    @torch.no_grad()
    def bring_together(self, loss_scale: float = 1.0) -> None:
        """Complete every `.grad` that holds this rank's part of a gradient times `loss_scale`. A collective call."""
        if self.wire is None:
            return
        for method, names in self._buckets():
            parts = {name: gradient_of(self.parameters[name]) for name in names}
            if loss_scale != 1.0:
                parts = {name: part / loss_scale for name, part in parts.items()}
            gradients = self._made(method, parts)
            for name, value in gradients.items():
                self._hand_on(name, value if loss_scale == 1.0 else value * loss_scale)
        self.steps += 1

    def _hand_on(self, name: str, value: Tensor) -> None:
        """Put what a method has made of a gradient in its place."""
        gradient = self.parameters[name].grad
        assert gradient is not None
        if name not in self.wholes:
            gradient.copy_(value)
            return
        cut, index = self.cuts[name]
        self.stored[name].grad = cut.take(value, index).clone()
        self.wholes[name].grad = None

    def watched(self, outputs: Sequence[Any], leave: Callable[[], bool]) -> tuple[Any, ...]:
        """The outputs of a differentiable call, whose backward brings the gradients together that it makes, once.
        `leave`: whether it leaves them as they are, to be brought together by a later one."""
        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._backward_begins(leave))
        return tuple(outputs)

    def _backward_begins(self, leave: Callable[[], bool]) -> None:
        check_differentiated_once(
            f"dp_sync='{self.sync}'",
            "ranks bring gradients together when a backward has ended, and that has no derivative",
            "dp_sync='all_reduce'",
        )
        if self.is_in_backward or leave():
            return
        self.is_in_backward = True
        before = {self.stored[name]: self.stored[name].grad for name in self.methods}
        for parameter in before:
            parameter.grad = None

        @torch.no_grad()
        def ends() -> None:
            self.is_in_backward = False
            self.bring_together()
            add_earlier(before)

        at_end_of_backward(ends)

    def _made(self, method: Method, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
        draws = Draws(self.sync.seed, self.steps, self.parts)
        return synchronised(method, [parts], [self.state], self.wire, draws)[0]

    def _powersgd(self, method: Method) -> tuple[Any, Hook]:
        """torch's PowerSGD, which begins with two exact steps (its memory cannot begin before)."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        assert self.wire is not None
        if method.rank not in self.powersgd:
            self.powersgd[method.rank] = powerSGD_hook.PowerSGDState(
                self.wire.group, matrix_approximation_rank=method.rank,
                start_powerSGD_iter=max(2, self.sync.from_step), random_seed=self.sync.seed,
            )  # fmt: skip
        return self.powersgd[method.rank], powerSGD_hook.powerSGD_hook

    def _buckets(self) -> list[tuple[Method, Sequence[str]]]:
        """What is brought together now, by method and dtype; what was before and has no gradient now counts as zero. A
        hook gets all in one go, the last parameter first, as from DDP."""
        due = {name: self.parameters[name] for name in self.methods
               if self.parameters[name].grad is not None or name in self.state}  # fmt: skip
        buckets = list[tuple[Method, Sequence[str]]]()
        for names in alike(due, self.methods, most_bytes=None):
            method = self.methods[names[0]]
            is_hook = method == HOOK or method.name == "powersgd"
            chunks = [names[::-1]] if is_hook else alike({name: due[name] for name in names})
            buckets += [(method, chunk) for chunk in chunks]
        return buckets

    def served(self) -> set[str]:
        """The parameters whose server this rank is."""
        if self.wire is None:
            return set()
        own, names = self._own(), set[str]()
        for row in alike(own, self.methods):
            home = servers(self.methods[row[0]], {name: own[name].numel() for name in row}, self.wire.num_ranks)
            names |= {name for name in row if home[name] == self.wire.here[0]}
        return names

    def _own(self) -> dict[str, Tensor]:
        """The parameters that have a method."""
        return {name: self.parameters[name] for name in self.methods}

    # --- Models

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer's steps bring replicas together."""
        self.is_attached = True
        optimizer.register_step_pre_hook(lambda *_: self._before())
        optimizer.register_step_post_hook(lambda *_: self._after())

    @on_local_values
    @torch.no_grad()
    def _before(self) -> None:
        if self.changes_models and self.wire is not None:
            for parameter in self._own().values() if self.sync.method.name == "gradient_tracking" else ():
                gradient_of(parameter)
            for names in self._alike():
                before_step(self.sync.method, [names], [self.state], self.wire, self.updates)

    @on_local_values
    @torch.no_grad()
    def _after(self) -> None:
        if self.changes_models and self.wire is not None:
            for names in self._alike():
                after_step(self.sync.method, [names], [self.state], self.wire, self.updates)
            self.updates += 1

    def _alike(self) -> list[dict[str, Tensor]]:
        """The parameters of one dtype each, which are sent together."""
        own = self._own()
        return [{name: own[name] for name in row} for row in alike(own)]

    @torch.no_grad()
    def mean_of_replicas(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{name: the mean over the data ranks} where every data rank has a model of its own, else the values."""
        if not self.changes_models or self.wire is None:
            return dict(values)
        own = {name: values[name].detach() for name in self.methods if name in values}
        rows = [{name: own[name] for name in row} for row in alike(own, most_bytes=None)]
        return dict(values) | {name: value for row in rows for name, value in means([row], self.wire)[0].items()}

    def register_hook(self, state: Any, hook: Hook) -> None:
        """Take the user's hook; the program's parameters have `HOOK` for their method."""
        assert self.wire is not None
        self.hook = in_group(state, hook, self.wire.group), hook


def _in_buckets(parts: Mapping[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
    """A hook's buckets, of at most `BUCKET_BYTES`."""
    return [{name: parts[name] for name in row} for row in alike(parts)]

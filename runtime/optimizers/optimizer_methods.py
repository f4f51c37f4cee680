"""`pm.optimizer`: optimizers that compute with full tensors, and several optimizers in one."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopart.compat.torch_function_internals import on_local_values
from autopart.errors import OptionError
from autopart.ir.program import Program
from autopart.ir.run.full_tensors import hidden_matrices
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.optimizers.full_tensor_update import FullTensorUpdate, LocalTensor
from autopart.runtime.optimizers.optimizer_checks import OF_THE_MODEL, is_elementwise_class, reason_of
from autopart.runtime.optimizers.optimizer_trial import failed_step, is_separable, line_of_step, line_that_combines
from autopart.runtime.optimizers.partitioned_optimizer import PartitionedOptimizer
from autopart.runtime.shards.shard_owners import shard_info_of
from autopart.tracing.meta_copy import Source

MakeOptimizer = Callable[..., Optimizer]
Groups = list[dict[str, Any]]


class OptimizerMethods:
    """Mixin of `ParallelModule` that creates optimizers."""

    _process: Process
    _source: Source
    _traced: Callable[[str], Program]
    _local_parameters: dict[str, nn.Parameter]

    @on_local_values
    def optimizer(
        self, kind: MakeOptimizer, params: Iterable[Any] | None = None, *, others: MakeOptimizer | None = None,
        **options: Any,
    ) -> Optimizer:  # fmt: skip
        """Create an optimizer that updates each tensor as a single device would.

        Optimizers such as Muon, Shampoo, SOAP, LAMB, LARS and Adafactor compute with full tensors. Each sharded tensor
        has an owner, one of the ranks that store its shards. The owner receives the full gradient and values, runs the
        unmodified optimizer, and sends the new shards. Tensors and their optimizer state are distributed evenly over
        owners. Elementwise optimizers of `torch.optim`, such as AdamW, update shards without communication.

        Every rank must call it, and also `step` and `state_dict` of the result. The result is a
        `torch.optim.Optimizer`.

        Args:
            kind: optimizer class, or a `functools.partial` of one.
            params: parameters, (name, parameter) pairs or groups, as for constructors in `torch.optim`. A pattern of
                names, such as `"*.mlp.*.weight"`, can replace a parameter. None: all trainable parameters, or, with
                `others`, the hidden matrices (two-dimensional parameters except embeddings and the output layer).
            others: optimizer class, or partial of one, for the remaining trainable parameters. None: they are not
                trained.
            options: options of `kind`, such as `lr`.

        Raises OptionError for patterns without a match, parameters that `kind` cannot train, and optimizers that need
        all parameters together, such as LBFGS.

        Example:
            optimizer = pm.optimizer(torch.optim.Muon, lr=0.02, others=partial(torch.optim.AdamW, lr=3e-4))
        """
        for make in (kind, others):
            if make is not None:
                _check_class(_class_of(make), self._process)
        stored = self._traced("optimizer()").stored_names
        model = self._source.model
        names = {id(p): name for name, p in self._local_parameters.items()}
        trained = [name for name, p in self._local_parameters.items() if p.requires_grad]
        if params is not None:
            every = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
            groups = _groups(params, names, {name: stored[name] for name in every if name in stored})
        elif others is not None:
            matrices = {stored[name] for name in hidden_matrices(model) if name in stored}
            groups = [{"params": [name for name in trained if name in matrices]}]
        else:
            groups = [{"params": trained}]
        chosen = {name for group in groups for name in group["params"]}
        parts: list[tuple[MakeOptimizer, Groups]] = [(functools.partial(kind, **options), groups)]
        if others is not None:
            parts.append((others, [{"params": [name for name in trained if name not in chosen]}]))
        if len(parts) == 1 and is_elementwise_class(_class_of(kind)):
            return parts[0][0](_with_parameters(groups, self._local_parameters))
        return self._partitioned(parts)

    def _partitioned(self, parts: list[tuple[MakeOptimizer, Groups]]) -> PartitionedOptimizer:
        used = {name for _, groups in parts for group in groups for name in group["params"]}
        local = {name: p for name, p in self._local_parameters.items() if name in used}
        full = {
            name for make, groups in parts if not is_elementwise_class(_class_of(make))
            for group in groups for name in group["params"]
        }  # fmt: skip
        tensors = []
        for name, parameter in local.items():
            shard_info = shard_info_of(parameter)
            assert shard_info is not None
            shape, cuts = tuple(shard_info.stored.shape), tuple(shard_info.cuts)
            tensors.append(LocalTensor(name, parameter, shape, cuts))

        def make(named: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
            return [create(_with_parameters(groups, dict(named))) for create, groups in parts]

        process = self._process
        try:
            update = FullTensorUpdate(tensors, process.mesh, process.coordinates, make, full)
        except ValueError as error:
            name = _class_of(parts[0][0]).__name__
            raise OptionError(
                f"{name} cannot be created for these parameters",
                why=str(error),
                hint=f"pm.optimizer({name}, ..., others=torch.optim.AdamW), which gives {name} the hidden matrices, "
                "or params= with patterns of names",
            ) from error
        for optimizer in update.optimizers:
            _check_separable(optimizer, process)
        return PartitionedOptimizer(update, local, process)


def _groups(params: Iterable[Any], names: Mapping[int, str], stored: Mapping[str, str]) -> Groups:
    """Return parameter groups with names in place of parameters and patterns.

    Args:
        names: {id of a local parameter: name under which the program stores it}.
        stored: {name in the model: name under which the program stores it}, of all trainable parameters.
    """
    given = list(params)
    groups = [dict(group) for group in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    local = set(names.values())
    for group in groups:
        entries = group["params"]
        entries = [entries] if isinstance(entries, (str, torch.Tensor)) else list(entries)
        chosen = [name for entry in entries for name in _names_of(entry, names, stored)]
        group["params"] = [name for name in dict.fromkeys(chosen) if name in local]
    return groups


def _names_of(entry: Any, names: Mapping[int, str], stored: Mapping[str, str]) -> list[str]:
    if isinstance(entry, str):
        matching = [name for alias, name in stored.items() if fnmatch.fnmatchcase(alias, entry)]
        if not matching:
            raise OptionError(
                f"no trainable parameter matches {entry!r}",
                hint=f"a pattern of names such as {next(iter(stored), 'weight')!r}, as of pm.named_parameters()",
            )
        return matching
    parameter = entry[1] if isinstance(entry, tuple) else entry
    if id(parameter) not in names:
        raise OptionError(
            "params has a tensor that is no parameter of this module",
            why=f"it is {type(parameter).__name__}",
            hint="pm.parameters() or pm.named_parameters(), not those of the unpartitioned model",
        )
    return [names[id(parameter)]]


def _with_parameters(groups: Groups, parameters: Mapping[str, nn.Parameter]) -> Groups:
    return [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]


def _class_of(make: MakeOptimizer) -> type:
    """Return the class of an optimizer, given the class or a `functools.partial` of it."""
    while isinstance(make, functools.partial):
        make = make.func
    if not (isinstance(make, type) and issubclass(make, Optimizer)):
        raise OptionError(
            f"{make!r} is no optimizer class",
            hint="pm.optimizer(torch.optim.Muon, lr=0.02), or functools.partial(torch.optim.Muon, lr=0.02)",
        )
    return make


def _check_class(kind: type, process: Process) -> None:
    why = reason_of(kind, OF_THE_MODEL)
    if why and process.groups:
        raise OptionError(
            f"{kind.__name__} cannot train a partitioned model",
            why=f"{why}, and its tensors are updated on different ranks",
            hint="torch.optim.Muon or AdamW, or a mesh of dp alone with zero=0 and the optimizer's own constructor",
        )


def _check_separable(optimizer: Optimizer, process: Process) -> None:
    kind, device = type(optimizer), process.device
    if is_elementwise_class(kind):
        return
    name, separable = kind.__name__, is_separable(optimizer, device)
    if separable is None:
        _check_closure(optimizer, device)
    if separable is False:
        raise OptionError(
            f"{name} cannot train a partitioned model",
            why="its update of a matrix depends on other matrices, and these are updated on different ranks",
            where=line_that_combines(optimizer, device),
            hint="an optimizer that updates each tensor by itself, such as torch.optim.Muon",
        )


def _check_closure(optimizer: Optimizer, device: torch.device) -> None:
    """Raise OptionError if a step without a closure fails because it has no closure."""
    error = failed_step(optimizer, device)
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if "closure" in text.lower() or "'NoneType' object is not callable" in text:
        name = type(optimizer).__name__
        raise OptionError(
            f"{name} cannot train a partitioned model",
            why="its step calls a closure that runs the model, and pm.optimizer calls the step after the backward",
            where=f"step(): {line_of_step(type(optimizer), error)}",
            hint="an optimizer whose step() needs no closure, such as torch.optim.Muon or AdamW",
        ) from error

"""What users do with an `nn.Module` beside calling it: right for a partitioned one, or refused in words."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopart.compat_shards import on_local_values
from autopart.compat_training import before_ddp, before_update_bn
from autopart.errors import MissingAttribute, UsageError
from autopart.runtime.loop.loss_scaling import LossScaling

CONVERT = "convert the model before: parallelize(model.bfloat16().cuda(), ...)"
_OWN_TENSORS = ("_parameters", "_buffers", "_modules", "_local_parameters", "_local_buffers", "_copies")

_ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""What DistributedDataParallel asks a module for before it gives every rank the parameters of the first."""


class Idioms(nn.Module):
    """What a partitioned model has of `nn.Module`, where that would otherwise be wrong without a word.

    `copy.deepcopy` gives a module with parameters of its own (for moving averages) that runs on the same processes.
    """

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the whole model."""
        pending: list[nn.Module] = [self]
        while pending:
            module = pending.pop()
            module.__dict__["training"] = bool(mode)
            pending += [child for child in module._modules.values() if child is not None]
        return self

    def _check_registered(self) -> None:
        """Raises UsageError if a parameter was replaced, as `torch.func.functional_call` does for a call."""
        for name, registered, key, parameter in self.__dict__.get("_slots", ()):
            if registered.get(key) is not parameter:
                raise UsageError(
                    f"this call is made with another tensor for '{name}'",
                    why="functional_call or an assignment replaced the parameter, and the program reads its own",
                    hint="pm.load_state_dict(...) changes values; differentiate through updates on the model itself",
                )

    def apply(self, fn: Callable[..., Any]) -> NoReturn:
        """Raises UsageError: there are no layers of the model's own classes here to initialise."""
        _refuse_apply()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: stages are compiled by an option."""
        raise UsageError("pm.compile() compiles nothing", why="what runs are the graphs of the stages",
                         hint="parallelize(..., compile=True)")  # fmt: skip

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing for the dtype and device that the module has, however they are spelled; else raise UsageError."""
        args_, kwargs_ = _spelled_as(self.__dict__["_process"].device, args, kwargs)
        return super().to(*args_, **kwargs_)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What `to`, `half`, `cuda` and their like are made of; fine where it would change nothing."""
        tensors = [*self.__dict__["_local_parameters"].values(), *self.__dict__["_local_buffers"].values()]
        if not tensors:
            tensors = [*self.__dict__["_source"].model.parameters()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            _refuse_conversion(fn, dtype, self.__dict__["_process"].device)
        return self

    @on_local_values
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.__dict__["_program"] is None:
            raise UsageError(
                "copy.deepcopy(pm) comes too early",
                why="the model is traced, and partitioned, at its first call",
                hint="parallelize(model, mesh, example_kwargs=batch)",
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            if name in _OWN_TENSORS:
                value = copy.deepcopy(value, memo)
            elif isinstance(value, (dict, set, Counter, LossScaling)):
                value = copy.copy(value)
            copied.__dict__[name] = value
        copied._begin_as_copy()
        return copied

    def _begin_as_copy(self) -> None:
        """Forget what belongs to the parameters of the module that this is a copy of."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a partitioned model cannot be pickled", why="it holds process groups and compiled programs of this rank",
            hint="torch.save(pm.full_state_dict(), path)",
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("_source")
            if name == _ASKED_BY_DDP:
                _refuse_ddp()
            if name.startswith("_") or source is None:
                raise
        return attribute_of(source.model, name)

    def __getitem__(self, index: Any) -> nn.Module:
        """Return the parameters of a layer, as `pm.layers[index]` does, if the model has layers by numbers."""
        model = self.__dict__["_source"].model
        if not isinstance(model, (nn.Sequential, nn.ModuleList)) or not isinstance(index, int):
            raise UsageError(
                f"a partitioned {type(model).__name__} has no pm[{index!r}]", why="it holds the parameters of this "
                "rank by their names", hint="pm.get_parameter(name), or the model's own layers before parallelize()",
            )  # fmt: skip
        layer = self._modules.get(str(index if index >= 0 else index + len(model)))
        if layer is None:
            raise IndexError(f"this rank holds no parameters of layer {index}; it has {', '.join(self._modules)}")
        return layer

    def __setattr__(self, name: str, value: Any) -> None:
        source = self.__dict__.get("_source")
        known = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if source is not None and not known:
            part_of_model = name in vars(source.model) or name in self._modules or name in self._parameters
            if part_of_model or isinstance(value, (nn.Module, nn.Parameter)):
                _refuse_change(name)
        super().__setattr__(name, value)


class Branch(nn.Module):
    """A node of the tree that gives the local tensors of a partitioned model their dotted names.

    `pm.layers[0].weight` is a parameter; what a layer computes is a part of the program.
    """

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("a layer of a partitioned model cannot be called alone",
                         why="its operators are a part of the program that pm(...) runs",
                         hint="call the model's own layer, or let the model return what it computes")  # fmt: skip

    def __getitem__(self, index: Any) -> nn.Module:
        names = list(self._modules)
        if isinstance(index, str) and index in names:
            return self._modules[index]  # type: ignore[return-value]
        if isinstance(index, int) and str(index % max(len(names), 1)) in names and -len(names) <= index:
            module = self._modules.get(str(index if index >= 0 else index + len(names)))
            if module is not None:
                return module
        raise IndexError(f"this rank holds no parameters of {index!r}; it has {', '.join(names) or 'none'}")

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(child for child in self._modules.values() if child is not None)

    def __len__(self) -> int:
        return len(self._modules)

    @on_local_values
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Raises UsageError for another mode than the model's: a part has no program of its own."""
        if bool(mode) != self.training:
            call = "train()" if mode else "eval()"
            raise UsageError(
                f"{call} of a layer of a partitioned model would change nothing",
                why="the model is traced as a whole, in one mode or with the modes that its layers had",
                hint=f"set it on the model before parallelize(): model.layer.{call}; or pm.{call} for all",
            )
        return self

    def __bool__(self) -> bool:
        return True

    def apply(self, fn: Callable[..., Any]) -> NoReturn:
        _refuse_apply()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        tensor = next(iter((*self.parameters(), *self.buffers())), None)
        if tensor is None:
            return self
        args_, kwargs_ = _spelled_as(tensor.device, args, kwargs)
        return super().to(*args_, **kwargs_)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for tensor in (*self.parameters(), *self.buffers()):
            _refuse_conversion(fn, tensor.dtype, tensor.device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        raise MissingAttribute(
            f"'{name}' is not on this rank", hint="ask the model itself",
            why="layers hold parameters alone, each rank those of its stages",
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self.__dict__:
            _refuse_change(name)
        super().__setattr__(name, value)

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "a hook on a layer of a partitioned model would never run", why="its operators are a part of the program",
            hint="register it on the model before: it is traced",
        )  # fmt: skip

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook


def attribute_of(model: nn.Module, name: str) -> Any:
    """A plain attribute of the user's model, such as its `config`.

    Raises MissingAttribute, an AttributeError, for what would run the model's own code or read its own weights.
    """
    kind = type(model).__name__
    if name == "dtype" and isinstance(getattr(model, name, None), torch.dtype):
        return getattr(model, name)  # a property of transformers: that of the parameters, which the model keeps
    static = inspect.getattr_static(model, name, None)
    is_plain = name in vars(model) or not (callable(static) or hasattr(static, "__get__"))
    if static is not None and is_plain and not isinstance(static, (Tensor, nn.Module)) and not callable(static):
        return static
    if callable(static) and not isinstance(static, nn.Module):
        raise MissingAttribute(
            f"a partitioned model has no {name}()",
            why=f"{kind}.{name} runs the model's own code, on whole weights",
            hint=f"model.load_state_dict(pm.full_state_dict()); model.{name}(...)",
        )
    if name in model._modules:
        raise MissingAttribute(f"'{name}' of {kind} is not on this rank", why="a partitioned model has parameters "
                               "alone, each rank those of its stages", hint=f"ask the model: model.{name}")  # fmt: skip
    hint = f"ask the model: model.{name}" if hasattr(type(model), name) else f"{kind} has none either"
    hint = "next(pm.parameters()).dtype" if name == "dtype" else hint
    raise MissingAttribute(f"a partitioned {kind} has no attribute '{name}'", hint=hint)


def _refuse_apply() -> NoReturn:
    raise UsageError(
        "pm.apply(fn) would find no layer of the model's own classes",
        why="its layers hold parameters alone: none is an nn.Linear",
        hint="initialise the model before parallelize()",
    )


def _refuse_ddp() -> NoReturn:
    raise UsageError(
        "DistributedDataParallel around a partitioned model", why="it would give every rank the first one's shards",
        hint="an axis dp: parallelize(model, 'dp2,tp2') sums gradients itself",
    )  # fmt: skip


def _spelled_as(device: torch.device, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of `to` with `device` for each spelling of it.

    A device without an index is the current one: "cuda" may be "cuda:0", and "cpu:0" is "cpu".
    """
    named = {name: device if _is_device(given, device) else given for name, given in kwargs.items()}
    return [device if _is_device(given, device) else given for given in args], named


def _is_device(given: Any, device: torch.device) -> bool:
    if not isinstance(given, (str, int, torch.device)) or isinstance(given, bool):
        return False
    asked = torch.device(device.type, given) if isinstance(given, int) else torch.device(given)
    current = torch.cuda.current_device() if device.type == "cuda" else 0
    return asked.type == device.type and _index(asked, current) == _index(device, current)


def _index(device: torch.device, current: int) -> int:
    return current if device.index is None else device.index


def _refuse_conversion(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError where `fn` gives another tensor for one of this dtype and device."""
    probe = torch.empty(0, dtype=dtype, device=device)
    converted = fn(probe)
    if converted is not probe:
        had, asked = (device.type, converted.device.type)
        if had == asked:
            had, asked = str(device), str(converted.device)
        raise UsageError(
            "a partitioned model keeps the dtype and device it was made with",
            why=f"its programs were traced for {str(dtype).removeprefix('torch.')} on {had}, not "
            f"{str(converted.dtype).removeprefix('torch.')} on {asked}",
            hint=CONVERT,
        )


def _refuse_change(name: str) -> NoReturn:
    raise UsageError(
        f"setting '{name}' of a partitioned model would change nothing",
        why="the program was traced with what the model had",
        hint="change the model before; values: pm.load_state_dict(...)",
    )


def holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds `name` below `root`, made where it is missing, and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        # By the dict: a part may have the name of one of ParallelModule's own attributes.
        if part not in root._modules:
            branch = root._modules[part] = Branch()
            branch.__dict__["training"] = root.training
        child = root._modules[part]
        assert child is not None
        root = child
    return root, last


def watch_wrappers() -> None:
    """From now on what would change a partitioned model's shards, or nothing of it, is refused."""
    before_ddp(refuse_ddp_around)
    before_update_bn(refuse_update_bn)


def refuse_ddp_around(module: nn.Module) -> None:
    """Raises UsageError if DistributedDataParallel is to wrap a module that contains a partitioned one."""
    if _contains_partitioned(module):
        _refuse_ddp()


def refuse_update_bn(module: nn.Module) -> None:
    """Raises UsageError if batch norms are to be updated of a module that contains a partitioned one."""
    if _contains_partitioned(module):
        raise UsageError(
            "update_bn() of a partitioned model would change nothing",
            why="it looks for BatchNorm layers, and a partitioned model has parameters and buffers alone",
            hint="model.load_state_dict(average.module.full_state_dict()); update_bn(loader, model)",
        )


def _contains_partitioned(module: nn.Module) -> bool:
    pending = [module]
    while pending:
        one = pending.pop()
        if isinstance(one, Idioms):
            return True
        pending += [child for child in one._modules.values() if child is not None]
    return False

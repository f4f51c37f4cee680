"""Methods of `nn.Module` that a partitioned model adapts or rejects, except the call itself."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NoReturn

from torch import Tensor, nn

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import before_wrappers
from autopart.errors import UsageError
from autopart.runtime.training.conversions import refuse_conversion, spelled_as
from autopart.runtime.training.layer_modes import LayerModes
from autopart.runtime.training.layers import ModuleProxy, add_layers, attribute_of, holder, item_of
from autopart.runtime.training.loss_scaling import LossScaling
from autopart.tracing.meta_copy import Source

COMPILED = (
    "torch.compile() of a partitioned model compiles nothing: its stages are graphs that autopart runs itself. "
    "Use parallelize(..., compile=True)."
)
WRAPPERS_HINT = "use the mesh axis dp: parallelize(model, 'dp2,tp2') reduces gradients itself, and zero=3 is FSDP"
LIBRARIES_HINT = "; for Trainer and Accelerator, import autopart.integrations.transformers or .accelerate before them"
READ_METHODS = ("num_parameters", "get_input_embeddings", "get_output_embeddings", "add_model_tags")
"""Methods of transformers models that use only shapes, layers and tags. They run on the model without its weights."""
_OWN_TENSORS = ("_parameters", "_buffers", "_modules", "_local_parameters", "_local_buffers", "_copies", "_modes")


class ModuleMethods(ModuleProxy):
    """Methods of `nn.Module` whose default implementation would be silently wrong on a partitioned model.

    `copy.deepcopy` returns a module with separate parameters, for example for moving averages. The copy uses the
    process groups of the original.
    """

    _local_parameters: dict[str, nn.Parameter]
    _local_buffers: dict[str, Tensor]

    def _begin_layers(self, source: Source) -> None:
        modes = LayerModes(source)
        self._slots: tuple[list[str], list[dict[str, Any]], list[str], list[Any]] = ([], [], [], [])
        self._init_proxy("", source.model, modes)
        modes.attach(self)
        add_layers(self, modes)

    def _register(self, model: nn.Module, stored_names: Mapping[str, str]) -> None:
        """Register this rank's parameters under all their names, in the model's order."""
        add_layers(self, self._modes)
        self._slots = ([], [], [], [])
        for name, _ in model.named_parameters(remove_duplicate=False):
            parameter = self._local_parameters.get(stored_names.get(name, ""))
            if parameter is not None:
                parent, last = holder(self, name)
                if parent._parameters.get(last) is None:
                    parent._parameters[last] = parameter
                self._add_slot(name, parent._parameters, last)
        for name in self._local_buffers:
            parent, last = holder(self, name)
            self._add_slot(name, parent._buffers, last)

    def _register_buffer(self, name: str, buffer: Tensor, persistent: bool) -> None:
        parent, last = holder(self, name)
        parent._buffers[last] = self._local_buffers[name] = buffer
        if not persistent:
            parent._non_persistent_buffers_set.add(last)
        self._add_slot(name, parent._buffers, last)

    def _add_slot(self, name: str, registered: dict[str, Any], key: str) -> None:
        names, of_modules, keys, tensors = self._slots
        names.append(name)
        of_modules.append(registered)
        keys.append(key)
        tensors.append(registered[key])

    def _check_registered(self) -> None:
        """Raise UsageError if a parameter or buffer was replaced, as by `torch.func.functional_call`."""
        names, registered, keys, tensors = self._slots
        if not all(map(is_, map(dict.get, registered, keys), tensors)):
            is_unchanged = list(map(is_, map(dict.get, registered, keys), tensors))
            raise UsageError(
                f"the tensor '{names[is_unchanged.index(False)]}' is replaced in this call",
                why="functional_call or an assignment replaced it, but the program uses the original tensor",
                hint="use pm.load_state_dict(...) to change values, and the unpartitioned model to differentiate "
                "through updates",
            )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return this module if it already has the dtype and device. Otherwise raise UsageError."""
        args_, kwargs_ = spelled_as(self.__dict__["_process"].device, args, kwargs)
        return super().to(*args_, **kwargs_)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Raise UsageError if `fn` converts tensors. `to`, `half`, `cuda` and similar methods call `_apply`."""
        tensors = [*self.__dict__["_local_parameters"].values(), *self.__dict__["_local_buffers"].values()]
        if not tensors:
            tensors = [*self.__dict__["_source"].model.parameters()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            refuse_conversion(fn, dtype, self.__dict__["_process"].device)
        return self

    def __copy__(self) -> NoReturn:
        raise UsageError(
            "copy.copy() of a partitioned model is not supported",
            why="both would write to the same parameters and gradients, and count steps separately",
            hint="copy.deepcopy(pm), which has separate parameters",
        )

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
        copied._modes.attach(copied)
        copied._begin_as_copy()
        return copied

    def _begin_as_copy(self) -> None:
        """Reset the state of steps and gradients. `copy.deepcopy` calls this method of the new copy."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a partitioned model cannot be pickled", why="it holds process groups and compiled programs of this rank",
            hint="torch.save(pm.full_state_dict(), path)",
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            source, own = self.__dict__.get("_source"), self.__dict__.get("_set", {})
            if name in own:
                return own[name]
            if name.startswith("_") or source is None:
                raise
        if name in READ_METHODS and callable(getattr(source.model, name, None)):
            return functools.partial(self._read, name)
        return attribute_of(source.model, name)

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run one of READ_METHODS on the original model. If it returns a layer, return this module's layer."""
        model = self.__dict__["_source"].model
        needed = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
        try:
            for path, parameter in self._local_parameters.items():
                model.get_parameter(path).requires_grad_(parameter.requires_grad)
            result = getattr(model, name)(*args, **kwargs)
        finally:
            for path, needs_grad in needed.items():
                model.get_parameter(path).requires_grad_(needs_grad)
        paths = {id(layer): path for path, layer in model.named_modules()}
        return self.get_submodule(paths[id(result)]) if isinstance(result, nn.Module) else result

    def __getitem__(self, index: Any) -> Any:
        """Return a layer, as `model[index]` does, if the model has numbered layers."""
        model = self.__dict__["_source"].model
        if not isinstance(model, (nn.Sequential, nn.ModuleList)) or not isinstance(index, (int, slice)):
            raise UsageError(
                f"a partitioned {type(model).__name__} has no pm[{index!r}]",
                why="its layers and parameters are accessed by name",
                hint="pm.get_parameter(name), or the model's own layers before parallelize()",
            )
        return item_of(self, index)


def patch_wrappers() -> None:
    """Make DDP, FSDP and similar wrappers reject partitioned models, and `torch.compile` warn.

    Without the patch, DDP and FSDP would treat this rank's shards as full parameters.
    """
    before_wrappers(refuse_wrapper)


def refuse_wrapper(modules: Any, wrapper: str) -> None:
    """Raise UsageError if one of the modules to wrap is, or contains, a partitioned model.

    If `wrapper` is the class of `torch.compile`, only warns that the model is not compiled.
    """
    if wrapper == "OptimizedModule":
        if isinstance(modules, ModuleMethods):
            warnings.warn(COMPILED, stacklevel=6)
        return
    for module in [modules] if isinstance(modules, nn.Module) else list(modules):
        if partitioned_in(module) is not None or isinstance(module, ModuleProxy):
            raise UsageError(
                f"{wrapper} cannot wrap a partitioned model",
                why="it would treat this rank's shards as full parameters",
                hint=WRAPPERS_HINT + (LIBRARIES_HINT if _is_unconnected("accelerate") else ""),
            )


def _is_unconnected(library: str) -> bool:
    """Return True if a training library was imported after `parallelize`, so that it is not connected."""
    return f"{library}.accelerator" in sys.modules and f"autopart.integrations.{library}" not in sys.modules


def partitioned_in(module: nn.Module) -> str | None:
    """Return the path of the first partitioned model at or below a module, or None."""
    pending = [("", module)]
    while pending:
        path, one = pending.pop()
        if isinstance(one, ModuleMethods):
            return path
        pending += [(f"{path}.{name}".lstrip("."), below) for name, below in one._modules.items() if below is not None]
    return None

"""Proxy modules for a model and its layers, with their classes, modes and attributes."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopart.compat.torch_function_internals import on_local_values
from autopart.errors import MissingAttribute, UsageError
from autopart.runtime.training.conversions import refuse_conversion, spelled_as
from autopart.runtime.training.layer_modes import LayerModes
from autopart.tracing.python.layer_settings import in_modes, is_plain

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_BUFFER_METHODS = {"reset_running_stats": nn.BatchNorm1d.reset_running_stats}
"""Methods of torch's layers that work on a LayerProxy too: they write only replicated buffers."""


READ_PROPERTIES = ("dtype", "is_activation_checkpointing", "is_gradient_checkpointing")
"""Properties of transformers models that do not change after the model is partitioned."""


class ModuleProxy(nn.Module):
    """Module that represents a model or one of its layers. Users can set its mode and plain attributes.

    Attributes:
        _path: path of the layer in the model.
        _set: {name: value} of attributes that were set after the model was partitioned.
    """

    _modes: LayerModes
    _path: str
    _set: dict[str, Any]

    def _init_proxy(self, path: str, layer: nn.Module, modes: LayerModes) -> None:
        """Copy the original layer's mode, and register None for its parameters and buffers that are None."""
        for local, original in ((self._parameters, layer._parameters), (self._buffers, layer._buffers)):
            local.update({name: None for name, value in original.items() if value is None})
        self.__dict__.update(_path=path, _set={}, training=layer.training, _modes=modes)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Set the mode of this module and its layers, as `train(mode=True)` of the original module does."""
        self._modes.set_mode(self, self._path, "train", args, kwargs)
        return self

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Set this module and its layers to evaluation mode, as `eval()` of the original module does."""
        self._modes.set_mode(self, self._path, "eval", args, kwargs)
        return self

    def extra_repr(self) -> str:
        """Return the `extra_repr` of the original layer, with the attributes that were set on this module."""
        with in_modes(self._modes.source.model, self._modes.root.training, self._modes.settings):
            return self._modes.layer(self._path).extra_repr()

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return this rank's shard of a parameter. Raises MissingAttribute if only other ranks store it."""
        try:
            return super().get_parameter(target)
        except AttributeError:
            path, _, name = f"{self._path}.{target}".lstrip(".").rpartition(".")
            if name in _layer_or_none(self._modes, path)._parameters:
                _refuse_elsewhere(self._modes, path, name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        modes = self.__dict__.get("_modes")
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if modes is None or (is_own and name != "training"):
            super().__setattr__(name, value)
        elif name == "training":
            self.__dict__["training"], modes.changed = bool(value), True
        elif modes.accepts(self._path, name, value):
            self._set[name], modes.changed = value, True
        else:
            if self._is_of_model(name) or isinstance(value, (nn.Module, nn.Parameter, nn.Buffer)):
                _refuse_change(f"setting '{name}'")
            super().__setattr__(name, value)

    def _is_of_model(self, name: str) -> bool:
        of_tree = name in self._modules or name in self._parameters or name in self._buffers
        return of_tree or name in vars(self._modes.layer(self._path))

    def __delattr__(self, name: str) -> None:
        if "_modes" in self.__dict__ and name not in self.__dict__ and self._is_of_model(name):
            _refuse_change(f"deleting '{name}'")
        super().__delattr__(name)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse_change(f"setting [{index!r}]")

    def __delitem__(self, index: Any) -> NoReturn:
        _refuse_change(f"deleting [{index!r}]")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Do nothing if this module already has this submodule under this name. Raise UsageError otherwise."""
        if module is None or self._modules.get(name) is not module:
            _refuse_change("add_module()")

    register_module = add_module

    def set_submodule(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_change("set_submodule()")

    def register_parameter(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_change("register_parameter()")

    def register_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_change("register_buffer()")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, because the option `compile` of `parallelize` compiles the stages instead."""
        raise UsageError("pm.compile() compiles nothing", why="pm(...) runs the graphs of the stages, not the modules",
                         hint="parallelize(..., compile=True)")  # fmt: skip

    def share_memory(self) -> NoReturn:
        raise UsageError(
            "a partitioned model has no share_memory()",
            why="the program uses the memory of the parameters",
            hint="share the memory of pm.full_state_dict()",
        )

    def to_empty(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "to_empty() of a partitioned model would lose its values",
            why="its programs use these tensors",
            hint="build the model on meta and call parallelize(model, mesh, weights=...)",
        )


class LayerProxy(ModuleProxy):
    """Layer of a partitioned model, with this rank's tensors and the original's class and attributes.

    `isinstance(pm.layers[0], nn.Linear)` is True. The layer cannot be called: its operators are part of the program.
    """

    def __init__(self, path: str, layer: nn.Module, modes: LayerModes) -> None:
        super().__init__()
        self.__dict__.update(_kind=type(layer), _version=layer._version, _is_plain=False)
        self._init_proxy(path, layer, modes)

    def _get_class(self) -> type:
        return LayerProxy if self.__dict__.get("_is_plain", True) else self.__dict__["_kind"]

    def _set_class(self, kind: type) -> NoReturn:
        _refuse_change("another class for a layer")

    __class__ = property(_get_class, _set_class)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "a layer of a partitioned model cannot be called alone",
            why="its operators are a part of the program that pm(...) runs",
            hint="call the layer of the unpartitioned model, or let forward() return what the layer computes",
        )

    @on_local_values
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the entries of `pm.state_dict()` for this layer, with names relative to the layer."""
        root = self._modes.root
        if (
            root is None or args or kwargs.get("destination") is not None
        ):  # torch calls this for the state dict of a module that contains this one
            return super().state_dict(*args, **kwargs)
        prefix, start = kwargs.pop("prefix", ""), f"{self._path}."
        of_model = root.state_dict(**kwargs)
        return {prefix + name[len(start) :]: value for name, value in of_model.items() if name.startswith(start)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by names relative to this layer, as `pm.load_state_dict` does."""
        start = f"{self._path}."
        given = {start + name: value for name, value in state_dict.items()}
        result = self._modes.root.load_state_dict(given, strict=False, assign=assign)
        missing = [name[len(start) :] for name in result.missing_keys if name.startswith(start)]
        unexpected = [name[len(start) :] for name in result.unexpected_keys]
        if strict and (missing or unexpected):
            raise UsageError(
                f"the state dict does not fit '{self._path}'", hint="load_state_dict(..., strict=False)",
                why=f"it lacks {missing} and has {unexpected} in addition",
            )  # fmt: skip
        return type(result)(missing, unexpected)

    @on_local_values
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_is_plain"] = True  # the partitioned model handles extra state of the user's classes
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            self.__dict__["_is_plain"] = False

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_is_plain"] = True  # as in _load_from_state_dict
        try:
            super()._save_to_state_dict(*args, **kwargs)
        finally:
            self.__dict__["_is_plain"] = False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        tensor = next(iter((*self.parameters(), *self.buffers())), None)
        if tensor is None:
            return self
        args_, kwargs_ = spelled_as(tensor.device, args, kwargs)
        return super().to(*args_, **kwargs_)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for tensor in (*self.parameters(), *self.buffers()):
            refuse_conversion(fn, tensor.dtype, tensor.device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own, modes = self.__dict__.get("_set", {}), self.__dict__.get("_modes")
            if name in own:
                return own[name]
            if modes is None:
                raise
        layer = modes.layer(self._path)
        if name in _BUFFER_METHODS and getattr(type(layer), name, None) is _BUFFER_METHODS[name]:
            return types.MethodType(_BUFFER_METHODS[name], self)
        if name in ("keys", "values", "items") and isinstance(layer, (nn.ModuleDict, nn.ParameterDict)):
            return getattr(_items(self), name)
        if name in layer._parameters:
            _refuse_elsewhere(modes, self._path, name)
        return attribute_of(layer, name, f"model.{self._path}")

    @on_local_values
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a layer of a partitioned model cannot be pickled", why="it holds the tensors of this rank",
                         hint="torch.save(pm.full_state_dict(), path)")  # fmt: skip

    def _is_of_model(self, name: str) -> bool:
        return not name.startswith("_") or super()._is_of_model(name)

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "a hook on a layer of a partitioned model would never run", why="its operators are a part of the program",
            hint="register it on the model before parallelize(), which traces it",
        )  # fmt: skip

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook


class ContainerProxy(LayerProxy):
    """Layer of a partitioned model whose original is a container, such as `nn.Sequential`.

    Only this class has container methods, because user code tests for them, as in `isinstance(layer, Iterable)`.
    """

    def __getitem__(self, index: Any) -> Any:
        return item_of(self, index)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self, (nn.ModuleDict, nn.ParameterDict)):
            return iter(self.keys())
        return iter(_items(self).values())

    def __len__(self) -> int:
        return len(_items(self))

    def __contains__(self, name: object) -> bool:
        return any(name == key or name is item for key, item in _items(self).items())

    def __bool__(self) -> bool:
        return True


def add_layers(root: ModuleProxy, modes: LayerModes) -> None:
    """Add a LayerProxy for each layer of the model that has no LayerProxy yet.

    A layer that has two names in the model gets one proxy.
    """
    branches: dict[int, ModuleProxy] = {id(modes.source.model): root}

    def add(branch: ModuleProxy, layer: nn.Module, path: str) -> None:  # in the order of `named_modules`
        for name, child in layer._modules.items():
            if child is None or id(child) in branches:
                branch._modules[name] = None if child is None else branches[id(child)]
                continue
            child_path, existing = f"{path}.{name}".lstrip("."), branch._modules.get(name)
            child_branch = existing if isinstance(existing, LayerProxy) else _proxy(child_path, child, modes)
            branch._modules[name] = branches[id(child)] = child_branch
            add(child_branch, child, child_path)

    add(root, modes.source.model, "")


def holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that contains the tensor `name`, and the last component of `name`."""
    *path, last = name.split(".")
    for part in path:
        # `_modules`, not `getattr`: a component may have the name of an attribute of ParallelModule.
        child = root._modules[part]
        assert child is not None
        root = child
    return root, last


def _proxy(path: str, layer: nn.Module, modes: LayerModes) -> LayerProxy:
    is_container = any(hasattr(type(layer), name) for name in ("__iter__", "__getitem__", "__len__"))
    return (ContainerProxy if is_container else LayerProxy)(path, layer, modes)


def item_of(module: ModuleProxy, index: Any) -> Any:
    """Return a layer or parameter of a container (`pm.layers[0]`) by index, slice or key."""
    items = _items(module)
    if isinstance(index, str) and index in items:
        return items[index]
    if isinstance(index, slice):
        layers = list(items.values())[index]
        kind = nn.Sequential if isinstance(module._modes.layer(module._path), nn.Sequential) else nn.ModuleList
        return nn.Sequential(*layers) if kind is nn.Sequential else nn.ModuleList(layers)
    if isinstance(index, int) and -len(items) <= index < len(items):
        return list(items.values())[index]
    raise IndexError(f"there is no layer {index!r}; the layers are {', '.join(items) or 'none'}")


def _items(module: ModuleProxy) -> dict[str, Any]:
    """Return the layers of a container, or the parameters of an `nn.ParameterList` or `nn.ParameterDict`."""
    layer = module._modes.layer(module._path)
    if isinstance(layer, (nn.ParameterList, nn.ParameterDict)):
        return {name: getattr(module, name) for name in layer._parameters}
    return {name: child for name, child in module._modules.items() if child is not None}


def attribute_of(layer: nn.Module, name: str, spoken: str = "model") -> Any:
    """Return a plain attribute of an original layer or model, such as its `config`.

    Raises MissingAttribute (an AttributeError) if the attribute is a method, a property, a tensor or a module, or does
    not exist.
    """
    kind = type(layer).__name__
    if name in READ_PROPERTIES and isinstance(getattr(layer, name, None), (torch.dtype, bool)):
        return getattr(layer, name)
    static = inspect.getattr_static(layer, name, None)
    own = name in vars(layer)
    is_value = own or not (callable(static) or hasattr(static, "__get__"))
    is_value = is_value and (static is not None or own) and not isinstance(static, (Tensor, nn.Module))
    if is_value and not callable(static) and (not name.startswith("_") or is_plain(static)):
        return static
    if name.startswith("_"):
        raise AttributeError(f"'{kind}' object has no attribute '{name}'")
    if static is None and type(layer).__getattr__ is not nn.Module.__getattr__:  # PEFT forwards to the inner model
        value = getattr(layer, name, None)
        if value is not None and not callable(value) and not isinstance(value, (Tensor, nn.Module)):
            return value
    if callable(static) and isinstance(layer, _CONTAINERS):
        raise MissingAttribute(
            f"a partitioned {kind} has no {name}()", why="the program was traced with the layers that the model had",
            hint="change the model before parallelize()",
        )  # fmt: skip
    if callable(static) and not isinstance(static, nn.Module):
        raise MissingAttribute(
            f"a partitioned model has no {name}()",
            why=f"{kind}.{name} runs the model's own code, on full weights",
            hint=f"model.load_state_dict(pm.full_state_dict()); {spoken}.{name}(...)",
        )
    hint = f"use the model's own: {spoken}.{name}" if hasattr(type(layer), name) else f"{kind} has none either"
    hint = "next(pm.parameters()).dtype" if name == "dtype" else hint
    raise MissingAttribute(f"a partitioned {kind} has no attribute '{name}'", hint=hint)


def _layer_or_none(modes: LayerModes, path: str) -> nn.Module:
    try:
        return modes.layer(path)
    except AttributeError:
        return nn.Module()


def _refuse_elsewhere(modes: LayerModes, path: str, name: str) -> NoReturn:
    """Raise MissingAttribute for a parameter that other ranks store, or before the model is traced."""
    if modes.root is not None and modes.root._program is None:
        raise MissingAttribute(
            f"'{name}' is not available yet", why="the model is traced at the first call, and partitioned then",
            hint="parallelize(model, mesh, example_kwargs=batch), or call the module once before",
        )  # fmt: skip
    raise MissingAttribute(
        f"'{path}.{name}' is not on this rank".replace("'.", "'"), why="each rank holds the parameters of its stages",
        hint="pm.full_state_dict() has the parameters of all stages, on every rank",
    )  # fmt: skip


def _refuse_change(what: str) -> NoReturn:
    raise UsageError(
        f"{what} of a partitioned model would change nothing", why="the program was traced from the original model",
        hint="change the model before parallelize(); to change values, use pm.load_state_dict(...)",
    )  # fmt: skip

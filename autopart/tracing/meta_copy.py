"""Copies of a model without parameter values, for traces after the parameters were sharded.

While the user's own code refers to the model, the model itself is traced. When the user drops it, its memory is freed
and the copy is traced instead. The copy has equal modules and buffers. Its sharded parameters have a shape and a
device, but empty storage. (Parameters on the meta device could not be mixed with the buffers in a trace.)
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopart.common.empty_tensors import emptied
from autopart.tracing.python.hidden_tensors import content_of, places_of, put_content

_LISTS: tuple[Any, ...] = list, tuple, set, frozenset
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device)
_MODULES_OWN = frozenset(vars(nn.Module()))


class Source:
    """The model that is traced for later calls: the user's model, or its copy without parameter values.

    The user's model is kept alive until its parameters are sharded. After that, only the user's references keep it
    alive.
    """

    def __init__(self, model: nn.Module):
        self._held: nn.Module | None = model
        self._own: weakref.ref[nn.Module] = weakref.ref(model)
        self._skeleton: nn.Module | None = None

    @property
    def model(self) -> nn.Module:
        """The user's model, or its copy if the user's model was freed."""
        known = (self._held, self._own(), self._skeleton)
        return next(model for model in known if model is not None)

    def let_go(self, cut: Collection[str]) -> None:
        """Release the user's model: from now on, a copy without the values of the named parameters is traced.

        If the model cannot be copied, warns and keeps the model.

        Args:
            cut: names of the parameters that are sharded.
        """
        try:
            self._skeleton = meta_copy_of(self.model, cut)
            self._held = None
        except CannotCopy as error:
            self._held = self.model
            warnings.warn(
                f"every rank keeps the full {type(self.model).__name__} in memory in addition to its shards: {error}.",
                stacklevel=2,
            )


class CannotCopy(Exception):
    """Error: a model cannot be copied without its parameter values. The text is the reason."""


def copy_of(model: nn.Module, shared: dict[int, Any]) -> nn.Module:
    """Deep-copy a model. `shared`: {id of an object of the model: its object in the copy}.

    Objects that cannot be copied are shared with the model: TorchScript functions, locks, open files. Non-leaf tensors,
    which `copy.deepcopy` rejects, are copied by value.
    """
    for thing in _reachable(model):
        if _is_tensor(thing) and thing.requires_grad and not thing.is_leaf:
            shared.setdefault(id(thing), thing.detach().clone())
    try:
        return _deep_copy(model, dict(shared))
    except Exception:  # an attribute of a user's module may raise anything when it is copied
        for thing in reversed(list(_reachable(model))):  # innermost modules first
            if not isinstance(thing, (nn.Module, Tensor, dict, list, tuple, set)) and not _can_be_copied(thing, shared):
                shared.setdefault(id(thing), thing)
        return _deep_copy(model, shared)


def _deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a model together with the functions that close over parts of it, such as its hooks.

    Python's `deepcopy` shares functions: a hook of the copy would write to the original. An object that only such
    functions refer to is shared by model and copy: methods of a class, which are not copied, may use it too.
    """
    functions = [
        thing for thing in _reachable(model)
        if isinstance(thing, types.FunctionType) and (thing.__closure__ or thing.__defaults__ or thing.__kwdefaults__)
    ]  # fmt: skip
    copies = {}
    for function in functions:
        cells = function.__closure__ and tuple(types.CellType() for _ in function.__closure__)
        copies[id(function)] = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells
        )
    memo |= copies
    copied = copy.deepcopy(model, memo)
    parts = {key for key, value in memo.items() if key not in copies and id(value) != key}

    def in_copy(thing: Any) -> Any:
        """Return the copy of an object to which a function refers."""
        if id(thing) in memo:
            return memo[id(thing)]
        return copy.deepcopy(thing, memo) if any(id(part) in parts for part in _reachable(thing)) else thing

    for function in functions:
        new = copies[id(function)]
        functools.update_wrapper(new, function, functools.WRAPPER_ASSIGNMENTS)
        new.__defaults__ = in_copy(function.__defaults__)
        new.__kwdefaults__ = in_copy(function.__kwdefaults__)
        for cell, own in zip(new.__closure__ or (), function.__closure__ or (), strict=True):
            if _is_set(own):
                cell.cell_contents = in_copy(own.cell_contents)
    return copied


@contextmanager
def references_to_copy(source: nn.Module, copied: nn.Module) -> Iterator[None]:
    """Replace modules of a model by those of its copy, in objects that model and copy share.

    Such an object is, for example, a list of instances that is an attribute of a class. The old references are restored
    at the end of the `with` block.
    """
    copies = dict(copied.named_modules())
    modules = {id(module): copies[path] for path, module in source.named_modules() if path in copies}
    shared = {id(place) for place in places_of(source)}
    found = []
    for place in places_of(copied):
        content = content_of(place) if id(place) in shared else {}
        if replaced := {key: modules[id(value)] for key, value in content.items() if id(value) in modules}:
            found.append((place, content, replaced))
    try:
        for place, content, replaced in found:
            put_content(place, {**content, **replaced}, list(replaced))
        yield
    finally:
        for place, content, replaced in found:
            put_content(place, content, list(replaced))


def _can_be_copied(thing: Any, shared: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(thing, dict(shared))
    except Exception:  # as above
        return False
    return True


def has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor has values: it is not on meta, and not a parameter with empty storage."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return not tensor.is_meta
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def meta_copy_of(
    model: nn.Module, cut: Collection[str], instead: Mapping[int, Tensor] | None = None
) -> nn.Module:  # fmt: skip
    """Return a copy of a model that shares the model's tensors, except the parameters named in `cut`.

    The storage of these parameters is empty in the copy.

    Args:
        instead: replacements for tensors of the model in the copy, by id.
    Raises CannotCopy if the copy would differ from the model, or would refer to the original's parameters.
    """
    try:
        shared, originals = _twins(model, cut, instead or {})
        copied = copy_of(model, shared)
    except Exception as error:  # an attribute of a user's module may raise anything when it is copied
        raise CannotCopy(f"it cannot be copied ({type(error).__name__}: {str(error)[:100]})") from error
    if _named(copied) != _named(model):
        raise CannotCopy("its copy has other parameters or buffers")
    whole = next((name for name, p in copied.named_parameters() if name in cut and p.untyped_storage().nbytes()), None)
    if whole is not None:
        raise CannotCopy(f"its copy contains a second copy of the parameter '{whole}'")
    held = next((thing for thing in _reachable(copied) if id(thing) in originals), None)
    if held is not None:
        raise CannotCopy(f"its copy still refers to {_spoken(held, model)}")
    return copied


def _twins(
    model: nn.Module, cut: Collection[str], instead: Mapping[int, Tensor]
) -> tuple[dict[int, Any], dict[int, Any]]:  # fmt: skip
    """Return {id: object to use in the copy} and {id: object to which the copy must not refer}."""
    twins: dict[int, Any] = dict(instead)
    originals: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in twins:
            twins[id(parameter)] = emptied(parameter) if name in cut else parameter
        if name in cut:
            originals[id(parameter)] = parameter
    for module in model.modules():
        originals[id(module)] = module
        for tensor in filter(_is_tensor, (*module._buffers.values(), *vars(module).values())):
            computed = tensor.requires_grad and not tensor.is_leaf  # a hook computes it before every forward
            twins.setdefault(id(tensor), emptied(tensor.detach()) if computed else tensor)
        for name, value in vars(module).items():  # the user may change them: a config, a dict of settings
            if name not in _MODULES_OWN and _is_settings(value):
                twins.setdefault(id(value), value)
    return twins, originals


def _is_settings(value: Any) -> bool:
    """Return True for an object or container that refers to no tensor, module or function."""
    if isinstance(value, _PLAIN):
        return False
    return not any(isinstance(thing, (Tensor, nn.Module, types.FunctionType)) for thing in _reachable(value))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _named(model: nn.Module) -> list[tuple[str, int]]:
    """Return (name, number) of all parameters and buffers. The names of a tied tensor share one number."""
    first: dict[int, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, first.setdefault(id(tensor), number)) for number, (name, tensor) in enumerate(tensors)]


def _reachable(root: Any) -> Iterator[Any]:
    """Return the objects that an object references: attributes, container entries, closures of functions."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if isinstance(thing, _PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        todo += _parts(thing)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell)]
        return [*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), vars(thing)]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    for kind in _LISTS:
        if isinstance(thing, kind):
            return [*kind.__iter__(thing)]  # a user's class may have no length (e3nn's Irrep)
    return [vars(thing)] if hasattr(thing, "__dict__") else []


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _spoken(thing: Any, model: nn.Module) -> str:
    if isinstance(thing, nn.Module):
        name = next((name for name, module in model.named_modules() if module is thing), "")
        return f"the model's own module '{name}'" if name else "the model itself"
    name = next((name for name, parameter in model.named_parameters() if parameter is thing), "")
    return f"its parameter '{name}'"

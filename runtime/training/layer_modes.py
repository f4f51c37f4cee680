"""Train or eval mode of the layers of a partitioned model, and attributes with immutable values.

If a setting changes, the model is traced again. All ranks must have equal settings, so the ranks compare them.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from autopart.tracing.meta_copy import Source
from autopart.tracing.python.layer_settings import (
    LayerSetting,
    Settings,
    in_modes,
    is_plain,
    plain_attributes,
    restore_attributes,
)

_MISSING = object()


class LayerModes:
    """Train or eval modes and attributes that users set on a partitioned model and its layers.

    The partitioned model has one module per layer of the original model, called a branch. A branch stores its mode in
    `training` and the attributes that users have set in `_set`. `settings` collects both from all branches, if they
    have changed since `settings` was last used.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.changed = True
        self._root: Callable[[], Any] = lambda: None
        self._settings, self._text = Settings(), ""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerModes:
        """Return a new object for a copy of the partitioned model. `attach` must connect it to the copy."""
        copied = memo[id(self)] = LayerModes(self.source)
        return copied

    def attach(self, root: nn.Module) -> None:
        """Use `root` as the partitioned model whose modes and attributes `settings` collects."""
        self._root, self.changed = weakref.ref(root), True

    @property
    def root(self) -> Any:
        """The partitioned model. None if only a single layer of it was copied."""
        return self._root()

    def layer(self, path: str) -> nn.Module:
        """Return the layer of the original model at a path."""
        return self.source.model.get_submodule(path)

    def accepts(self, path: str, name: str, value: Any) -> bool:
        """Return True if the layer has this attribute, and its old and new values are immutable."""
        layer = self.layer(path)
        static = vars(layer).get(name, inspect.getattr_static(type(layer), name, _MISSING))
        return is_plain(value) and is_plain(static)

    @property
    def settings(self) -> Settings:
        """Modes of layers that differ from the model's mode, and attributes that users have changed."""
        if self.changed:
            self._collect()
        return self._settings

    @property
    def text(self) -> str:
        """Settings as text, which ranks compare, such as "train mode, encoder in eval mode"."""
        if self.changed:
            self._collect()
        return self._text

    def _collect(self) -> None:
        branches, layers = dict(branches_of(self.root)), dict(self.source.model.named_modules())
        others = sorted(path for path, branch in branches.items() if branch.training != self.root.training)
        values = [
            LayerSetting(path, name, repr(value), value)
            for path, branch in branches.items()
            for name, value in branch._set.items()
            if name not in vars(layers[path]) or repr(vars(layers[path])[name]) != repr(value)
        ]
        self._settings = Settings(tuple(others), tuple(sorted(values, key=lambda setting: setting[:3])))
        mode, other = ("train", "eval") if self.root.training else ("eval", "train")
        texts = [f"{mode} mode"]
        texts += [f"{path} in {other} mode" for path in _subtrees(branches, others)]
        texts += [f"{path}.{name}={text}".lstrip(".") for path, name, text, _ in self._settings.values]
        self._text, self.changed = ", ".join(texts), False

    def set_mode(
        self, branch: nn.Module, path: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Set the mode of a module of the partitioned model and of all modules inside it.

        If the original layer or a layer inside it overrides `train` or `eval`, the override decides which modes are
        set. For example, an override of `train` may keep batch norms in eval mode.

        Args:
            branch: the module of the partitioned model.
            path: path of the original layer.
            name: the method that the user called, "train" or "eval".
            args, kwargs: arguments of that call.
        """
        layer = self.layer(path)
        if self.root is None or not any(map(_has_own_modes, layer.modules())):
            mode = _mode_of(*args, **kwargs) if name == "train" else _no_mode(*args, **kwargs)
            for _, below in branches_of(branch):
                below.__dict__["training"] = mode
        else:
            self._call_own(layer, name, args, kwargs)
        self.changed = True

    def _call_own(self, layer: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run a user-defined `train` or `eval` on the original model.

        Before the call, the original model gets the modes and attributes of the partitioned model. The user's method
        may change modes, attributes with immutable values, and `requires_grad`. These changes are copied to the
        partitioned model. Afterwards, the state of the original model is restored.
        """
        model, root = self.source.model, self.root
        layers, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
        local = dict(nn.Module.named_parameters(root, remove_duplicate=False)) if root._local_parameters else {}
        own_needs = {path: parameter.requires_grad for path, parameter in parameters.items()}
        trained = {path: local[path].requires_grad if path in local else own_needs[path] for path in parameters}
        before = {path: plain_attributes(own) for path, own in layers.items()}
        branches = dict(branches_of(root))
        try:
            with in_modes(model, root.training, self.settings):
                for path, parameter in parameters.items():
                    parameter.requires_grad_(trained[path])
                inside = {path: plain_attributes(own) for path, own in layers.items()}
                getattr(layer, name)(*args, **kwargs)
                after = {path: plain_attributes(own) for path, own in layers.items()}
                needs_grad = {path: parameter.requires_grad for path, parameter in parameters.items()}
        finally:
            for path, own in layers.items():
                restore_attributes(own, before[path])
            for path, parameter in parameters.items():
                parameter.requires_grad_(own_needs[path])
        for path, values in after.items():
            branches[path].__dict__["training"] = values.pop("training")
            had = {key: repr(value) for key, value in inside[path].items()}
            branches[path]._set.update({key: value for key, value in values.items() if had.get(key) != repr(value)})
        for path, needs in needs_grad.items():
            if needs != trained[path] and path in local:
                local[path].requires_grad_(needs)


def branches_of(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, module) of a partitioned model, or a layer of it, and of all modules inside."""
    pending, seen = [root], {id(root)}
    while pending:
        module: Any = pending.pop()
        yield module._path, module
        children = [child for child in module._modules.values() if child is not None and id(child) not in seen]
        seen.update(map(id, children))
        pending += children


def _subtrees(paths: Collection[str], others: Collection[str]) -> Iterator[str]:
    """Yield texts that name the layers whose mode differs from the model's mode.

    "encoder" names the layer and all layers inside it, if the modes of all of them differ. "encoder itself" names the
    layer only, if some layer inside it has the model's mode.

    Args:
        paths: paths of all layers.
        others: paths of the layers whose mode differs.
    """
    below, others_below = Counter[str](), Counter[str]()
    for path in filter(None, paths):
        components = path.split(".")
        ancestors = [".".join(components[:length]) for length in range(1, len(components) + 1)]
        below.update(ancestors)
        others_below.update(ancestors if path in others else ())
    complete = {path for path in others if below[path] == others_below[path]}
    for path in others:
        components = path.split(".")
        if complete.isdisjoint(".".join(components[:length]) for length in range(1, len(components))):
            yield path if path in complete else f"{path} itself"


def _has_own_modes(layer: nn.Module) -> bool:
    """Return True if the class or the user overrides `train` or `eval` of `nn.Module`."""
    kind, own = type(layer), vars(layer)
    is_own = kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
    return is_own or "train" in own or "eval" in own


def _mode_of(mode: bool = True) -> bool:
    if not isinstance(mode, bool):
        raise ValueError("training mode is expected to be boolean")  # torch's error text
    return mode


def _no_mode() -> bool:
    return False

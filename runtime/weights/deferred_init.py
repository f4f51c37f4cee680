"""The weights that a model's constructor makes, of which a rank keeps its shards: one tensor at a time is in memory.

The constructor itself runs, with the random numbers of a run on one device. When it goes on to other parameters, the
memory of earlier ones is given back, and only this rank's shard of them is kept. An initialisation that fills a
parameter again (transformers does that at the end) begins with new memory.
"""

from __future__ import annotations

import ctypes
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from autopart.common.scoped import default_dtype
from autopart.compat.torch_internals import TorchDispatchMode, operator_name, tree_flatten
from autopart.ir.sharding import Cut, part_of

Cuts = Sequence[tuple[Cut, int]]
"""How a tensor is cut, and the index of the shard in each cut; none: it is whole."""
FREED_BYTES = 2**26
Build = Callable[[], nn.Module]
Shard = Callable[[Sequence[str], Tensor], dict[str, Tensor]]
"""From a parameter, under some names, to what is kept of it under these."""

_FILLS = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_"}
    | {"uniform_", "zero_"}
)
"""Operators that overwrite a tensor and do not read it."""
_READ_FORM = frozenset(
    {"detach", "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like"}
    | {"rand_like", "randn_like", "zeros_like"}
)
"""Operators that read the shape of a tensor and no values."""


class ReadsEarlier(Exception):
    """The constructor reads values of a parameter that are no longer in memory."""


def constructor_of(model: nn.Module) -> Build | None:
    """What makes such a model from its config, as transformers' classes do; None where that is not known."""
    kind, config = type(model), getattr(model, "config", None)
    if config is None:
        return None
    try:
        inspect.signature(kind).bind(config)
    except (TypeError, ValueError):
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if getattr(config, "dtype", None) != dtype:  # where it is, the model was made in it (`from_config`)
        dtype = None

    def build() -> nn.Module:
        with default_dtype(dtype):
            return kind(deepcopy(config))

    return build


class Constructor:
    """Runs a constructor with the random numbers that torch's generator on the host gives now; it stays as it is.

    `draws_matter`: whether buffers with random values must be those of a run on one device.
    `buffers`: what the constructed model has beside parameters, also plain tensors as attributes, by name.
    `shapes`: of its parameters, under all their names.
    """

    def __init__(self, build: Build, draws_matter: bool = True):
        self.build = build
        self.random_state = torch.get_rng_state()
        self.order: list[tuple[str, ...]] = []
        self.buffers: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._at_once = False
        if not self._survey(draws_matter):
            self._run(lambda names, full: {}, ())

    def read(self, cuts: Mapping[str, Cuts]) -> dict[str, Tensor]:
        """{name: this rank's shard} in the dtype in which the constructor makes it."""

        def shard(names: Sequence[str], full: Tensor) -> dict[str, Tensor]:
            return {name: part_of(full.detach(), cuts[name]).clone() for name in cuts.keys() & set(names)}

        return self._run(shard, cuts)

    def _run(self, shard: Shard, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Run the constructor, and keep what `shard` makes of each parameter."""
        run = _OneAtATime(self.order, shard)
        try:
            if not self._at_once:
                with self._running(run.register), run:
                    model = self.build()
                kept = run.finish(model, wanted)
                self._note(model, run.registered)
                return kept
        except Exception:  # a constructor may raise its own in place of ours
            if not run.problem:
                raise
            self._at_once = True
            warnings.warn(f"every rank holds the whole model while its weights are made: {run.problem}.", stacklevel=2)
        with self._running(lambda *_: None):
            model = self.build()
        self._note(model, ())
        named = dict(model.named_parameters(remove_duplicate=False))
        return {name: value for one in wanted for name, value in shard([one], named[one]).items()}

    def _survey(self, draws_matter: bool) -> bool:
        """Find the buffers and the order of parameters, with parameters that have no memory. Whether these are the
        buffers of a run with parameters: not where random numbers are drawn, or values of parameters are read."""
        parameters: list[nn.Parameter] = []

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None or parameter.is_meta:
                return None
            parameters.append(_on_meta(parameter))
            return parameters[-1]

        with self._running(register):
            try:
                model = self.build()
            except Exception:  # whatever a user's constructor does with values
                return False
            drew = not torch.equal(torch.get_rng_state(), self.random_state)
        self._note(model, parameters)
        return not (drew and draws_matter)

    def _note(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.order = _names(model, parameters)
        self.buffers = held_tensors(model)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}

    @contextmanager
    def _running(self, register: Callable[..., Any]) -> Iterator[None]:
        hook = register_module_parameter_registration_hook(register)
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.set_rng_state(self.random_state)
                yield
        finally:
            hook.remove()


@dataclass
class _Tracked:
    """A parameter that was registered: its number, and the shards that were kept when its memory was given back."""

    number: int
    parameter: nn.Parameter
    size_bytes: int
    kept: dict[str, Tensor] = field(default_factory=dict)


class _OneAtATime(TorchDispatchMode):
    """Inside, parameters have memory only while they are worked on, and a few earlier ones, no more than the largest.

    `order`: the names of the parameters, in the order in which they are registered. `shard`: what is kept of each.
    `problem`: why it cannot be, once that is known.
    """

    def __init__(self, order: Sequence[tuple[str, ...]], shard: Shard):
        super().__init__()
        self.order, self.shard = order, shard
        self.registered: list[nn.Parameter] = []
        self._tracked: dict[int, _Tracked] = {}
        self._open: dict[int, int] = {}  # {storage: its bytes}, the one used last at the end
        self._freed_bytes = 0
        self.problem = ""

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """For each registration of a parameter in a module."""
        if parameter is None or parameter.is_meta or _storage(parameter) in self._tracked:
            return
        self.registered.append(parameter)
        storage = parameter.untyped_storage()
        if storage.resizable() and storage.nbytes() == parameter.numel() * parameter.itemsize:
            key = _storage(parameter)
            self._tracked[key] = _Tracked(len(self.registered) - 1, parameter, storage.nbytes())
            self._use([key])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        if not func.is_view and name not in _READ_FORM:
            tensors = [leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, Tensor)]
            used = {_storage(tensor): tensor for tensor in reversed(tensors) if _storage(tensor) in self._tracked}
            for key, tensor in used.items():
                fills = name in _FILLS and tensor is args[0] and not any(tensor is other for other in tensors[1:])
                whole = tensor.numel() == self._tracked[key].parameter.numel()
                if key not in self._open and not (fills and whole):
                    self.problem = f"its constructor comes back to a parameter of {list(tensor.shape)} ({name})"
                    raise ReadsEarlier
            self._use(list(used))
        return func(*args, **(kwargs or {}))

    def finish(self, model: nn.Module, wanted: Iterable[str]) -> dict[str, Tensor]:
        """{name: what is kept} of the model that was made."""
        if self.problem:  # and the constructor went on
            raise ReadsEarlier
        named = dict(model.named_parameters(remove_duplicate=False))
        kept = {}
        for name in wanted:
            parameter = named[name]
            tracked = self._tracked.get(_storage(parameter))
            if tracked is None or _storage(parameter) in self._open:
                kept.update(self.shard([name], parameter))
            elif name in tracked.kept and tracked.parameter.shape == parameter.shape:
                kept[name] = tracked.kept[name]
            else:
                self.problem = f"its constructor gives '{name}' its values in a way that is not followed"
                raise ReadsEarlier
        return kept

    def _use(self, keys: Sequence[int]) -> None:
        """Have memory for these, and give back that of others where there is too much."""
        self._open = {key: size for key, size in self._open.items() if key not in keys}
        largest = max((tracked.size_bytes for tracked in self._tracked.values()), default=0)
        coming = sum(self._tracked[key].size_bytes for key in keys)
        while self._open and coming + sum(self._open.values()) > largest:
            self._close(next(iter(self._open)))
        for key in keys:
            tracked = self._tracked[key]
            tracked.kept = {}
            self._open[key] = tracked.size_bytes
            storage = tracked.parameter.untyped_storage()
            if storage.nbytes() != tracked.size_bytes:
                storage.resize_(tracked.size_bytes)

    def _close(self, key: int) -> None:
        tracked = self._tracked[key]
        names = self.order[tracked.number] if tracked.number < len(self.order) else ()
        with torch.no_grad():
            tracked.kept = self.shard(names, tracked.parameter)
        del self._open[key]
        tracked.parameter.untyped_storage().resize_(0)
        self._freed_bytes += tracked.size_bytes
        if self._freed_bytes > FREED_BYTES:
            _give_back_freed()
            self._freed_bytes = 0


def _give_back_freed() -> None:
    """Let the system have what was freed: glibc keeps blocks of up to 32 MB, and does not use aligned ones again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """{name: tensor} of what a model has beside parameters, under all names: buffers, and attributes of its modules."""
    held = dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                held[f"{path}.{name}".removeprefix(".")] = value
    return held


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    vars(twin).update(vars(parameter))
    return twin


def _names(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[str, ...]]:
    """The names in the model of each of these parameters; none where it is not there."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(names.get(id(parameter), ())) for parameter in parameters]


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor is in; 0 of one without."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0

"""Deferred initialisation: run a constructor with few parameters in memory, and keep only shards.

The constructor runs unmodified, with the random numbers of a run on one device. While it fills some parameters, the
memory of earlier parameters is freed, except this rank's shards of them. If the constructor fills a freed parameter
again (transformers does so at the end), the parameter gets new memory.
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
from autopart.ir.sharding import DimSharding, local_shard_of

LocalSplits = Sequence[tuple[DimSharding, int]]
"""Splits of a tensor that give this rank's shard: [(split, index of the shard)].

Empty if it is unsharded.
"""
FREED_BYTES = 2**26
Build = Callable[[], nn.Module]
Shard = Callable[[Sequence[str], Tensor], dict[str, Tensor]]
"""Function that maps (names of a parameter, the parameter) to {name: shard to keep}."""

_FILLS = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_"}
    | {"uniform_", "zero_"}
)
"""Operators that overwrite a tensor without reading it."""
_READ_SHAPE = frozenset(
    {"detach", "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like"}
    | {"rand_like", "randn_like", "zeros_like"}
)
"""Operators that use the shape of a tensor, but no values."""


class ReadsEarlier(Exception):
    """Raised if the constructor reads values of a parameter that is no longer in memory."""


def constructor_of(model: nn.Module) -> Build | None:
    """Return a function that constructs the model from its class and its config, as in transformers.

    Returns None if the model has no config, or if its class cannot be called with only the config.
    """
    kind, config = type(model), getattr(model, "config", None)
    if config is None:
        return None
    try:
        inspect.signature(kind).bind(config)
    except (TypeError, ValueError):
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if getattr(config, "dtype", None) != dtype:  # a config with a dtype: `from_config` created the model in this dtype
        dtype = None

    def build() -> nn.Module:
        with default_dtype(dtype):
            return kind(deepcopy(config))

    return build


class Constructor:
    """Runner of a model's constructor. All runs start from one state of torch's CPU random generator.

    This is the generator's state when the object is created. Each run restores the generator's state at its end.

    Args:
        draws_matter: True if buffers with random values must have the values of a run on one device.

    Attributes:
        buffers: {name: tensor} of the constructed model's buffers and plain tensor attributes.
        shapes: {name: shape} of its parameters, under all their names.
    """

    def __init__(self, build: Build, draws_matter: bool = True):
        self.build = build
        self.random_state = torch.get_rng_state()
        self.order: list[tuple[str, ...]] = []
        self.buffers: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._at_once = False
        if not self._run_on_meta(draws_matter):
            self._run(lambda names, full: {}, ())

    def read(self, cuts: Mapping[str, LocalSplits]) -> dict[str, Tensor]:
        """Construct the model. Return {name: this rank's shard} for the names in `cuts`.

        The shards have the dtypes of the constructed parameters.
        """

        def shard(names: Sequence[str], full: Tensor) -> dict[str, Tensor]:
            return {name: local_shard_of(full.detach(), cuts[name]).clone() for name in cuts.keys() & set(names)}

        return self._run(shard, cuts)

    def _run(self, shard: Shard, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Run the constructor. Return {name: shard} for the names in `wanted`, as `shard` computes them."""
        run = _OneAtATime(self.order, shard)
        try:
            if not self._at_once:
                with self._running(run.register), run:
                    model = self.build()
                shards = run.finish(model, wanted)
                self._note(model, run.registered)
                return shards
        except Exception:  # a constructor may replace ReadsEarlier by another exception
            if not run.problem:
                raise
            self._at_once = True
            warnings.warn(
                f"every rank stores the full model while its weights are initialised: {run.problem}.", stacklevel=2
            )
        with self._running(lambda *_: None):
            model = self.build()
        self._note(model, ())
        named = dict(model.named_parameters(remove_duplicate=False))
        return {name: value for one in wanted for name, value in shard([one], named[one]).items()}

    def _run_on_meta(self, draws_matter: bool) -> bool:
        """Run the constructor with meta parameters, to find its buffers and the order of its parameters.

        Returns False if the buffers can differ from a real run, because the constructor reads values of parameters or
        draws random numbers.
        """
        parameters: list[nn.Parameter] = []

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None or parameter.is_meta:
                return None
            parameters.append(_on_meta(parameter))
            return parameters[-1]

        with self._running(register):
            try:
                model = self.build()
            except Exception:  # a user's constructor may raise anything when it uses values
                return False
            drew = not torch.equal(torch.get_rng_state(), self.random_state)
        self._note(model, parameters)
        return not (drew and draws_matter)

    def _note(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.order = _names(model, parameters)
        self.buffers = buffers_and_attributes(model)
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
    """A parameter of the constructor, with this rank's shards of it while its memory is freed."""

    number: int
    parameter: nn.Parameter
    size_bytes: int
    kept: dict[str, Tensor] = field(default_factory=dict)


class _OneAtATime(TorchDispatchMode):
    """Dispatch mode in which only the parameters that the constructor used last have memory.

    Together they are no larger than the largest parameter, unless one operator uses more.

    Attributes:
        order: tuple of names of each parameter, in order of registration.
        shard: function that computes this rank's shards of a parameter.
        problem: reason why the constructor cannot run in this mode, or "".
    """

    def __init__(self, order: Sequence[tuple[str, ...]], shard: Shard):
        super().__init__()
        self.order, self.shard = order, shard
        self.registered: list[nn.Parameter] = []
        self._tracked: dict[int, _Tracked] = {}
        self._open: dict[int, int] = {}  # {storage in memory: its bytes}, most recently used last
        self._freed_bytes = 0
        self.problem = ""

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Start to manage the memory of a parameter. It is called when a module registers the parameter."""
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
        if not func.is_view and name not in _READ_SHAPE:
            tensors = [leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, Tensor)]
            used = {_storage(tensor): tensor for tensor in reversed(tensors) if _storage(tensor) in self._tracked}
            for key, tensor in used.items():
                fills = name in _FILLS and tensor is args[0] and not any(tensor is other for other in tensors[1:])
                is_full = tensor.numel() == self._tracked[key].parameter.numel()
                if key not in self._open and not (fills and is_full):
                    self.problem = f"its constructor uses an earlier parameter of {list(tensor.shape)} again ({name})"
                    raise ReadsEarlier
            self._use(list(used))
        return func(*args, **(kwargs or {}))

    def finish(self, model: nn.Module, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Return {name: shard} of the constructed model, for the names in `wanted`."""
        if self.problem:  # the constructor has caught the exception and gone on
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
                self.problem = f"its constructor sets the values of '{name}' in an unsupported way"
                raise ReadsEarlier
        return kept

    def _use(self, keys: Sequence[int]) -> None:
        """Allocate memory for these parameters. Free the memory of the least recently used parameters."""
        self._open = {key: size for key, size in self._open.items() if key not in keys}
        largest = max((tracked.size_bytes for tracked in self._tracked.values()), default=0)
        needed_bytes = sum(self._tracked[key].size_bytes for key in keys)
        while self._open and needed_bytes + sum(self._open.values()) > largest:
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
            _trim_memory()
            self._freed_bytes = 0


def _trim_memory() -> None:
    """Return freed memory to the operating system.

    Otherwise glibc holds on to freed blocks of up to 32 MB, and does not reuse aligned blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def buffers_and_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of a model's buffers, and of tensors that are plain attributes of modules."""
    tensors = dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                tensors[f"{path}.{name}".removeprefix(".")] = value
    return tensors


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    vars(twin).update(vars(parameter))
    return twin


def _names(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[str, ...]]:
    """Return, for each parameter, the tuple of its names in the model; () if the model lacks it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(names.get(id(parameter), ())) for parameter in parameters]


def _storage(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage; 0 for a tensor without storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0

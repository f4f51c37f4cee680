"""The option `weights=`: parameters from files or a constructor. A rank materialises only its shards.

The user's model defines shapes and names. It is traced as a meta copy, in which parameters have no memory. Buffers are
replicated, so the copy has them in memory.
"""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopart.common.empty_tensors import emptied
from autopart.common.hub import Pretrained, pretrained_folder
from autopart.errors import AutopartError, CheckpointError
from autopart.ir.graph import DTYPE_NAMES
from autopart.ir.sharding import boxes, local_shard_of, spans_of
from autopart.runtime.weights import transformers_names
from autopart.runtime.weights.deferred_init import Constructor, LocalSplits, buffers_and_attributes, constructor_of
from autopart.runtime.weights.lazy_tensors import LazyTensor
from autopart.runtime.weights.safetensors_files import SafetensorsFiles, listing
from autopart.tracing.meta_copy import CannotCopy, has_memory, meta_copy_of

INIT = "init"
SUBJECT = "weights="
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
"""Dtypes between which weights are converted on loading.

8-bit dtypes of quantized checkpoints are not included, because they need their scales.
"""
COMPARED_BYTES = 2**24


class WeightSource(Protocol):
    """Source of weights: files, or a constructor.

    Attributes:
        subject: (name, text) of what the ranks compare, so that all load the same weights.
        notes: warnings for the user.
    """

    @property
    def subject(self) -> tuple[str, str]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def non_parameters(self) -> Mapping[str, Tensor]:
        """Return {name: tensor} of buffers and of tensors that are plain attributes of modules."""

    def read(self, cuts: Mapping[str, LocalSplits]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's shard in CPU memory) for the parameters in `cuts`."""


class Weights:
    """Weights of a model, as the option `weights=` defines them.

    Attributes:
        model: meta copy of the user's model, or the user's model if there is a problem.
        problem: error if the weights cannot be used. The error is raised (by `check`) only after the ranks have
            compared their calls. Otherwise the other ranks would wait for this rank in the comparison.
    """

    def __init__(self, model: nn.Module, source: str | Path | Callable[[], nn.Module]):
        self.model = model
        self.problem: AutopartError | None = None
        self.subject: tuple[str, str] = (SUBJECT, "")
        self.notes: Sequence[str] = ()
        self._users_model = weakref.ref(model)
        self._users_own = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
        try:
            self._origin = _origin(model, source)
            self.model = _meta_model(model, self._origin.non_parameters())
            self.subject, self.notes = self._origin.subject, self._origin.notes
        except AutopartError as error:
            self.problem = error
            self.subject = (SUBJECT, str(error))

    def check(self) -> None:
        """Raise the error in `problem`, if it is not None."""
        if self.problem is not None:
            raise self.problem

    def users_own(self, name: str) -> tuple[nn.Module, nn.Parameter] | None:
        """Return (the user's model, its parameter `name`); None if the user has deleted the model."""
        model, parameter = self._users_model(), self._users_own[name]()
        return None if model is None or parameter is None else (model, parameter)

    def read(self, cuts: Mapping[str, LocalSplits]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's shard) for the parameters in `cuts`, on CPU, in the model's dtype."""
        for name, value in self._origin.read(cuts):
            yield name, value.to(self._dtypes[name])

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Iterable[str]) -> None:
        """Load the full values of these parameters into `model`, the meta copy, if they have no memory yet."""
        empty = {name: model.get_parameter(name) for name in names}
        empty = {name: parameter for name, parameter in empty.items() if not has_memory(parameter)}
        for name, value in self.read(dict.fromkeys(empty, ())) if empty else ():
            empty[name].untyped_storage().resize_(value.numel() * value.itemsize)
            empty[name].copy_(value)

    def warn(self) -> None:
        """Emit the notes as warnings."""
        for note in self.notes:
            warnings.warn(note, stacklevel=2)


def _origin(model: nn.Module, source: Any) -> WeightSource:
    if source != INIT:
        return Construction(model, source) if callable(source) else Checkpoint(model, source)
    build = constructor_of(model)
    if build is None:
        raise CheckpointError(
            f"weights='init' cannot construct a {type(model).__name__}",
            why="it calls the model's class with the model's config, as in transformers, and this model has no config",
            hint=f"weights=lambda: {type(model).__name__}(...), the call that creates the model",
        )
    return Construction(model, build)


class Construction:
    """Source of a model's weights: a function that constructs the model and so initialises its weights."""

    def __init__(self, model: nn.Module, build: Callable[[], nn.Module]):
        self._constructor = Constructor(build)
        state = hashlib.blake2b(self._constructor.random_state.numpy().tobytes(), digest_size=8).hexdigest()
        self.subject = ("torch's random state (torch.manual_seed), from which weights are made", state)
        self.notes: Sequence[str] = ()
        shapes, parameters = self._constructor.shapes, dict(model.named_parameters(remove_duplicate=False))
        misfits = [f"'{name}' is {list(shapes[name])}, in the model {list(p.shape)}" for name, p in parameters.items()
                   if name in shapes and shapes[name] != tuple(p.shape)]  # fmt: skip
        missing = [name for name in parameters if name not in shapes]
        _check_fit("the model that weights= makes", model, missing, misfits, shapes.keys() - parameters.keys())

    def non_parameters(self) -> Mapping[str, Tensor]:
        return self._constructor.buffers

    def read(self, cuts: Mapping[str, LocalSplits]) -> Iterator[tuple[str, Tensor]]:
        tensors = self._constructor.read(cuts)
        for name in list(tensors):
            yield name, tensors.pop(name)


class Checkpoint:
    """Source of a model's weights: a checkpoint in safetensors files.

    If the source is a `Pretrained` (a folder that `from_pretrained` could load), parameters that are not in the files
    are initialised as by `from_pretrained`. For other sources, missing parameters are an error.
    """

    def __init__(self, model: nn.Module, source: str | Path | Pretrained):
        path = source.path if isinstance(source, Pretrained) else pretrained_folder(source)
        self._files = SafetensorsFiles(path)
        self.subject = (SUBJECT, self._files.text)
        self._build = constructor_of(model)
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known = {**dict(model.named_parameters(remove_duplicate=False)), **buffers_and_attributes(model)}
        self._meta_tensors = {name: tensor.to("meta") for name, tensor in known.items()}
        self._have_values = {name for name, tensor in known.items() if not tensor.is_meta}
        tensors, extra = self._match(model)
        missing = self._take(model, tensors)
        self._initialised: dict[str, Tensor] = {}
        if isinstance(source, Pretrained) and missing:
            self._initialised = transformers_names.initialised(model, missing)
            self.subject = (SUBJECT, f"{self._files.text}, initialised {_digest(self._initialised.values())}")
            for names in _names_of_each(model):
                if names[0] in self._initialised:
                    self._initialised.update(dict.fromkeys(names, self._initialised[names[0]]))
            missing = [name for name in missing if name not in self._initialised]
        misfits = [
            text
            for name, tensor in sorted(tensors.items())
            for text in _misfits(name, tensor, self._meta_tensors[name])
        ]
        _check_fit(f"the checkpoint at {path}", model, missing, misfits, extra)
        self.notes = [*_conversions(path, tensors, self._meta_tensors), *_ignored(path, model, extra),
                      *_new(path, self._initialised)]  # fmt: skip
        self._check_ties(path, model, tensors)

    def non_parameters(self) -> Mapping[str, Tensor]:
        values = dict(self.read({name: () for name in self._tensors if name not in self._parameters}))
        missing = self._meta_tensors.keys() - self._parameters - self._have_values - values.keys()
        if missing and self._build is not None:
            buffers = Constructor(self._build, draws_matter=False).buffers
            values |= {name: value for name, value in buffers.items() if name in missing}
        return values

    def read(self, cuts: Mapping[str, LocalSplits]) -> Iterator[tuple[str, Tensor]]:
        with self._files:
            for name, cut in cuts.items():
                if name in self._initialised:
                    yield name, local_shard_of(self._initialised[name], cut).clone()
                    continue
                tensor = self._tensors[name]
                spans = spans_of(tensor.shape, cut)
                shape = [sum(length for _, length in dim) for dim in spans]
                value = torch.empty(shape, dtype=self._meta_tensors[name].dtype)
                tensor.read(boxes(spans), value)
                yield name, value

    def _match(self, model: nn.Module) -> tuple[dict[str, LazyTensor], list[str]]:
        """Match tensors of the files with tensors of the model.

        Returns ({name in the model: tensor in the files}, names that are in the files but not in the model).
        """
        if transformers_names.is_transformers(model):
            return transformers_names.matched(model, self._files.tensors)
        tensors = {name: tensor for name, tensor in self._files.tensors.items() if name in self._meta_tensors}
        return tensors, [name for name in self._files.tensors if name not in tensors]

    def _take(self, model: nn.Module, tensors: Mapping[str, LazyTensor]) -> list[str]:
        """Record, for each tensor of the model, its tensor in the files. Return the names of missing tensors.

        The files may have a tied tensor under only one of its names. It then counts as present under all names.
        """
        self._tensors, missing = dict(tensors), []
        for names in _names_of_each(model):
            stored = next((name for name in names if name in tensors), None)
            if stored is None:
                missing.append(names[0])
            else:
                self._tensors.update(dict.fromkeys(names, tensors[stored]))
        if transformers_names.is_transformers(model):
            required = transformers_names.may_not_be_missing(model, missing)
            missing = [name for name in missing if name in self._parameters or name in required]
        return missing

    def _check_ties(self, path: str | Path, model: nn.Module, tensors: Mapping[str, LazyTensor]) -> None:
        """Raise CheckpointError if the files have different values under two names of a tied tensor."""
        for names in _names_of_each(model):
            first, *others = [name for name in names if name in tensors] or [""]
            for other in others:
                with self._files:
                    if not _are_identical(tensors[first], tensors[other]):
                        raise CheckpointError(
                            f"'{first}' and '{other}' are one parameter of {type(model).__name__}, and two in the "
                            f"checkpoint at {path}", why="their values there differ",
                            hint="a model that does not tie them (tie_word_embeddings=False in its config)",
                        )  # fmt: skip


def _names_of_each(model: nn.Module) -> list[list[str]]:
    """Return, for each tensor of the model's state dict, its names: several for a tied tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _are_identical(one: LazyTensor, other: LazyTensor) -> bool:
    """Return True if two lazy tensors have equal dtypes and values. Read a few rows at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = one.shape[0] if one.shape else 1
    step = max(1, COMPARED_BYTES * rows // max(1, math.prod(one.shape) * one.dtype.itemsize))
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *one.shape[1:]) if one.shape else ()
        first, second = torch.empty(shape, dtype=one.dtype), torch.empty(shape, dtype=one.dtype)
        for tensor, out in ((one, first), (other, second)):
            tensor.read_box((start, *[0] * (len(shape) - 1)) if shape else (), out)
        if not torch.equal(first, second):
            return False
    return True


def _misfits(name: str, tensor: LazyTensor, expected: Tensor) -> Iterator[str]:
    """Yield a text if a tensor of the files does not fit the model's tensor `expected` in shape or dtype."""
    if tensor.shape != tuple(expected.shape):
        yield f"'{name}' is {list(tensor.shape)}, in the model {list(expected.shape)}"
    elif tensor.dtype != expected.dtype and not {tensor.dtype, expected.dtype} <= FLOATS:
        yield f"'{name}' is {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, in the model {DTYPE_NAMES[expected.dtype]}"


def _check_fit(
    what: str, model: nn.Module, missing: Sequence[str], misfits: Sequence[str], extra: Collection[str]
) -> None:
    """Raise CheckpointError with a list of all tensors that are missing or do not fit the model."""
    if not missing and not misfits:
        return
    lines = [f"it has no {listing(missing)}" + (f"; it has {listing(sorted(extra))}" if extra else "")] * bool(missing)
    if misfits:
        more = f" and {len(misfits) - 8} more" if len(misfits) > 8 else ""
        lines.append(", ".join(misfits[:8]) + more)
    raise CheckpointError(
        f"{what} does not fit {type(model).__name__}", why="\n         ".join(lines),
        hint="a model of the config and class that were saved",
    )  # fmt: skip


def _conversions(path: str | Path, tensors: Mapping[str, LazyTensor], forms: Mapping[str, Tensor]) -> list[str]:
    """Return [warning] if loading converts dtypes of tensors to those of the model (`forms`), else []."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != forms[name].dtype:
            kinds.setdefault((tensor.dtype, forms[name].dtype), []).append(name)
    texts = [f"{DTYPE_NAMES[stored]} to {DTYPE_NAMES[wanted]}{'' if _is_exact(stored, wanted) else ', rounded'} "
             f"({listing(names)})" for (stored, wanted), names in kinds.items()]  # fmt: skip
    where = f"the weights in {path} are converted to the model's types as they are read"
    return [f"{where}: {'; '.join(texts)}."] if texts else []


def _is_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return torch.promote_types(stored, wanted) == wanted


def _ignored(path: str | Path, model: nn.Module, extra: Sequence[str]) -> list[str]:
    name = type(model).__name__
    return (
        [f"{name} lacks some tensors of the checkpoint at {path}, which are not loaded: {listing(extra)}."]
        if extra
        else []
    )


def _new(path: str | Path, initialised: Mapping[str, Tensor]) -> list[str]:
    names = listing(sorted(initialised))
    return [f"the checkpoint at {path} lacks {names}, initialised with random values. Train them."] if names else []


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _meta_model(model: nn.Module, non_parameters: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the model, whose parameters have no memory, with `non_parameters` as other tensors.

    The values come from `non_parameters`, or else from the model. Raises CheckpointError if neither has values of a
    tensor.
    """
    twins: dict[int, Tensor] = {}
    for parameter in model.parameters():
        twins[id(parameter)] = emptied(parameter, _real_device(parameter))
    on_meta: list[tuple[str, Tensor]] = []
    for name, tensor in buffers_and_attributes(model).items():
        value = non_parameters.get(name)
        if id(tensor) in twins:
            continue
        if tensor.requires_grad and not tensor.is_leaf:  # a hook computes this tensor before every forward
            twins[id(tensor)] = emptied(tensor.detach(), _real_device(tensor))
        elif value is not None and value.shape == tensor.shape:
            twins[id(tensor)] = value.detach().to(_real_device(tensor), tensor.dtype, copy=True)
        elif tensor.is_meta:
            on_meta.append((name, tensor))
    without_values = [name for name, tensor in on_meta if id(tensor) not in twins]
    if without_values:
        raise CheckpointError(
            f"{type(model).__name__} has no values for {listing(without_values)}",
            why="it is on the meta device, and in no file",
            hint=f"set it on the model: model.{without_values[0]} = a tensor with values",
        )  # fmt: skip
    try:
        return meta_copy_of(model, [name for name, _ in model.named_parameters(remove_duplicate=False)], twins)
    except CannotCopy as error:
        raise CheckpointError(
            f"{type(model).__name__} cannot be partitioned without the values of its parameters", why=str(error),
            hint="load weights into the model before parallelize(), and leave weights= out",
        ) from None  # fmt: skip


def _real_device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device

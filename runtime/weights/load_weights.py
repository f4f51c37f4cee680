"""`weights=`: parameters that come from files or from a constructor, of which a rank makes only its shards.

The user's model gives shapes and names. What is traced is its skeleton, whose parameters have no memory; its buffers,
which every rank holds whole, are real.
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
from autopart.errors import AutopartError, CheckpointError
from autopart.ir.graph import DTYPE_NAMES
from autopart.ir.sharding import boxes, spans_of
from autopart.runtime.weights import transformers_names
from autopart.runtime.weights.deferred_init import Constructor, Cuts, constructor_of, held_tensors
from autopart.runtime.weights.lazy_tensors import Unread
from autopart.runtime.weights.safetensors_files import Files, listing
from autopart.tracing.meta_copy import NoSkeleton, has_memory, skeleton_of

INIT = "init"
SUBJECT = "weights="
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
"""What is converted into each other; the 8-bit types of quantized checkpoints mean nothing without their scales."""
COMPARED_BYTES = 2**24


class Origin(Protocol):
    """Where weights come from: files, or a constructor.

    `subject`: what ranks must have alike of it, and its text. `notes`: what a user should know.
    """

    @property
    def subject(self) -> tuple[str, str]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def held(self) -> Mapping[str, Tensor]:
        """What it has beside parameters, by name."""

    def read(self, cuts: Mapping[str, Cuts]) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard) of parameters, one after the other, on the host."""


class Weights:
    """What `weights=` gives a model.

    `model`: stands for it, without the memory of its parameters. `problem`: why there are no weights; then `model` is
    the user's, and the error is raised once all ranks know whether they have the same one.
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
            self.model = _skeleton(model, self._origin.held())
            self.subject, self.notes = self._origin.subject, self._origin.notes
        except AutopartError as error:
            self.problem = error
            self.subject = (SUBJECT, str(error))

    def check(self) -> None:
        """Raises the CheckpointError that keeps the model from having weights."""
        if self.problem is not None:
            raise self.problem

    def users_own(self, name: str) -> tuple[nn.Module, nn.Parameter] | None:
        """The user's model and its parameter of this name; None where they are gone."""
        model, parameter = self._users_model(), self._users_own[name]()
        return None if model is None or parameter is None else (model, parameter)

    def read(self, cuts: Mapping[str, Cuts]) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard) of parameters, one after the other, on the host in the model's dtype."""
        for name, value in self._origin.read(cuts):
            yield name, value.to(self._dtypes[name])

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Iterable[str]) -> None:
        """Give these parameters of the model's skeleton their whole values, where they have none."""
        empty = {name: model.get_parameter(name) for name in names}
        empty = {name: parameter for name, parameter in empty.items() if not has_memory(parameter)}
        for name, value in self.read(dict.fromkeys(empty, ())) if empty else ():
            empty[name].untyped_storage().resize_(value.numel() * value.itemsize)
            empty[name].copy_(value)

    def warn(self) -> None:
        """Say what a user should know."""
        for note in self.notes:
            warnings.warn(note, stacklevel=2)


def _origin(model: nn.Module, source: Any) -> Origin:
    if source != INIT:
        return Construction(model, source) if callable(source) else Checkpoint(model, source)
    build = constructor_of(model)
    if build is None:
        raise CheckpointError(
            f"weights='init' does not know how to make a {type(model).__name__}",
            why="it calls the model's class with the model's config, as for models of transformers; this one has none",
            hint=f"weights=lambda: {type(model).__name__}(...), the call that makes the model",
        )
    return Construction(model, build)


class Construction:
    """Weights that a constructor makes."""

    def __init__(self, model: nn.Module, build: Callable[[], nn.Module]):
        self._constructor = Constructor(build)
        state = hashlib.blake2b(self._constructor.random_state.numpy().tobytes(), digest_size=8).hexdigest()
        self.subject = ("torch's random state (torch.manual_seed), from which weights are made", state)
        self.notes: Sequence[str] = ()
        shapes, mine = self._constructor.shapes, dict(model.named_parameters(remove_duplicate=False))
        misfits = [f"'{name}' is {list(shapes[name])}, in the model {list(p.shape)}" for name, p in mine.items()
                   if name in shapes and shapes[name] != tuple(p.shape)]  # fmt: skip
        missing = [name for name in mine if name not in shapes]
        _check_fit("the model that weights= makes", model, missing, misfits, shapes.keys() - mine.keys())

    def held(self) -> Mapping[str, Tensor]:
        return self._constructor.buffers

    def read(self, cuts: Mapping[str, Cuts]) -> Iterator[tuple[str, Tensor]]:
        tensors = self._constructor.read(cuts)
        for name in list(tensors):
            yield name, tensors.pop(name)


class Checkpoint:
    """Weights that are read from safetensors files."""

    def __init__(self, model: nn.Module, path: str | Path):
        self._files = Files(path)
        self.subject = (SUBJECT, self._files.text)
        self._build = constructor_of(model)
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known = {**dict(model.named_parameters(remove_duplicate=False)), **held_tensors(model)}
        self._forms = {name: tensor.to("meta") for name, tensor in known.items()}
        self._have_values = {name for name, tensor in known.items() if not tensor.is_meta}
        tensors, extra = self._found(model)
        missing = self._take(model, tensors)
        misfits = [
            text for name, tensor in sorted(tensors.items()) for text in _misfits(name, tensor, self._forms[name])
        ]
        _check_fit(f"the checkpoint at {path}", model, missing, misfits, extra)
        self.notes = [*_conversions(path, tensors, self._forms), *_left_out(path, model, extra)]
        self._check_ties(path, model, tensors)

    def held(self) -> Mapping[str, Tensor]:
        held = dict(self.read({name: () for name in self._tensors if name not in self._parameters}))
        nowhere = self._forms.keys() - self._parameters - self._have_values - held.keys()
        if nowhere and self._build is not None:
            buffers = Constructor(self._build, draws_matter=False).buffers
            held |= {name: value for name, value in buffers.items() if name in nowhere}
        return held

    def read(self, cuts: Mapping[str, Cuts]) -> Iterator[tuple[str, Tensor]]:
        with self._files:
            for name, cut in cuts.items():
                tensor = self._tensors[name]
                spans = spans_of(tensor.shape, cut)
                shape = [sum(length for _, length in dim) for dim in spans]
                value = torch.empty(shape, dtype=self._forms[name].dtype)
                tensor.read(boxes(spans), value)
                yield name, value

    def _found(self, model: nn.Module) -> tuple[dict[str, Unread], list[str]]:
        """The tensors in the files by their names in the model, and the names of those that it has no place for."""
        if transformers_names.is_transformers(model):
            return transformers_names.matched(model, self._files.tensors)
        tensors = {name: tensor for name, tensor in self._files.tensors.items() if name in self._forms}
        return tensors, [name for name in self._files.tensors if name not in tensors]

    def _take(self, model: nn.Module, tensors: Mapping[str, Unread]) -> list[str]:
        """Note where each tensor of the model is: a tied one under any of its names. Returns what is nowhere."""
        self._tensors, missing = dict(tensors), []
        for names in _names_of_each(model):
            stored = next((name for name in names if name in tensors), None)
            if stored is None:
                missing.append(names[0])
            else:
                self._tensors.update(dict.fromkeys(names, tensors[stored]))
        if transformers_names.is_transformers(model):
            asked_for = transformers_names.may_not_be_missing(model, missing)
            missing = [name for name in missing if name in self._parameters or name in asked_for]
        return missing

    def _check_ties(self, path: str | Path, model: nn.Module, tensors: Mapping[str, Unread]) -> None:
        """Raises CheckpointError where the files have other values for another name of a tensor."""
        for names in _names_of_each(model):
            first, *others = [name for name in names if name in tensors] or [""]
            for other in others:
                with self._files:
                    if not _are_equal(tensors[first], tensors[other]):
                        raise CheckpointError(
                            f"'{first}' and '{other}' are one parameter of {type(model).__name__}, and two in the "
                            f"checkpoint at {path}", why="their values there differ",
                            hint="a model that does not tie them (tie_word_embeddings=False in its config)",
                        )  # fmt: skip


def _names_of_each(model: nn.Module) -> list[list[str]]:
    """All names of each tensor that the model's state dict has, the first one first."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _are_equal(one: Unread, other: Unread) -> bool:
    """Whether two tensors have the same bits, read some rows at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = one.shape[0] if one.shape else 1
    step = max(1, COMPARED_BYTES * rows // max(1, math.prod(one.shape) * one.dtype.itemsize))
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *one.shape[1:]) if one.shape else ()
        here, there = torch.empty(shape, dtype=one.dtype), torch.empty(shape, dtype=one.dtype)
        for tensor, out in ((one, here), (other, there)):
            tensor.read_box((start, *[0] * (len(shape) - 1)) if shape else (), out)
        if not torch.equal(here, there):
            return False
    return True


def _misfits(name: str, tensor: Unread, form: Tensor) -> Iterator[str]:
    """Why a tensor cannot be that of the model."""
    if tensor.shape != tuple(form.shape):
        yield f"'{name}' is {list(tensor.shape)}, in the model {list(form.shape)}"
    elif tensor.dtype != form.dtype and not {tensor.dtype, form.dtype} <= FLOATS:
        yield f"'{name}' is {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}, in the model {DTYPE_NAMES[form.dtype]}"


def _check_fit(
    what: str, model: nn.Module, missing: Sequence[str], misfits: Sequence[str], extra: Collection[str]
) -> None:
    """Raises CheckpointError, with all that does not fit, where anything is missing or has another form."""
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


def _conversions(path: str | Path, tensors: Mapping[str, Unread], forms: Mapping[str, Tensor]) -> list[str]:
    """A note of the tensors that are converted as they are read."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != forms[name].dtype:
            kinds.setdefault((tensor.dtype, forms[name].dtype), []).append(name)
    texts = [f"{DTYPE_NAMES[stored]} to {DTYPE_NAMES[wanted]}{'' if _is_exact(stored, wanted) else ', rounded'} "
             f"({listing(names)})" for (stored, wanted), names in kinds.items()]  # fmt: skip
    where = f"the weights in {path} are converted to the model's types as they are read"
    return [f"{where}: {'; '.join(texts)}."] if texts else []


def _is_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of one type is a value of the other."""
    return torch.promote_types(stored, wanted) == wanted


def _left_out(path: str | Path, model: nn.Module, extra: Sequence[str]) -> list[str]:
    name = type(model).__name__
    return [f"{name} has no place for some of the checkpoint at {path}, left out: {listing(extra)}."] if extra else []


def _skeleton(model: nn.Module, held: Mapping[str, Tensor]) -> nn.Module:
    """The model with parameters that have no memory, and with `held` for its buffers and tensors of these names.

    Raises CheckpointError where one that is on meta would stay there.
    """
    twins: dict[int, Tensor] = {}
    for parameter in model.parameters():
        twins[id(parameter)] = emptied(parameter, _real_device(parameter))
    without: list[tuple[str, Tensor]] = []
    for name, tensor in held_tensors(model).items():
        value = held.get(name)
        if id(tensor) in twins:
            continue
        if tensor.requires_grad and not tensor.is_leaf:  # computed anew by a hook before every forward
            twins[id(tensor)] = emptied(tensor.detach(), _real_device(tensor))
        elif value is not None and value.shape == tensor.shape:
            twins[id(tensor)] = value.detach().to(_real_device(tensor), tensor.dtype, copy=True)
        elif tensor.is_meta:
            without.append((name, tensor))
    nowhere = [name for name, tensor in without if id(tensor) not in twins]
    if nowhere:
        raise CheckpointError(
            f"nothing gives {type(model).__name__} the values of {listing(nowhere)}",
            why="it is on the meta device, and in no file",
            hint=f"give it to the model: model.{nowhere[0]} = a tensor with values",
        )  # fmt: skip
    try:
        return skeleton_of(model, [name for name, _ in model.named_parameters(remove_duplicate=False)], twins)
    except NoSkeleton as error:
        raise CheckpointError(
            f"{type(model).__name__} cannot be partitioned without its values", why=str(error),
            hint="load its weights into it, and leave weights= out",
        ) from None  # fmt: skip


def _real_device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device

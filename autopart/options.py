"""The options that `parallelize`, `plan`, `verify`, `search` and the command line share, each written down once.

To add one, add a row to `Options` and its type, as a user may give it, to the TypedDict of what takes it. Signatures,
docstrings, the error for an unknown option, the check of a plan and the command line follow from these two. Nothing
here imports torch: `--help` is made of it.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args

from autopart.cost.hardware.profile import DEFAULT
from autopart.cost.memory_kinds import parse_size
from autopart.errors import OptionError
from autopart.ir.mesh import Context
from autopart.ir.run.dp_sync import METHODS, DpSync
from autopart.ir.run.recompute_spec import Recompute, parse_recompute
from autopart.ir.run.schedules import SCHEDULES, check_compile, check_precision, schedule_named
from autopart.plans.pins import Pins
from autopart.plans.rank_digest import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

    from autopart.ir.program import Rng
    from autopart.passes.choose.solve.shard_axis import SequenceParallel

PRECISIONS = ("bf16", "fp16", "fp32")

_CONTEXTS = "'auto', 'gather', 'ulysses' or 'ring'"

TOLERANCE = 1e-10
"""What counts as equal in `verify`."""


class SearchOptions(TypedDict, total=False):
    """Those that `search` takes too. In all three, None stands for the default."""

    hardware: str | None
    memory: int | str | None
    precision: str | None
    reduce_dtype: str | None
    balance: float | None
    sequence_dims: Mapping[str, int] | str | None


class PlanOptions(SearchOptions, total=False):
    """Those that `plan` and `verify` take."""

    schedule: str | None
    microbatches: int | None
    virtual_stages: int | None
    sequence_parallel: SequenceParallel | None
    context: Context | None
    pins: Pins | Mapping[str, Any] | str | Path | None
    zero: int | None
    prefetch: int | None
    recompute: Recompute | str | None
    dp_sync: str | Mapping[str, Any] | None
    compile: bool | None


class RunOptions(PlanOptions, total=False):
    """Those that `parallelize` takes: all."""

    rng: Rng | None
    local_batch: bool | None
    timeout: float | None
    check_replicas: int | bool | None
    weights: str | Path | Callable[[], Any] | None


@dataclass(frozen=True)
class Option:
    """What there is to say of an option beside its name and its types.

    `unset`: its default in words, where the value does not say it. `form`: what the command line takes, a type or what
    a text is of. `read`: from what a user gives to what `Options` holds; raises OptionError. `in_plan`: where a plan
    says the same.
    """

    default: Any
    text: str
    unset: str = ""
    form: type | str = str
    read: Callable[[Any], Any] = lambda value: value
    in_plan: str = ""

    @property
    def help(self) -> str:
        return f"{self.text}  [default: {self.unset or self.default}]"


def _row(*of: Any, **more: Any) -> Any:
    """A field of `Options`, of the arguments of its `Option`."""
    option = Option(*of, **more)
    return field(default=option.default, metadata={"option": option})


def _whole_number(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        counted = name.replace("_", " ")
        raise OptionError(f"{name}={number!r} is not a number of {counted}", why="it is a whole number from 1")
    return number


def _one_of(name: str, words: tuple[Any, ...], value: Any, hint: str) -> Any:
    if value not in words:
        raise OptionError(f"unknown {name}={value!r}", hint=hint)
    return value


def _zero(level: Any) -> int:
    words = () if isinstance(level, bool) else (0, 1, 2, 3)
    return _one_of(
        "zero",
        words,
        level,
        "0 (nothing is stored in parts), 1 (the optimizer's state is), 2 (and the gradients) or 3 (and the parameters)",
    )


def _prefetch(blocks: Any) -> int:
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 0:
        raise OptionError(f"prefetch={blocks!r} is not a number of blocks",
                          why="weights are gathered so many blocks before they are read",
                          hint="1, or 0: where they are read")  # fmt: skip
    return blocks


def _balance(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 1:
        raise OptionError(f"balance={value!r} is not how full the fullest rank is",
                          why="it is the rows of its experts over the mean of all ranks: 1 where all have as many",
                          hint="balance=1.25")  # fmt: skip
    return float(value)


def _sequence_dims(value: Any) -> dict[str, int]:
    """`{"input_ids": 1}`, of that or of "input_ids=1,labels=1"."""
    entries = dict(part.split("=", 1) for part in value.split(",") if "=" in part) if isinstance(value, str) else value
    entries = entries if isinstance(entries, Mapping) else {}
    dims = {str(name).strip(): str(dim).strip() for name, dim in entries.items()}
    if not dims or not all(re.fullmatch(r"-?\d+", dim) for dim in dims.values()):
        raise OptionError(f"sequence_dims={value!r} does not say which dims of the inputs are the sequence",
                          why="it is the number of a dim for each input that has one",
                          hint="sequence_dims={'input_ids': 1, 'labels': 1}, or 'input_ids=1,labels=1'")  # fmt: skip
    return {name: int(dim) for name, dim in dims.items()}


_PRECISIONS = "'bf16' (bfloat16), 'fp16' (float16), 'fp32' (float32), or None: the model's own dtypes"


def _timeout(seconds: Any) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds <= 0:
        raise OptionError(f"timeout={seconds!r} is not a number of seconds",
                          why="it is how long a rank waits for the others", hint="timeout=600")  # fmt: skip
    return seconds


def _local_batch(value: Any) -> bool:
    return _one_of("local_batch", (True, False), value, "True (every rank gives its own rows) or False")


def _weights(value: Any) -> Any:
    if not callable(value) and not (isinstance(value, (str, os.PathLike)) and str(value)):
        raise OptionError(f"weights={value!r} is not where weights come from",
                          why="it is a folder of safetensors, 'init', or a function that makes the model",
                          hint="weights='folder'")  # fmt: skip
    return value


def _check_replicas(steps: Any) -> int | bool:
    if not isinstance(steps, int) or steps < 0:
        raise OptionError(f"check_replicas={steps!r} is not a number of steps",
                          why="copies of parameters are compared at every so many steps",
                          hint="100, or False: never; leave it out: at steps 1, 2, 4, 8 and every 100th")  # fmt: skip
    return steps


@dataclass(frozen=True)
class Options:
    """All of them, checked; None: chosen for you. Raises OptionError for one that cannot be."""

    # fmt: off
    schedule: str | None = _row(
        None, f"Of the pipeline: {', '.join(SCHEDULES)}.", "chosen", "NAME",
        read=schedule_named, in_plan="schedule.name")
    microbatches: int | None = _row(
        None, "Parts that a step cuts a rank's rows into.", "chosen", int,
        read=lambda value: _whole_number("microbatches", value), in_plan="schedule.microbatches")
    virtual_stages: int | None = _row(
        None, "Stages per pipeline rank.", "chosen", int,
        read=lambda value: _whole_number("virtual_stages", value), in_plan="schedule.virtual_stages")
    sequence_parallel: SequenceParallel = _row(
        "auto", "Cut what lies between matrix products along the sequence, over tp.", "auto, where faster", bool,
        read=lambda value: _one_of("sequence_parallel", (True, False, "auto"), value, "True, False or 'auto'"))
    context: Context = _row(
        "auto", "Of attention over cp: gather, queries stay where they are, keys and values are gathered; ulysses, all "
        "positions of a head are brought together; ring, keys and values go around (auto: one of the other two).",
        "auto, where cheaper", "gather|ulysses|ring",
        read=lambda value: _one_of("context", get_args(Context), value, _CONTEXTS))
    sequence_dims: Mapping[str, int] | None = _row(
        None, "Which dim of which input is the sequence that cp cuts, {'input_ids': 1, 'labels': 1}: of values those "
        "dims are cut that descend from them, and heads of attention.", "all that can be cut along positions",
        "INPUT=DIM,...", read=_sequence_dims, in_plan="sequence_dims")
    hardware: str = _row(DEFAULT, "The profile that prices choices: its name, or the path of one.", form="NAME|PATH")
    balance: float = _row(
        1.0, "Rows that the fullest rank gets for its experts, over the mean: what time and memory are counted "
        "for.", "1, all ranks have as many", float, read=_balance, in_plan="balance")
    pins: Pins = _row(
        Pins(), "Layouts and cuts that are fixed, {'h.*.up.weight': {'tp': 'S(0)'}}, or a JSON file of them; see "
        "autopart.plans.pins.", "none", "PATH", read=Pins.parse)
    zero: int | None = _row(
        None, "What is cut over dp, cp and ep: 0, nothing; 1, the optimizer's state; 2, and gradients; 3, and "
        "parameters, which are gathered where they are read (ZeRO; FSDP is 3).",
        "0, or as memory needs", int, read=_zero)
    prefetch: int = _row(
        1, "With zero=3: how many blocks ahead weights are gathered.", "1", int, read=_prefetch, in_plan="prefetch")
    memory: int | str | None = _row(
        None, "What a rank has, for example 80GB or 24GiB: a plan is chosen to fit, or refused.",
        "no limit; of search, the hardware's", "SIZE", read=parse_size)
    recompute: Recompute | None = _row(
        None, "What the backward computes again: none, selective (the core of attention), full (all of a block); by "
        "names of blocks 'h.[0-3]=full,*=none', or a dict of that.", "none, or what the model checkpoints",
        "WORD|PATTERN=WORD,...", read=parse_recompute, in_plan="recompute")
    dp_sync: Mapping[str, Any] | None = _row(
        None, f"What data-parallel ranks send each other: {', '.join(METHODS)}, with its numbers "
        "'top_k:0.01', 'gossip:ring', 'local:16'; by names of parameters '*.bias=all_reduce,*=qsgd:4bit', or a dict.",
        "all_reduce", "METHOD|PATTERN=METHOD,...", read=lambda value: DpSync.parse(value).as_data(), in_plan="dp_sync")
    compile: bool = _row(False, "Run stages through torch.compile.", "no", bool, in_plan="compile")
    precision: str | None = _row(
        None, "What is computed in (mixed precision): parameters stay and are trained as they are, and are cast where "
        "they are read; inputs are cast too, outputs are float32.", "the model's own dtypes", "|".join(PRECISIONS),
        read=lambda value: _one_of("precision", PRECISIONS, value, _PRECISIONS), in_plan="precision")
    reduce_dtype: str | None = _row(
        None, "With precision: what gradients are cast to before ranks sum them.", "fp32", "|".join(PRECISIONS),
        read=lambda value: _one_of("reduce_dtype", PRECISIONS, value, _PRECISIONS), in_plan="reduce_dtype")
    rng: Rng = _row(
        "fast", "exact: dropout and the like draw the numbers that one device draws after the same torch.manual_seed, "
        "which every rank calls; fast: each rank draws for what it holds.", form="fast|exact",
        read=lambda value: _one_of("rng", ("fast", "exact"), value, "rng='fast', or rng='exact'"))
    local_batch: bool = _row(
        False, "Every rank gives its own rows, and gets its own rows of outputs; the global batch is those of all data "
        "ranks, in their order.", "no: every rank gives the global batch", bool, read=_local_batch)
    timeout: float = _row(
        TIMEOUT_S, "Seconds to wait for other ranks (first calls ten times that); then all say who waits for whom.",
        form=float, read=_timeout)
    check_replicas: int | bool | None = _row(
        None, "Compare copies of parameters every so many steps; 0: never.", "at 1, 2, 4, 8 and every 100th", int,
        read=_check_replicas)
    weights: str | Path | Callable[[], Any] | None = _row(
        None, "Where values come from, of which a rank makes its shards alone (for a model on meta): a folder of "
        "safetensors, or a file; init: as the model's class makes them from its config; a function without arguments "
        "that makes the model.",
        "the model's own", "PATH|init", read=_weights)
    # fmt: on
    stage_slack: float | None = None
    """As of `Problem`, where it is not the usual one: found by the recipe, and no option of users."""

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, option.default if value is None else option.read(value))
        check_compile(self.compile, self.schedule)
        check_precision(self.schedule, self.precision)
        if self.reduce_dtype is not None and self.precision is None:
            raise OptionError(f"reduce_dtype={self.reduce_dtype!r} without precision=",
                              why="gradients are summed in the dtype of their parameters where no other is computed in",
                              hint="precision='bf16', or leave reduce_dtype out")  # fmt: skip


OPTIONS: dict[str, Option] = {row.name: row.metadata["option"] for row in fields(Options) if row.metadata}


def names_of(kind: Any) -> list[str]:
    """The options in one of the TypedDicts, in the order of `Options`."""
    return [name for name in OPTIONS if name in kind.__annotations__]


Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(kind: Any) -> Callable[[Function], Function]:
    """A function whose signature and docstring name each option that it takes as `**options`."""

    def show(function: Function) -> Function:
        names, signature = names_of(kind), inspect.signature(function)
        explicit = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default,
                              annotation=kind.__annotations__[name].__forward_arg__) for name in names
        ]  # fmt: skip
        function.__signature__ = signature.replace(parameters=[*explicit, *shared])  # type: ignore[attr-defined]
        lines = [textwrap.fill(f"{name}: {OPTIONS[name].help}", 104, subsequent_indent="    ") for name in names]
        listed = textwrap.indent("\n".join(lines), " " * 8).strip()
        function.__doc__ = (function.__doc__ or "").replace(f"**options: `{kind.__name__}`.", listed)
        return function

    return show


def read_options(function: Callable[..., Any], options: Mapping[str, Any], **more: Any) -> Options:
    """The options that a function `with_options` was given, and `more` that is said elsewhere.

    Raises OptionError for one that it does not take, or that cannot be.
    """
    takes = [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    takes.sort(key=lambda name: name.startswith("example_"))
    for name in options:
        if name not in takes:
            why = f"other functions take it, {function.__name__}() does not" if name in OPTIONS else ""
            raise OptionError(f"unknown option {name}=", why=why, hint=f"one of {', '.join(takes)}")
    return Options(**options, **more)

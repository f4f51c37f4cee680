"""Options shared by `parallelize`, `plan`, `verify`, `search` and the command line, in one table.

To add an option, add a row to `Options`, and its type to the TypedDict of the functions that take it. Signatures,
docstrings, the error for an unknown option, the check of a given plan and the command line are generated from `Options`
and the TypedDicts. This file does not import torch, so that `--help` is quick.
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

from autopart.common.memory_size import parse_size
from autopart.cost.hardware.profile import DEFAULT
from autopart.cost.update_rules import ADAMW, UPDATES
from autopart.errors import OptionError
from autopart.ir.mesh import Context
from autopart.ir.run.recompute_spec import Recompute, parse_recompute
from autopart.ir.run.schedules import SCHEDULES, check_compile, check_precision, schedule_named
from autopart.ir.run.sync_option import SYNC_NAMES, parse_sync
from autopart.plans.pins import Pins
from autopart.plans.rank_digest import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

    from autopart.ir.program import Rng
    from autopart.passes.choose.solve.shard_axis import SequenceParallel

PRECISIONS = ("bf16", "fp16", "fp32")

_CONTEXTS = "'auto', 'gather', 'ulysses' or 'ring'"

TOLERANCE = 1e-10
"""Default tolerance of `verify`: the largest difference, relative to the largest value."""


class CommonOptions(TypedDict, total=False):
    """Options that all functions have in common. None means the default."""

    hardware: str | None
    memory: int | str | None
    precision: str | None
    reduce_dtype: str | None
    balance: float | None
    sequence_dims: Mapping[str, int] | str | None


class SearchOptions(CommonOptions, total=False):
    """Options of `search`."""

    optimizer: str | None


class VerifyOptions(CommonOptions, total=False):
    """Options of `verify`, whose argument `optimizer` creates the optimizer of training steps."""

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


class PlanOptions(VerifyOptions, SearchOptions, total=False):
    """Options of `plan`."""


class RunOptions(PlanOptions, total=False):
    """Options of `parallelize` and `verify_loop`: all options in the table `Options`."""

    rng: Rng | None
    local_batch: bool | None
    timeout: float | None
    check_replicas: int | bool | None
    weights: str | Path | Callable[[], Any] | None


@dataclass(frozen=True)
class Option:
    """One option: its default, its help text, and the function that converts its value.

    Args:
        unset: text for the default in the help, if the default is a value such as None that explains nothing.
        form: click type of the option, or metavar in the help, such as `FILE`.
        read: converts a user's value to the value in `Options`; raises OptionError.
        in_plan: name of the attribute of a Plan that has the option's value.
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
    """Return a dataclass field of `Options`. The arguments are passed to `Option`."""
    option = Option(*of, **more)
    return field(default=option.default, metadata={"option": option})


def _whole_number(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        counted = name.replace("_", " ")
        raise OptionError(f"{name}={number!r} is not a number of {counted}", why="it must be an integer from 1")
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
        "0 (no sharding), 1 (shards optimizer state), 2 (also gradients) or 3 (also parameters)",
    )


def _prefetch(blocks: Any) -> int:
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 0:
        raise OptionError(f"prefetch={blocks!r} is not a number of blocks",
                          why="it is how many blocks ahead parameters are all-gathered",
                          hint="1, or 0 for no prefetching")  # fmt: skip
    return blocks


def _balance(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 1:
        raise OptionError(f"balance={value!r} is not an expert load",
                          why="it is the tokens on the most loaded rank over the mean of all ranks, at least 1",
                          hint="balance=1.25")  # fmt: skip
    return float(value)


def _sequence_dims(value: Any) -> dict[str, int]:
    """Return {input: index of its sequence dim}, parsed from `{"input_ids": 1}` or "input_ids=1,labels=1"."""
    entries = dict(part.split("=", 1) for part in value.split(",") if "=" in part) if isinstance(value, str) else value
    entries = entries if isinstance(entries, Mapping) else {}
    dims = {str(name).strip(): str(dim).strip() for name, dim in entries.items()}
    if not dims or not all(re.fullmatch(r"-?\d+", dim) for dim in dims.values()):
        raise OptionError(f"sequence_dims={value!r} does not name the sequence dims of the inputs",
                          why="it maps each input to the index of its sequence dim",
                          hint="sequence_dims={'input_ids': 1, 'labels': 1}, or 'input_ids=1,labels=1'")  # fmt: skip
    return {name: int(dim) for name, dim in dims.items()}


_PRECISIONS = "'bf16' (bfloat16), 'fp16' (float16), 'fp32' (float32), or None: the model's own dtypes"


def _timeout(seconds: Any) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds <= 0:
        raise OptionError(f"timeout={seconds!r} is not a number of seconds",
                          why="it is how long a rank waits for other ranks", hint="timeout=600")  # fmt: skip
    return seconds


def _local_batch(value: Any) -> bool:
    return _one_of("local_batch", (True, False), value, "True (each data rank passes its own samples) or False")


def _weights(value: Any) -> Any:
    if not callable(value) and not (isinstance(value, (str, os.PathLike)) and str(value)):
        raise OptionError(f"weights={value!r} is not a source of weights",
                          why="it must be a folder of safetensors, 'init', or a function that makes the model",
                          hint="weights='folder'")  # fmt: skip
    return value


def _check_replicas(steps: Any) -> int | bool:
    if not isinstance(steps, int) or steps < 0:
        raise OptionError(f"check_replicas={steps!r} is not a number of steps",
                          why="it is the interval, in steps, at which copies of parameters are compared",
                          hint="100, or False for never; by default at steps 1, 2, 4, 8 and every 100th")  # fmt: skip
    return steps


@dataclass(frozen=True)
class Options:
    """The checked values of all options. None means that autopart chooses.

    Raises OptionError for an invalid value.
    """

    # fmt: off
    schedule: str | None = _row(
        None, f"Pipeline schedule: {', '.join(SCHEDULES)}.", "chosen", "NAME",
        read=schedule_named, in_plan="schedule.name")
    microbatches: int | None = _row(
        None, "Microbatches per step.", "chosen", int,
        read=lambda value: _whole_number("microbatches", value), in_plan="schedule.microbatches")
    virtual_stages: int | None = _row(
        None, "Stages per pipeline rank.", "chosen", int,
        read=lambda value: _whole_number("virtual_stages", value), in_plan="schedule.virtual_stages")
    sequence_parallel: SequenceParallel = _row(
        "auto", "Megatron sequence parallelism: shard activations between matrix products along the sequence, over "
        "tp.", "auto, where faster", bool,
        read=lambda value: _one_of("sequence_parallel", (True, False, "auto"), value, "True, False or 'auto'"))
    context: Context = _row(
        "auto", "Attention over cp: gather (all-gather keys and values), ulysses (all-to-all, shard heads), ring "
        "(send keys and values around the ranks), or auto (gather or ulysses).",
        "auto, the cheaper one", "gather|ulysses|ring",
        read=lambda value: _one_of("context", get_args(Context), value, _CONTEXTS))
    sequence_dims: Mapping[str, int] | None = _row(
        None, "Sequence dim of each input that cp shards, {'input_ids': 1, 'labels': 1}. Only dims derived from "
        "these, and attention heads, are sharded.", "every dim that can be sharded along the sequence",
        "INPUT=DIM,...", read=_sequence_dims, in_plan="sequence_dims")
    hardware: str = _row(DEFAULT, "Hardware profile of the cost model: a name, or the path of a JSON file.",
                         form="NAME|PATH")
    balance: float = _row(
        1.0, "Expert load to plan for: tokens on the most loaded ep rank, over the mean of all ranks.",
        "1, all ranks equal", float, read=_balance, in_plan="balance")
    pins: Pins = _row(
        Pins(), "Fixed placements and stage boundaries, {'h.*.up.weight': {'tp': 'S(0)'}}, or a JSON file of them; see "
        "autopart.plans.pins.", "none", "PATH", read=Pins.parse)
    zero: int | None = _row(
        None, "ZeRO stage over dp, cp and ep (0-3): 1 shards optimizer state, 2 also gradients, 3 also parameters "
        "(FSDP).",
        "0, or what memory= needs", int, read=_zero)
    prefetch: int = _row(
        1, "With zero=3: number of blocks that parameters are all-gathered ahead of their use.", "1", int,
        read=_prefetch, in_plan="prefetch")
    memory: int | str | None = _row(
        None, "Memory of a rank, for example 80GB or 24GiB: the plan fits into it, or is refused.",
        "no limit; in search, the memory of the hardware", "SIZE", read=parse_size)
    recompute: Recompute | None = _row(
        None, "Activation checkpointing: none, selective (attention core), full (whole blocks); or per block name, "
        "'h.[0-3]=full,*=none', or as a dict.", "none, or what the model checkpoints",
        "WORD|PATTERN=WORD,...", read=parse_recompute, in_plan="recompute")
    dp_sync: Mapping[str, Any] | None = _row(
        None, f"Gradient synchronization over data ranks: {', '.join(SYNC_NAMES)}, with parameters "
        "'top_k:0.01', 'gossip:ring', 'local:16'; by parameter name '*.bias=all_reduce,*=qsgd:4bit', or a dict.",
        "all_reduce", "METHOD|PATTERN=METHOD,...", read=lambda value: parse_sync(value).as_data(), in_plan="dp_sync")
    optimizer: str = _row(
        ADAMW, f"Optimizer whose update and state are predicted: {', '.join(UPDATES)}. muon: for hidden matrices, with "
        "AdamW for all other parameters.", ADAMW, "|".join(UPDATES),
        read=lambda value: _one_of("optimizer", tuple(UPDATES), value, ", ".join(UPDATES)))
    compile: bool = _row(False, "Run stages through torch.compile.", "no", bool, in_plan="compile")
    precision: str | None = _row(
        None, "Compute dtype (mixed precision): parameters keep their dtype and are cast on use; inputs are cast, "
        "outputs are float32.", "the model's own dtypes", "|".join(PRECISIONS),
        read=lambda value: _one_of("precision", PRECISIONS, value, _PRECISIONS), in_plan="precision")
    reduce_dtype: str | None = _row(
        None, "With precision: dtype of gradient reduction.", "fp32", "|".join(PRECISIONS),
        read=lambda value: _one_of("reduce_dtype", PRECISIONS, value, _PRECISIONS), in_plan="reduce_dtype")
    rng: Rng = _row(
        "fast", "exact: dropout uses the random numbers of a single device with the same torch.manual_seed (every "
        "rank calls it); fast: each rank draws numbers for its shard.", form="fast|exact",
        read=lambda value: _one_of("rng", ("fast", "exact"), value, "rng='fast', or rng='exact'"))
    local_batch: bool = _row(
        False, "Each data rank passes its own samples and gets its own outputs; the global batch is the samples of "
        "all data ranks, in rank order.", "no: every rank passes the global batch", bool, read=_local_batch)
    timeout: float = _row(
        TIMEOUT_S, "Seconds to wait for other ranks (ten times as long in first calls); then every rank reports who "
        "waits for whom.", form=float, read=_timeout)
    check_replicas: int | bool | None = _row(
        None, "Interval in steps at which copies of parameters are compared; 0: never.",
        "steps 1, 2, 4, 8 and every 100th", int, read=_check_replicas)
    weights: str | Path | Callable[[], Any] | None = _row(
        None, "Source of weights for a model on meta (each rank creates only its shards): a folder of safetensors, or "
        "a file; init (the model's class, from its config); or a function without arguments that returns the model.",
        "the model's own", "PATH|init", read=_weights)
    # fmt: on

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, option.default if value is None else option.read(value))
        check_compile(self.compile, self.schedule)
        check_precision(self.schedule, self.precision)
        if self.reduce_dtype is not None and self.precision is None:
            raise OptionError(f"reduce_dtype={self.reduce_dtype!r} without precision=",
                              why="without precision=, gradients are reduced in the dtype of their parameters",
                              hint="precision='bf16', or leave reduce_dtype out")  # fmt: skip


OPTIONS: dict[str, Option] = {row.name: row.metadata["option"] for row in fields(Options)}


def names_of(kind: Any) -> list[str]:
    """Return the names of the options in one of the TypedDicts, in the order of `Options`."""
    return [name for name in OPTIONS if name in kind.__annotations__]


def _filled(name: str) -> str:
    text = f"{name}: {OPTIONS[name].help}"
    return textwrap.fill(text, 104, subsequent_indent="    ", break_on_hyphens=False)


Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(kind: Any) -> Callable[[Function], Function]:
    """Decorate a function that takes `**options`: its signature and docstring then list each option."""

    def show(function: Function) -> Function:
        names, signature = names_of(kind), inspect.signature(function)
        explicit = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default,
                              annotation=kind.__annotations__[name].__forward_arg__) for name in names
        ]  # fmt: skip
        function.__signature__ = signature.replace(parameters=[*explicit, *shared])  # type: ignore[attr-defined]
        lines = [_filled(name) for name in names]
        listed = textwrap.indent("\n".join(lines), " " * 8).strip()
        function.__doc__ = (function.__doc__ or "").replace(f"**options: `{kind.__name__}`.", listed)
        return function

    return show


def read_options(function: Callable[..., Any], options: Mapping[str, Any], **more: Any) -> Options:
    """Check the options that a function decorated by `with_options` received.

    Args:
        more: further fields of `Options`.
    Raises OptionError for an unknown option or an invalid value.
    """
    takes = [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    takes.sort(key=lambda name: name.startswith("example_"))
    for name in options:
        if name not in takes:
            why = f"other functions take it, {function.__name__}() does not" if name in OPTIONS else ""
            raise OptionError(f"unknown option {name}=", why=why, hint=f"one of {', '.join(takes)}")
    return Options(**options, **more)

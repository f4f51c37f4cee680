"""A copy of a model with fewer repeated blocks, small enough to be verified in float64.

Blocks of one kind (same class, same shapes) are right or wrong together, so a few stand for all: of every run of equal
blocks, or of equal groups of alternating blocks, two are kept, so that what happens between two blocks is seen too.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopart.errors import InputError
from autopart.graph import operators
from autopart.passes.partition import active_operators, partition
from autopart.passes.recompute import blocks as blocks_of
from autopart.plan import Plan
from autopart.recomputation import Recompute, word_of
from autopart.trace import Trace

COPIES = 3
"""What a verification holds of every weight, in float64: the copy, its gradient, and the gradients of all ranks."""

_COUNTS = re.compile(r"(num|n)_\w*(layer|block|depth)s?|depth|(layer|block)s?_(num|count)|num_layers")


@dataclass(frozen=True)
class ScaledCopy:
    """The copy. `kept`: {path of a container of blocks: (numbers of the kept ones, how many there were)}."""

    model: nn.Module
    kept: Mapping[str, tuple[tuple[int, ...], int]]
    is_random: bool

    @property
    def notes(self) -> list[str]:
        """`verified on a copy with 2 of 32 blocks (model.layers)`."""
        notes = [f"verified on a copy with {_told(self.kept)}"] if self.kept else []
        return notes + ["weights on the meta device are random here"] * self.is_random

    def plan(self, plan: Plan, identity: Mapping[str, Any], traced: Trace) -> Plan:
        """A plan of the model for the copy: what it says of kept blocks, by name or pattern, and cuts made anew."""
        nodes = list(operators(traced.graph))
        known = {node.meta[name] for node in nodes for name in ("key", "group")}
        operators_ = {renamed(key, self.kept): entry for key, entry in plan.operators.items()}
        weights = {renamed(key, self.kept): entry for key, entry in plan.parameters.items()}
        stages = len(plan.cuts) + 1
        active = active_operators(traced.graph)
        cuts = partition(traced.graph, stages).cuts if stages > 1 else ()
        return replace(
            plan, model={**plan.model, **identity}, cuts=tuple(active[cut].meta["key"] for cut in cuts),
            parameters={key: entry for key, entry in weights.items() if key is not None},
            operators={key: entry for key, entry in operators_.items() if key is not None and key in known},
            recompute=self.recompute(plan.recompute, traced),
        )  # fmt: skip

    def recompute(self, recompute: Recompute, traced: Trace) -> Recompute:
        """What holds for the blocks of the copy: as for those of the model that they are copies of."""
        if isinstance(recompute, str):
            return recompute
        numbers = {
            f"{path}.{i}": f"{path}.{was}" for path, (kept, _) in self.kept.items() for i, was in enumerate(kept)
        }
        blocks = filter(None, blocks_of(traced.graph).values())
        copied = {block: word_of(recompute, numbers.get(block, block)) for block in blocks}
        return copied | {"*": word_of(recompute, "")}


def scaled_copy(model: nn.Module, arguments: Mapping[str, Any]) -> ScaledCopy:
    """A copy of `model` with as few repeated blocks as show every kind, without the weights of the others.

    Weights on the meta device become random. A container is left whole where the model does not run without some of
    its blocks on `arguments`. Raises InputError where the smallest copy does not fit into memory in float64.
    """
    found = dict(_repeated(model))
    attempts = [found, *({path: blocks} for path, blocks in found.items() if len(found) > 1), {}]
    is_random = any(p.is_meta for p in model.parameters())
    room = available_bytes()
    for blocks in attempts:
        kept = {path: (numbers, len(_blocks(model, path))) for path, numbers in blocks.items()}
        stay = [p for name, p in model.named_parameters() if renamed(name, kept) is not None]
        if needed_bytes(stay) > room:
            break
        made = _copy(model, blocks)
        _materialise(made)
        try:
            with torch.no_grad():
                made(**arguments)
        except Exception:  # whatever a model's own code raises when its blocks are fewer
            if blocks:
                continue
            raise
        return ScaledCopy(made, kept, is_random)
    size, parts = needed_bytes(stay), f", with {_told(kept)}" if kept else ""
    raise InputError(
        f"{type(model).__name__} in float64 needs {size / 1e9:.3g} GB, and {room / 1e9:.3g} GB are free",
        why=f"verify() holds {COPIES} copies of {sum(p.numel() for p in stay):,} parameters{parts}",
        hint="the same model with smaller sizes (hidden, vocabulary): its layouts come from the same rules",
    )  # fmt: skip


def fewer_blocks(model: nn.Module) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """A copy of `model` with as few repeated blocks as show every kind, and for every block that the model has which
    block of the copy it is like: {path of a container: one number a block}. Weights stay where they are."""
    found = dict(_repeated(model))
    like = {}
    for path, kept in found.items():
        kinds = [_kind(block) for block in _blocks(model, path)]
        like[path] = tuple(
            max((k for k, number in enumerate(kept) if number <= i and kinds[number] == kind), default=0)
            for i, kind in enumerate(kinds)
        )
    return _copy(model, found), like


def renamed(name: str, kept: Mapping[str, tuple[tuple[int, ...], int]]) -> str | None:
    """A name of the model's as a copy has it; None for what belongs to a dropped block.

    >>> renamed("layers.7.mlp/mul", {"layers": ((0, 7), 8)})
    'layers.1.mlp/mul'
    """
    for path, (blocks, _) in kept.items():
        match = re.match(rf"{re.escape(path)}\.(\d+)(?=[./])", name)
        if match is None:
            continue
        if int(match[1]) not in blocks:
            return None
        name = f"{path}.{blocks.index(int(match[1]))}{name[match.end() :]}"
    return name


def _told(kept: Mapping[str, tuple[tuple[int, ...], int]]) -> str:
    return ", ".join(f"{len(blocks)} of {number} blocks ({path})" for path, (blocks, number) in kept.items())


def needed_bytes(parameters: Iterable[Tensor]) -> int:
    """Memory to verify a model with these parameters, without what it computes in between."""
    return COPIES * 8 * sum(p.numel() for p in parameters)


def fits(parameters: Iterable[Tensor]) -> bool:
    """Whether a model with these parameters can be verified as it is: they have values, and there is room."""
    weights = list(parameters)
    return not any(w.is_meta for w in weights) and needed_bytes(weights) <= available_bytes()


def available_bytes() -> int:
    """Memory that can be had now."""
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fewest(kinds: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of blocks to keep: what repeats a period, longer than two of it, goes.

    >>> fewest("AAAA"), fewest("ABBBB"), fewest("ABABABAB")
    ((0, 1), (0, 1, 2), (0, 1, 2, 3))
    """
    options = [
        tuple(i for i in range(len(kinds)) if i < 2 * p or not kinds[i] == kinds[i - p] == kinds[i - 2 * p])
        for p in range(1, len(kinds) // 2 + 1)
    ]
    every = [option for option in options if {kinds[i] for i in option} == set(kinds)]
    return min(every, key=len, default=tuple(range(len(kinds))))


def _repeated(model: nn.Module, path: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """The outermost containers of blocks of which some can go."""
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        kept = fewest([_kind(block) for block in child]) if isinstance(child, (nn.ModuleList, nn.Sequential)) else ()
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(kept) < len(child):
            yield inner, kept
        else:
            yield from _repeated(child, inner)


def _blocks(model: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    return cast("nn.ModuleList | nn.Sequential", model.get_submodule(path))


def _kind(block: nn.Module) -> tuple:
    """What two blocks have in common that are right or wrong together."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    modes = tuple(
        (name, key, setting)
        for name, module in block.named_modules()
        for key, setting in sorted(vars(module).items()) if isinstance(setting, (bool, str))
    )  # fmt: skip
    classes = tuple(type(module) for module in block.modules())
    return classes, shapes, modes


def _copy(model: nn.Module, kept: Mapping[str, tuple[int, ...]]) -> nn.Module:
    memo: dict[int, Any] = {}
    counts: dict[int, int] = {}
    dropped: dict[str, list[int]] = {}
    for path, blocks in kept.items():
        container = _blocks(model, path)
        dropped[path] = [i for i in range(len(container)) if i not in blocks]
        memo |= {id(container[i]): nn.Identity() for i in dropped[path]}  # copied instead of the block
        counts[len(container)] = len(blocks)
    made = copy.deepcopy(model, memo)
    for path, numbers in dropped.items():
        container = _blocks(made, path)
        for i in reversed(numbers):
            del container[i]
    _recount(made, counts, {len(_blocks(model, path)): blocks for path, blocks in kept.items()})
    return made


def _recount(model: nn.Module, counts: Mapping[int, int], kept: Mapping[int, tuple[int, ...]]) -> None:
    """Numbers of layers in configurations and modules follow, and lists with one entry a layer."""
    holders = {id(m): vars(m) for m in model.modules()}
    holders |= {id(c): vars(c) for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    for settings in holders.values():
        for name, setting in list(settings.items()):
            if isinstance(setting, int) and not isinstance(setting, bool) and _COUNTS.fullmatch(name):
                settings[name] = counts.get(setting, setting)
            elif isinstance(setting, list) and name.startswith("layer") and len(setting) in kept:
                settings[name] = [setting[i] for i in kept[len(setting)]]


def _materialise(model: nn.Module) -> None:
    """Random values for what is on the meta device: small weights, scales near one, whole numbers 0."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in made:
                    value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.1
                    value = value * scale + float(parameter.dim() == 1 and name == "weight")
                    made[id(parameter)] = nn.Parameter(value.to(parameter.dtype), parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                value = torch.rand(buffer.shape, generator=generator)
                drawn = value if buffer.is_floating_point() else torch.zeros(buffer.shape)
                setattr(module, name, drawn.to(buffer.dtype))

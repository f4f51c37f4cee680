"""Reduced copy of a model for verification in float64: fewer repeated blocks, then smaller sizes.

Blocks of equal class and shapes have equal programs, so verifying one of them verifies all. The copy has two blocks of
each run of equal blocks, so that it also has a boundary between two blocks. If blocks alternate (ABABAB), the copy has
two periods (ABAB). `smaller_config.py` chooses smaller sizes, from the config with which the model is made.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopart.common.progress import announce, phase
from autopart.common.scoped import default_dtype
from autopart.compat.torch_internals import tree_map
from autopart.errors import InputError
from autopart.ir.blocks.block_index import blocks as blocks_of
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators, operators
from autopart.ir.mesh import Mesh
from autopart.ir.run.recompute_spec import Recompute, recompute_mode_of
from autopart.ir.trace import Trace, device_of_weights
from autopart.passes.choose.stages.stage_partition import partition
from autopart.plans.plan import Plan
from autopart.proof.scale.smaller_config import LADDER, Changes, Divisors, is_scalable, smaller, smaller_call
from autopart.proof.verify_estimate import (
    MOST_FOR_COPY,
    SHARE_COPY,
    SHARE_FULL_SIZE,
    Estimate,
    available_bytes,
    seconds,
    values_bytes,
    weights_bytes,
)
from autopart.recipe.make_plan import prepare
from autopart.tracing.meta_copy import copy_of

_COUNTS = re.compile(r"(num|n)_\w*(layer|block|depth)s?|depth|(layer|block)s?_(num|count)|num_layers")


@dataclass(frozen=True)
class ScaledCopy:
    """A reduced copy of a model, and a record of the reductions.

    Args:
        kept: {path of a module list: (indices of the blocks that the copy has, original number of blocks)}.
        is_random: True if the weights are random.
        changes: {entry of the config: (original size, smaller size)}.
        call: arguments of `smaller_call` (vocabulary, divisor of the sequence length, number of ranks); None if calls
            are not reduced.
    """

    model: nn.Module
    kept: Mapping[str, tuple[tuple[int, ...], int]]
    is_random: bool
    changes: Changes = field(default_factory=dict)
    call: tuple[int, int, int] | None = None

    @property
    def notes(self) -> list[str]:
        """Notes for the user about smaller sizes and random weights of the copy."""
        notes = [f"verified on {self.text}"] if self.kept or self.changes else []
        why = "of smaller sizes" if self.changes else "on the meta device"
        return notes + [f"weights {why} are random here"] * self.is_random

    @property
    def text(self) -> str:
        """Description of the copy: `a copy with 2 of 32 blocks (model.layers), vocab_size 2004 of 128256`."""
        sizes = [f"{name} {new} of {old}" for name, (old, new) in self.changes.items()]
        return "a copy with " + ", ".join([*filter(None, [_blocks_text(self.kept)]), *sizes])

    def with_weights(self) -> ScaledCopy:
        """Give random values to weights on the meta device, and return the copy."""
        _materialise(self.model)
        return self

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a call of the model to a call of the copy."""
        shorter = smaller_call(arguments, *self.call) if self.call is not None else dict(arguments)
        assert shorter is not None, "a call of tokens alone"
        return shorter

    def plan(self, plan: Plan, identity: Mapping[str, Any], traced: Trace) -> Plan:
        """Convert a plan of the model to a plan of the copy.

        The new plan has the entries of the blocks that the copy has, and new stage boundaries.
        """
        nodes = list(operators(traced.graph))
        known = {facts(node)[name] for node in nodes for name in ("key", "group")}
        operators_ = {renamed(key, self.kept): entry for key, entry in plan.operators.items()}
        weights = {renamed(key, self.kept): entry for key, entry in plan.parameters.items()}
        stages = len(plan.cuts) + 1
        active = active_operators(traced.graph)
        cuts = partition(traced.graph, stages).cuts if stages > 1 else ()
        return replace(
            plan, model={**plan.model, **identity}, cuts=tuple(facts(active[cut])["key"] for cut in cuts),
            parameters={key: entry for key, entry in weights.items() if key is not None},
            operators={key: entry for key, entry in operators_.items() if key is not None and key in known},
            recompute=self.recompute(plan.recompute, traced),
        )  # fmt: skip

    def recompute(self, recompute: Recompute, traced: Trace) -> Recompute:
        """Convert the option `recompute=`: each block of the copy gets the mode of its original block."""
        if isinstance(recompute, str):
            return recompute
        numbers = {
            f"{path}.{i}": f"{path}.{was}" for path, (kept, _) in self.kept.items() for i, was in enumerate(kept)
        }
        blocks = filter(None, blocks_of(traced.graph).values())
        copied = {block: recompute_mode_of(recompute, numbers.get(block, block)) for block in blocks}
        return copied | {"*": recompute_mode_of(recompute, "")}


@dataclass(frozen=True)
class VerifyLoad:
    """Mesh, training steps and loss function, which determine the memory and time of a verification."""

    mesh: Mesh | None = None
    steps: int = 0
    has_loss_fn: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one pipeline stage."""
        return 1 if self.mesh is None else self.mesh.num_ranks // self.mesh.size("pp")

    def estimate(self, model: nn.Module, arguments: Mapping[str, Any]) -> Estimate:
        """Estimate the memory and time of a verification, from a trace that allocates no memory."""
        phase("estimating what the verification needs")
        parameters = list(model.parameters())
        tokens = max(
            [1, *(t.numel() for t in arguments.values() if isinstance(t, Tensor) and not t.is_floating_point())]
        )
        return Estimate(
            weights_bytes(parameters, self.mesh, self.steps > 0),
            values_bytes(prepare(model, arguments, double=True), self.mesh),
            seconds(parameters, tokens, self.steps),
        )


ONE_PASS = VerifyLoad()


def scaled_copy(model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad = ONE_PASS) -> ScaledCopy:
    """Return a copy of `model` with few repeated blocks, but with every kind of block.

    Weights of dropped blocks are not copied, and weights on the meta device become random. If the model does not run
    without some blocks of a module list, the copy has all blocks of that list.

    If the verification of the copy needs more than `SHARE_COPY` of the free memory, the copy also gets smaller sizes.
    This needs a model that is made from a transformers config. Raises InputError if the smallest copy does not fit into
    memory.
    """
    free = available_bytes(device_of(model))
    fair = min(SHARE_COPY * free, MOST_FOR_COPY)
    few, needed = _with_fewer_blocks(model, arguments, work, free)
    if few is None or needed.total > fair:
        resized = _with_smaller_sizes(model, arguments, work, fair)
        if resized is not None:
            few, needed = resized
    if few is None or needed.total > SHARE_FULL_SIZE * free:
        raise too_large(model, needed, free)
    announce(f"verifying {few.text}, which needs {needed}; {free / 1e9:.3g} GB are free")
    return few.with_weights()


def copies_by_kind(model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad) -> list[ScaledCopy]:
    """Return several copies of a model, each of which has blocks of one kind only.

    For a module list with dense and expert layers, one copy has only dense and one only expert layers. Each copy needs
    less memory than a copy with all kinds. Weights on the meta device stay there. Raises InputError if a copy does not
    fit into memory. Exceptions of models that do not run with one kind of block are not caught.
    """
    free, copies = available_bytes(device_of(model)), []
    for path, kinds in _kinds(model):
        others = {p: kept for p, kept in _repeated(model) if p != path}
        for kind in dict.fromkeys(kinds):
            blocks = {**others, path: tuple(i for i, k in enumerate(kinds) if k == kind)[:2]}
            kept = {p: (numbers, len(_blocks(model, p))) for p, numbers in blocks.items()}
            copied = _copy(model, blocks)
            needed = work.estimate(copied, arguments)
            if needed.total > SHARE_FULL_SIZE * free:
                raise too_large(copied, needed, free)
            announce(f"verifying a copy with {_blocks_text(kept)}, which needs {needed}; {free / 1e9:.3g} GB are free")
            copies.append(ScaledCopy(copied, kept, any(p.is_meta for p in model.parameters())))
    return copies


def _kinds(model: nn.Module, path: str = "") -> Iterator[tuple[str, list[tuple]]]:
    """Yield (path, kind of each block) for the outermost module lists with blocks of different kinds."""
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        kinds = [_kind(block) for block in child] if isinstance(child, nn.ModuleList) else []
        if len(set(kinds)) > 1:
            yield inner, kinds
        else:
            yield from _kinds(child, inner)


def too_large(model: nn.Module, needed: Estimate, free: int) -> InputError:
    repeated = {path: (numbers, len(_blocks(model, path))) for path, numbers in _repeated(model)}
    with_blocks = f", with {_blocks_text(repeated)}" if repeated else ""
    return InputError(
        f"{type(model).__name__} in float64 needs {needed.total / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free",
        why="verify runs the model and all ranks in this process: weights and gradients take "
        f"{needed.weights / 1e9:.3g} GB, activations {needed.values / 1e9:.3g} GB{with_blocks}",
        hint="the same model with smaller sizes (hidden, vocabulary): its layouts come from the same rules",
    )


def _with_fewer_blocks(
    model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad, free: int
) -> tuple[ScaledCopy | None, Estimate]:
    """Return (copy with fewer blocks, estimated memory and time of its verification).

    The copy is None if it needs more than `free` bytes. Large copies keep their weights on the meta device.
    """
    repeated = dict(_repeated(model))
    is_random = any(p.is_meta for p in model.parameters())
    needed = Estimate(0, 0)
    for blocks in [repeated, *({path: kept} for path, kept in repeated.items() if len(repeated) > 1), {}]:
        kept = {path: (numbers, len(_blocks(model, path))) for path, numbers in blocks.items()}
        stay = [p for name, p in model.named_parameters() if renamed(name, kept) is not None]
        needed = Estimate(weights_bytes(stay, work.mesh, work.steps > 0), 0)
        if needed.total > SHARE_FULL_SIZE * free:
            return None, needed
        copied = _copy(model, blocks)
        try:
            if is_small(copied, arguments, work, free):
                _materialise(copied)
                with torch.no_grad():
                    copied(**on_device(arguments, device_of(copied)))
            else:
                needed = work.estimate(copied, arguments)
        except Exception:  # a model's own code may raise anything if it has fewer blocks
            if blocks:
                continue
            raise
        return ScaledCopy(copied, kept, is_random), needed
    raise AssertionError("unreachable: the last attempt keeps all blocks, and returns or raises")


def _with_smaller_sizes(
    model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad, fair: float
) -> tuple[ScaledCopy, Estimate] | None:
    """Return (copy with fewer blocks and smaller sizes, estimate of its verification).

    The copy is the largest that needs at most `fair` bytes. Returns None if there is none.
    """
    config = getattr(model, "config", None)
    if work.has_loss_fn or config is None or not is_scalable(config):
        return None
    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(config))
    if _shapes(whole) != _shapes(model):  # the model was changed after its construction
        return None
    blocks = dict(_repeated(whole))
    kept = {path: (numbers, len(_blocks(whole, path))) for path, numbers in blocks.items()}
    few = _copy(whole, blocks)
    for divisors in LADDER:
        resized = _smaller_copy(model, few, divisors, arguments, work, fair)
        if resized is not None:
            return replace(resized[0], kept=kept), resized[1]
    return None


def _smaller_copy(
    model: nn.Module, few: nn.Module, divisors: Divisors, arguments: Mapping[str, Any], work: VerifyLoad, fair: float
) -> tuple[ScaledCopy, Estimate] | None:
    """Return (copy with the sizes divided by `divisors`, estimate of its verification).

    Returns None if the verification needs more than `fair` bytes.

    Args:
        few: copy of the model with fewer blocks, on the meta device.
    """
    config, changes = smaller(few.config, divisors, work.num_ranks)
    call = (config.vocab_size, divisors.sequence, work.num_ranks)
    shorter = smaller_call(arguments, *call)
    if shorter is None:
        return None
    try:
        with torch.device("meta"):
            empty = type(model)(copy.deepcopy(config))
        if list(_shapes(empty)) != list(_shapes(few)):
            return None
        if weights_bytes(empty.parameters(), work.mesh, work.steps > 0) > fair:
            return None
        needed = work.estimate(empty.train(model.training), shorter)
    except Exception:  # a model's own code may raise anything for unsupported sizes
        return None
    if needed.total > fair:
        return None
    copied = _seeded(type(model), config).train(model.training).to(device_of(model))
    trained = {name: p.requires_grad for name, p in few.named_parameters()}
    for name, parameter in copied.named_parameters():
        parameter.requires_grad_(trained[name])
    tokens = {name: value.shape[1] for name, value in arguments.items() if isinstance(value, Tensor)}
    fewer = {f"tokens of {n}": (size, shorter[n].shape[1]) for n, size in tokens.items() if size != shorter[n].shape[1]}
    return ScaledCopy(copied, {}, True, {**changes, **fewer}, call), needed


def _seeded(kind: type[nn.Module], config: Any) -> nn.Module:
    """Construct a model in float64 from a config. Its own code initializes the weights."""
    with default_dtype(torch.float64), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config)


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model is verified: the weights' device, or the CPU if they are on meta."""
    device = device_of_weights(model)
    return torch.device("cpu") if device.type == "meta" else device


def on_device(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors of a call, which data loaders leave on the CPU, to a device."""
    return dict(tree_map(lambda t: t.to(device) if isinstance(t, Tensor) and not t.is_meta else t, dict(arguments)))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def with_fewest_blocks(model: nn.Module) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return (copy of `model` with few repeated blocks of every kind, mapping of block indices).

    The mapping is {path of a module list: for each block of the model, the index of an equal block in the copy}.
    Weights stay on their device.
    """
    repeated = dict(_repeated(model))
    like = {}
    for path, kept in repeated.items():
        kinds = [_kind(block) for block in _blocks(model, path)]
        like[path] = tuple(
            max((k for k, number in enumerate(kept) if number <= i and kinds[number] == kind), default=0)
            for i, kind in enumerate(kinds)
        )
    return _copy(model, repeated), like


def renamed(name: str, kept: Mapping[str, tuple[tuple[int, ...], int]]) -> str | None:
    """Convert a name of the model to the name in the copy; None if it belongs to a dropped block.

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


def _blocks_text(kept: Mapping[str, tuple[tuple[int, ...], int]]) -> str:
    return ", ".join(f"{len(blocks)} of {number} blocks ({path})" for path, (blocks, number) in kept.items())


def is_small(model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad, free: int) -> bool:
    """Return True if a rough estimate of a verification's memory is below 2 % of `free` bytes.

    Then the exact estimate, which needs a trace, is not necessary. The rough estimate adds weights, gradients,
    optimizer state, and activations: 48 bytes x elements of all inputs x rows of all weights.
    """
    parameters = list(model.parameters())
    entries = sum(value.numel() for value in arguments.values() if isinstance(value, Tensor))
    rows = sum(p.shape[0] for p in parameters if p.dim())
    needed = weights_bytes(parameters, work.mesh, work.steps > 0) + 48 * entries * rows
    return needed <= free / 50


def fits(model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad = ONE_PASS) -> bool:
    """Return True if free memory suffices to verify the full model, without a reduced copy.

    The model can be on the meta device.
    """
    free = available_bytes(device_of(model))
    if is_small(model, arguments, work, free):
        return True
    most = SHARE_FULL_SIZE * free
    if weights_bytes(model.parameters(), work.mesh, work.steps > 0) > most:
        return False
    needed = work.estimate(model, arguments)
    if needed.total <= most:
        announce(f"verifying {type(model).__name__} at full size, which needs {needed}; {free / 1e9:.3g} GB are free")
    return needed.total <= most


def check_memory(model: nn.Module, arguments: Mapping[str, Any], work: VerifyLoad) -> None:
    """Raise InputError if the verification of the full model needs more memory than is free."""
    free = available_bytes(device_of(model))
    if is_small(model, arguments, work, free):
        return
    needed = Estimate(weights_bytes(model.parameters(), work.mesh, work.steps > 0), 0)
    if needed.total <= free:
        needed = work.estimate(model, arguments)
    if needed.total > free:
        raise too_large(model, needed, free)


def blocks_to_keep(kinds: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the blocks that a copy has: at most two periods of each repetition.

    >>> blocks_to_keep("AAAA"), blocks_to_keep("ABBBB"), blocks_to_keep("ABABABAB")
    ((0, 1), (0, 1, 2), (0, 1, 2, 3))
    """
    options = [
        tuple(i for i in range(len(kinds)) if i < 2 * p or not kinds[i] == kinds[i - p] == kinds[i - 2 * p])
        for p in range(1, len(kinds) // 2 + 1)
    ]
    every = [option for option in options if {kinds[i] for i in option} == set(kinds)]
    return min(every, key=len, default=tuple(range(len(kinds))))


def _repeated(model: nn.Module, path: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (path, indices of the blocks to keep) for the outermost module lists with blocks to drop."""
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        kept = (
            blocks_to_keep([_kind(block) for block in child])
            if isinstance(child, (nn.ModuleList, nn.Sequential))
            else ()
        )
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(kept) < len(child):
            yield inner, kept
        else:
            yield from _repeated(child, inner)


def _blocks(model: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    return cast("nn.ModuleList | nn.Sequential", model.get_submodule(path))


def _kind(block: nn.Module) -> tuple:
    """Return the kind of a block: a key that is equal for blocks with equal classes, shapes and settings."""
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
        # Object that the copy gets in place of the block.
        memo |= {id(container[i]): nn.Identity() for i in dropped[path]}
        counts[len(container)] = len(blocks)
    copied = copy_of(model, memo)
    for path, numbers in dropped.items():
        container = _blocks(copied, path)
        for i in reversed(numbers):
            del container[i]
    _recount(copied, counts, {len(_blocks(model, path)): blocks for path, blocks in kept.items()})
    return copied


def _recount(model: nn.Module, counts: Mapping[int, int], kept: Mapping[int, tuple[int, ...]]) -> None:
    """Set the layer counts in a copy's modules and configs, and shorten lists with an entry per layer.

    The keys of both mappings are original numbers of layers.
    """
    holders = {id(m): vars(m) for m in model.modules()}
    holders |= {id(c): vars(c) for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    for settings in holders.values():
        for name, setting in list(settings.items()):
            if isinstance(setting, int) and not isinstance(setting, bool) and _COUNTS.fullmatch(name):
                settings[name] = counts.get(setting, setting)
            elif isinstance(setting, list) and name.startswith("layer") and len(setting) in kept:
                settings[name] = [setting[i] for i in kept[len(setting)]]


def _materialise(model: nn.Module) -> None:
    """Give values to tensors on the meta device.

    Matrices and biases become small random values, one-dimensional weights (of norms) random values near one, and
    integer buffers zeros.
    """
    generator = torch.Generator().manual_seed(0)
    materialised: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in materialised:
                    value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.1
                    value = value * scale + float(parameter.dim() == 1 and name == "weight")
                    materialised[id(parameter)] = nn.Parameter(value.to(parameter.dtype), parameter.requires_grad)
                setattr(module, name, materialised[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                value = torch.rand(buffer.shape, generator=generator)
                drawn = value if buffer.is_floating_point() else torch.zeros(buffer.shape)
                setattr(module, name, drawn.to(buffer.dtype))

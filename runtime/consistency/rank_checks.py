"""Checks that setup, program, weights and arguments of calls are equal on all ranks.

Without these checks, ranks that differ would compute wrong values, or wait for each other forever. Ranks compare
digests in one collective on the CPU. If digests differ, every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autopart.errors import RuntimeSetupError
from autopart.ir.graph import DTYPE_NAMES
from autopart.ir.program import Program
from autopart.plans.rank_digest import EXAMPLE
from autopart.runtime.comm.host_group import HostGroup
from autopart.runtime.consistency.checksums import checksums
from autopart.tracing.meta_copy import has_memory

WEIGHTS, TRACED = "weights", "the traced program"
SHOWN = (
    60  # a longer text, or one of several lines, is compared by its digest, and shown by its first line that differs
)


def check_same_start(
    model: nn.Module,
    subjects: Mapping[str, str],
    group: HostGroup | None,
    program: Program | None,
    weights: bool,
) -> None:
    """Raise RuntimeSetupError if ranks differ in `subjects`, or have traced different programs.

    A collective call of all ranks. It does nothing if `group` is None: there is only one rank.

    Args:
        subjects: {name: text}, such as {"mesh": "dp2,tp2"}. Texts must be equal on all ranks.
        weights: True to also compare the values of parameters and buffers. If only values differ, all ranks take the
            first rank's values.
    """
    if group is None:
        return
    subjects = dict(subjects)
    if program is not None:
        subjects[TRACED] = program_text(program)
    if weights:
        subjects[WEIGHTS] = weights_digest(model)
    if not check_same_texts(subjects, group):
        take_first_ranks_weights(model, group)


def model_texts(model: nn.Module) -> dict[str, str]:
    """Return texts that must be equal on all ranks: the model's class, and properties of its tensors."""
    lines = [_line(kind, name, tensor) for kind, name, tensor in _tensors(model, every_name=True)]
    return {"model": type(model).__name__, "parameters and buffers": "\n".join(lines)}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of a model's parameters and buffers, without meta and sparse tensors.

    A tied tensor is listed only under its first name.
    """
    tensors = _tensors(model, every_name=False)
    return {name: tensor.detach() for _, name, tensor in tensors if has_memory(tensor) and not tensor.is_sparse}


def weights_digest(model: nn.Module) -> str:
    """Return a digest of the values of all parameters and buffers."""
    return _digest(" ".join(map(str, checksums(weights_of(model).values()))))


def program_text(program: Program) -> str:
    """Return the graphs of a program as text, to compare programs between ranks.

    Device indices are removed, because they differ between ranks.
    """
    lines = []
    for stage in program.stages:
        for graph in (stage.prologue, stage.graph):
            lines += [f"stage {stage.index}: {node.format_node()}" for node in graph.graph.nodes if node.op != "output"]
    lines += [f"{name}: {update}" for name, update in program.weight_updates.items()]
    text = "\n".join(lines)
    for index in range(torch.cuda.device_count()):
        text = text.replace(f"cuda:{index}", "cuda")
    return text


def check_same_texts(subjects: Mapping[str, str], group: HostGroup) -> bool:
    """Compare texts between ranks. Return True if the digest of the weights is equal on all ranks.

    `subjects`: {name: text}. Raises RuntimeSetupError if a text differs, except for the digest of the weights.
    """
    mine = {name: text if _is_short(text) else _digest(text) for name, text in subjects.items()}
    everyones = group.gather_objects(mine)
    names = list(dict.fromkeys(name for theirs in everyones for name in theirs))
    differ = [name for name in names if len({theirs.get(name) for theirs in everyones}) > 1]
    unlike = [name for name in differ if name != WEIGHTS]
    if unlike:
        hint = "run the same script, model, mesh, plan and version on every rank"
        if EXAMPLE in unlike and all(EXAMPLE in theirs for theirs in everyones):  # plan and program depend on it
            unlike, hint = [EXAMPLE], "an example of the same shapes and dtypes on every rank"
        elif unlike[1:]:
            unlike = [name for name in unlike if name != TRACED]
        texts = group.gather_objects({name: subjects.get(name, "") for name in unlike})
        lines = [_subject_text(name, [theirs[name] for theirs in texts], group) for name in unlike[:3]]
        more = f"; and {len(unlike) - 3} more" if len(unlike) > 3 else ""
        raise RuntimeSetupError(
            f"the ranks differ in {unlike[0]}",
            why="\n         ".join(lines) + more,
            hint=hint,
        )
    return WEIGHTS not in differ


@torch.no_grad()
def take_first_ranks_weights(model: nn.Module, group: HostGroup) -> None:
    """Broadcast the first rank's values of all parameters and buffers that differ between ranks.

    A collective call. The first rank warns once, and names the first tensor that differs.
    """
    weights = weights_of(model)
    numbers = dict(zip(weights, checksums(weights.values()), strict=True))
    everyones = group.gather_objects(numbers)
    differ = [name for name in weights if len({theirs[name] for theirs in everyones}) > 1]
    for name in differ:
        values = weights[name].to("cpu", copy=True, memory_format=torch.contiguous_format)
        weights[name].copy_(group.broadcast(values))
    first = differ[0]
    others = [rank for rank, theirs in enumerate(everyones) if theirs[first] != everyones[0][first]]
    if group.index == 0:
        more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
        warnings.warn(
            f"the ranks begin with different weights: '{first}' of {ranks_text(others, group)} differs from that of "
            f"{ranks_text([0], group)}{more}. All ranks take the weights of {ranks_text([0], group)}. "
            "Call torch.manual_seed(0) on every rank before the model is made, or load one checkpoint on all.",
            stacklevel=2,
        )


def ranks_text(ranks: Sequence[int], group: HostGroup) -> str:
    """Format indices of a group's ranks by their global ranks: `rank 1`, `ranks 0, 2 to 5`."""
    numbers = sorted(group.ranks[rank] for rank in ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(words)}"


def by_rank(texts: Sequence[str], group: HostGroup, leaves_out_empty: bool = False) -> str:
    """Format one text per rank. Ranks with equal texts are grouped: `ranks 0, 2: dp2; rank 1: tp4`.

    Args:
        leaves_out_empty: True to leave out ranks whose text is empty, instead of showing "none" for them.
    """
    shown = [text for text in dict.fromkeys(texts) if text or not leaves_out_empty]
    ranks = {text: [rank for rank, other in enumerate(texts) if other == text] for text in shown}
    return "; ".join(f"{ranks_text(who, group)}: {text or 'none'}" for text, who in ranks.items())


def _subject_text(name: str, texts: Sequence[str], group: HostGroup) -> str:
    """Format how one compared property differs between ranks.

    If texts are long, only the first line that differs is shown.
    """
    if all(map(_is_short, texts)):
        return f"{name}: {by_rank(texts, group)}"
    for lines in itertools.zip_longest(*(text.splitlines() for text in texts), fillvalue="no more"):
        if len(set(lines)) > 1:
            return f"{name}: {by_rank(lines, group)}"
    return f"{name} differ"


def _is_short(text: str) -> bool:
    return len(text) <= SHOWN and "\n" not in text


def _digest(text: str) -> str:
    return "digest " + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tensors(model: nn.Module, every_name: bool) -> list[tuple[str, str, Tensor]]:
    parameters = [("parameter", *pair) for pair in model.named_parameters(remove_duplicate=not every_name)]
    buffers = [("buffer", *pair) for pair in model.named_buffers(remove_duplicate=not every_name)]
    return [*parameters, *buffers]


def _line(kind: str, name: str, tensor: Tensor) -> str:
    """Describe the properties of a tensor that must be equal on all ranks: `'up.weight' f32[256,128]`."""
    shape = ",".join(map(str, tensor.shape))
    notes = [kind] * (kind == "buffer") + ["frozen"] * (kind == "parameter" and not tensor.requires_grad)
    notes += ["on meta"] * tensor.is_meta
    return " ".join([f"'{name}'", f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}[{shape}]", *notes])

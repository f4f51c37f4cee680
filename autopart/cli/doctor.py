"""Diagnosis of a model on one page, to paste into an issue.

The page shows whether the model can be traced. For each mesh, it lists what is sharded, what is replicated and why, or
the error.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import autopart
from autopart.cli.console import wrapped
from autopart.common.text import ShownAsText, quantity
from autopart.cost.flops import matrix_work
from autopart.errors import AutopartError, InputError
from autopart.ir.graph import active_operators
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Trace
from autopart.options import Options
from autopart.passes.choose.explain.unsharded_operators import divided
from autopart.passes.choose.plan_codec import decode
from autopart.plans.headlines import replicated_operator_text, replicated_operators
from autopart.recipe.make_plan import make_plan, prepare
from autopart.tracing.trace_model import WithLoss, bind_call, flatten_call

MESHES = ("tp2", "dp2", "pp2")
"""Meshes to try by default."""

MOST_UNSHARDED, MOST_NOTES = 4, 2
"""Maximum number of lines per mesh for kinds of replicated operators, and for notes."""

NEGLIGIBLE = 0.005
"""Fractions of the matrix FLOPs below this are not mentioned."""

GUESSED = ", guessed from the shapes: autopart.check_rule proves or refutes it"
"""Text printed after a sharding rule that `doctor` suggests."""


def versions() -> dict[str, str]:
    """Return {name: version} of Python, torch and other installed software, for the page."""
    return {"autopart": autopart.__version__, "torch": torch.__version__, "Python": platform.python_version()}


@dataclass(frozen=True)
class Outcome:
    """Result of planning a model for one mesh.

    Attributes:
        refused: the error as text. "" if there is a plan; the next attributes then describe this plan.
        divided: {axis: fraction of the matrix FLOPs that the axis shards}.
        heaviest_stage: fraction of all FLOPs on the most loaded stage.
        whole: kinds of replicated operators, each with its fraction of the matrix FLOPs; largest first.
        change: a change that would shard the largest kind of replicated operators; "" if none is known.
        notes: the plan's notes.
    """

    mesh: str
    refused: str = ""
    divided: Mapping[str, float] = field(default_factory=dict)
    num_stages: int = 1
    heaviest_stage: float = 1.0
    whole: Sequence[Mapping[str, Any]] = ()
    change: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.refused:
            yield f"{self.mesh} is refused: {self.refused}"
            return
        shares = [f"{axis} shards {100 * share:.3g} %" for axis, share in self.divided.items()]
        known = "" if all(row["share"] for row in self.whole) else "known "
        parts = [f"{' and '.join(shares)} of the {known}matrix FLOPs"] if shares else []
        if self.num_stages > 1:
            parts.append(f"the largest of {self.num_stages} stages has {100 * self.heaviest_stage:.3g} % of the FLOPs")
        number = sum(row["count"] for row in self.whole)
        if number:
            parts.append(f"{number} operator{'s run' if number > 1 else ' runs'} in full")
        yield f"{self.mesh} works: {', '.join(parts) or 'the model has no matrix products'}"
        yield from (f"  full   {replicated_operator_text(row)}" for row in self.whole[:MOST_UNSHARDED])
        rest = self.whole[MOST_UNSHARDED:]
        if rest:
            yield f"  full   {sum(row['count'] for row in rest)} more, of {len(rest)} kinds: see autopart explain"
        if self.change:
            yield f"  try    {self.change}{GUESSED * self.change.startswith('autopart.rule')}"
        yield from _note_lines(self.notes)


@dataclass(frozen=True, repr=False)
class Diagnosis(ShownAsText):
    """Result of `doctor`. Print it.

    Attributes:
        mode: "train" or "eval".
        refused: the error if the model cannot be traced; then no mesh was tried.
        num_operators, matrix_flops: number of operators and matrix FLOPs of the traced forward, on the global batch.
        ok: True if the model was traced and planned on every mesh.
    """

    model: str
    num_parameters: int
    mode: str
    inputs: Mapping[str, str]
    refused: str = ""
    num_operators: int = 0
    matrix_flops: int = 0
    notes: tuple[str, ...] = ()
    meshes: tuple[Outcome, ...] = ()
    versions: Mapping[str, str] = field(default_factory=versions)

    @property
    def ok(self) -> bool:
        return not self.refused and not any(outcome.refused for outcome in self.meshes)

    def as_data(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        head = [f"{self.model}: {self.num_parameters:,} parameters, in {self.mode} mode"]
        head.append(f"inputs: {', '.join(f'{name} {text}' for name, text in self.inputs.items())}")
        if self.refused:
            verdict = [f"it is refused: {self.refused}"]
        else:
            operators = f"{self.num_operators} operator{'s' * (self.num_operators != 1)}"
            verdict = [f"it can be traced: {operators}, {quantity(self.matrix_flops, 'FLOP')} in matrix products"]
            verdict += _note_lines(self.notes)
        last = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = ["\n".join(head), "\n".join(verdict), "\n".join(map(str, self.meshes)), last]
        return wrapped("\n\n".join(part for part in parts if part))


def doctor(
    model: nn.Module, mesh: Any = None, *, example_args: tuple = (), example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
) -> Diagnosis:  # fmt: skip
    """Report whether a model can be traced, which operators each mesh shards or replicates, and why.

    The model is traced but not run. `verify` runs the plan and proves that it is right.

    Args:
        model, example_args, example_kwargs: as in `plan`.
        mesh: axes and their sizes, as in `plan`. By default, the meshes `tp2`, `dp2` and `pp2` are tried one by one.
        loss_fn, target: loss function and its target, for a model that returns no loss (as in `verify`).
    Raises InputError if the example does not fit the model. Errors of the model itself are printed on the page.

    Example:
        >>> print(autopart.doctor(model, example_kwargs=batch))    # doctest: +SKIP
    """
    if not example_args and example_kwargs is None:
        raise InputError("doctor() needs an example call", why="the model is traced on it",
                         hint="doctor(model, example_kwargs={'input_ids': ids, 'labels': labels})")  # fmt: skip
    tried = [Mesh.parse(one) for one in (MESHES if mesh is None else (mesh,))]
    arguments = bind_call(model, example_args, example_kwargs or {})
    call = flatten_call(arguments)
    inputs = {name: _text(tensor) for name, tensor in zip(call.names, call.tensors, strict=True)}
    number = sum(parameter.numel() for parameter in model.parameters())
    page = (type(model).__name__, number, "train" if model.training else "eval", inputs)
    if loss_fn is not None:
        model, arguments = WithLoss(model, loss_fn).train(model.training), {"target": target, "call": arguments}
    try:
        trace = prepare(model, arguments)
    except AutopartError as error:
        return Diagnosis(*page, refused=str(error))
    operators = active_operators(trace.graph)
    flops = sum(map(matrix_work, operators))
    outcomes = tuple(_outcome(model, trace, flops, one) for one in tried)
    return Diagnosis(*page, "", len(operators), flops, trace.notes, outcomes)


def _outcome(model: nn.Module, trace: Trace, flops: int, mesh: Mesh) -> Outcome:
    try:
        plan = make_plan(model, trace, mesh, Options())
    except AutopartError as error:
        return Outcome(str(mesh), str(error))
    loads = [stage["flops"] for stage in plan.stages]
    rows = replicated_operators(plan, flops)
    shares = divided(trace, decode(trace, plan, mesh))
    notes = [note for note in plan.notes if note not in trace.notes]
    listed = sum(row["share"] for row in rows)
    for axis in mesh.along("rows"):
        rest = 1 - listed - shares.get(axis, 1.0)
        if rest >= NEGLIGIBLE:
            notes.insert(0, f"{100 * rest:.3g} % of the matrix FLOPs cannot be sharded over {axis}: these products use "
                         "weights alone, or need the full batch")  # fmt: skip
    return Outcome(
        str(mesh),
        divided={axis: round(share, 6) for axis, share in shares.items()},
        num_stages=len(loads),
        heaviest_stage=round(max(loads) / (sum(loads) or 1), 6),
        whole=rows,
        change=next((row["try"] for row in rows if "try" in row), ""),
        notes=tuple(notes),
    )


def _note_lines(notes: Sequence[str]) -> Iterator[str]:
    yield from (f"  note   {note}" for note in notes[:MOST_NOTES])
    if len(notes) > MOST_NOTES:
        yield f"  note   {len(notes) - MOST_NOTES} more: see autopart explain"


def _text(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor as text: `float32[8,16]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".replace(" ", "")

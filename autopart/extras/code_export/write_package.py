"""Write a program as a Python package that runs without autopart."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from autopart.common.text import quantity
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import time_s
from autopart.errors import PlanError
from autopart.extras.code_export import package_collectives, package_run, package_sharding, package_training
from autopart.extras.code_export.function_text import LOCAL_OPERATORS, is_collective, unsupported
from autopart.extras.code_export.stage_text import StageText
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.graph import source_line, source_text
from autopart.ir.layout import DIRECTIONS, P, R, mesh_axes_of
from autopart.ir.program import MICROBATCH_AXIS, Program, Stage
from autopart.plans.plan import Plan
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.shards.shard_state import flattened_axes

_PACKAGE = "autopart.extras.code_export.package_"


def write_code(program: Program, plan: Plan, folder: Path) -> None:
    """Write the Python files of a package, without weights and batch.

    Raises PlanError if the program uses something that exported code does not support, and names it.
    """
    check_supported(program)
    notes = _Notes(program, Hardware.load(plan.hardware) if plan.hardware else None)
    texts = {f"stage_{stage.index}.py": _stage_module(stage, program, notes) for stage in program.stages}
    texts["settings.py"] = _settings(program)
    texts["sharding.py"] = _sources(
        "Arithmetic of shards: split a tensor into shards, and join shards to a tensor again.",
        ["from collections.abc import Sequence", "from dataclasses import dataclass", "", "import torch",
         "from torch import Tensor", "", "Sections = tuple[int, ...]"],
        package_sharding.SOURCES,
    )  # fmt: skip
    texts["local_operators.py"] = _sources(
        "Operators on a shard of a vocabulary.",
        ["import torch", "import torch.nn.functional as F", "from torch import Tensor"],
        LOCAL_OPERATORS.values(),
    )
    for module in (package_collectives, package_training, package_run):
        name = module.__name__.removeprefix(_PACKAGE)
        text = inspect.getsource(module).replace(_PACKAGE, "")
        texts[f"{name}.py"] = text
    texts["README.md"] = _readme(program, plan)
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


def save_rank(
    folder: Path, rank: int, program: Program, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Save the tensors of one rank: its parameters, and the buffers and constants that the stages read."""
    coordinate = program.mesh.coordinates(rank).get("pp", 0)
    stage = program.stages[coordinate]
    local = {name: parameters[name].detach().cpu().clone() for name in stage.parameters}
    others = {name: _attribute(stage, name, buffers) for name in _reads(stage) if name not in local}
    frozen = [name for name in stage.parameters if not parameters[name].requires_grad]
    saved = {"parameters": local, "buffers": others, "frozen": frozen}
    torch.save(saved, folder / "weights" / f"rank_{rank}.pt")


def save_batch(folder: Path, program: Program, inputs: Sequence[Any]) -> None:
    """Save the example batch, {name: input}, which `run.py` trains on."""
    values = [value.detach().cpu() if isinstance(value, Tensor) else value for value in inputs]
    torch.save(dict(zip(program.input_names, values, strict=True)), folder / "batch.pt")


def _reads(stage: Stage) -> list[str]:
    """Return the names of all tensors that the graphs of a stage read."""
    graphs = (stage.prologue.graph, stage.graph.graph)
    return list(dict.fromkeys(str(n.target) for graph in graphs for n in graph.nodes if n.op == "get_attr"))


def _attribute(stage: Stage, name: str, buffers: Mapping[str, Tensor]) -> Tensor:
    if name in buffers:
        return buffers[name].detach().cpu().clone()
    for value in (stage.graph, stage.prologue):
        try:
            for part in name.split("."):
                value = getattr(value, part)
        except AttributeError:
            continue
        if isinstance(value, Tensor):
            return value.detach().cpu().clone()
    raise unsupported(f"the value {name}", "it is not a tensor")


def check_supported(program: Program) -> None:
    """Raise PlanError if the program uses something that exported code does not support."""
    boundaries = [one for stage in program.stages for one in (*stage.receives, *stage.sends)]
    updated = [update.name for stage in program.stages for update in stage.updates]
    pp = program.mesh.size("pp")
    cases: list[tuple[Any, str, str]] = [
        (program.tail is not None, "a loss over all microbatches", "it runs after the pipeline (Program.tail)"),
        (program.num_stages > pp, f"{program.num_stages} stages on pp={pp}", "a rank of the package runs one stage"),
        (program.draws, "a model with dropout", f"its random numbers are drawn with rng={program.draws!r}"),
        (not program.dp_sync.is_default, "dp_sync", "the package all-reduces every gradient"),
        (program.weight_updates, "a model that changes its weights in its forward", "the package does not"),
        (updated, f"the buffer {updated[0] if updated else ''}", "the model's forward writes to it"),
        (program.row_inputs is not None, "local_batch=True", "every rank of the package gets the global batch"),
        (any(one.uneven for one in boundaries), "a boundary between stages with unequal shards", "pp and uneven tp"),
    ]
    for found, what, why in cases:
        if found:
            raise unsupported(what, why)
    first = program.outputs[0]
    if first.position != 0:
        raise PlanError("the program has no loss, so it cannot be exported as code",
                        why="the package trains", hint="export with a batch that has labels")  # fmt: skip


# --- Texts


class _Notes:
    """Comments of collectives: placements, bytes, predicted time and source line."""

    def __init__(self, program: Program, hardware: Hardware | None):
        self.mesh, self.hardware = program.mesh, hardware

    def __call__(self, node: fx.Node) -> str:
        name, axis = autopart_operator(node), axis_of(node)
        if not is_collective(node) or name is None or axis is None:
            return ""
        source = node.args[0]
        forward, backward = DIRECTIONS.get(name, ("", ""))
        directions = [("forward", forward), ("backward", backward if facts(node).get("needs_grad", True) else "")]
        size = max(_bytes(node), _bytes(source) if isinstance(source, fx.Node) else 0)
        costs = [self._cost(kind, way, axis, size) for way, kind in directions if kind]
        placements = [_placement(one, axis) for one in (source, node)]
        change = " -> ".join(placements) if all(placements) else ""
        text = f"{axis} ({self.mesh.size(axis)} ranks): " + ", ".join(filter(None, [change, *costs]))
        return text + (f"; {_source(node)}" if _source(node) else "")

    def _cost(self, kind: str, way: str, axis: str, size: int) -> str:
        if kind in ("identity", "slice", "pad", "own"):
            return ""
        text = f"{way} {kind.replace('_', '-')} of {quantity(size, 'B')}"
        if self.hardware is None:
            return text
        seconds = time_s(kind, self.mesh.size(axis), size, self.hardware, self.mesh.stride(axis))
        return f"{text} in {quantity(seconds, 's')}"


def _placement(node: Any, axis: str) -> str:
    """Return the placement of a value on an axis, "" if the graph does not record it."""
    layout = facts(node).get("layout") if isinstance(node, fx.Node) else None
    places = [str(layout[part]) for part in mesh_axes_of(axis) if part in layout] if layout else []
    return places[0] if len(places) == 1 else ""


def _source(node: fx.Node) -> str:
    """Return `model.py:27: y = self.up(x)`, the source line that created the node."""
    line, text = source_line(node), source_text(node)
    _, found, code = text.partition(f"{line}: ")
    return f"{line}: {code}" if line and found else line


def _bytes(node: fx.Node) -> int:
    tensor = facts(node).get("val")
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def _stage_module(stage: Stage, program: Program, note: Callable[[fx.Node], str]) -> str:
    text = StageText(stage, program.mesh, note)
    body = "\n".join(text.lines())
    imports = ["from __future__ import annotations", ""]
    if "operator." in body:
        imports.append("import operator")
    imports += ["import torch", "import torch.nn.functional as F"]
    if text.uses_checkpoint:
        imports.append("from torch.utils.checkpoint import checkpoint")
    imports += ["", "import collectives", "import local_operators", "from collectives import device",
                "from sharding import weights_below"]  # fmt: skip
    imports = [line for line in imports if _is_used(line, body)]
    reduced = {name: axes for name in stage.parameters
               if (axes := program.parameters[name].reduced_over(program.mesh))}  # fmt: skip
    constants = [
        f"INDEX = {stage.index}",
        '"""Index of this pipeline stage."""',
        _table("INPUTS", [repr(one) for one in text.inputs]),
        '"""Inputs from the prologue: (name, dim that contains samples or None, sections of the dim)."""',
        _table("RECEIVES", [f"({one.shape}, {one.dtype})" for one in stage.receives]),
        '"""Shape and dtype of each value that the stage before sends."""',
        _table("PARAMETERS", [repr(name) for name in stage.parameters]),
        _table("REDUCED", [f"{name!r}: {axes!r}" for name, axes in reduced.items()], "{}"),
        '"""{parameter: axes on which its gradient is a partial sum}."""',
        "aten = torch.ops.aten",
    ]
    where = f" of {program.num_stages}" if program.num_stages > 1 else ""
    doc = f'"""Stage {stage.index}{where} on {program.mesh}, as autopart wrote it for every rank of the stage."""'
    return "\n".join([doc, "", *imports, "", *constants, body, ""])


_NEXT = "\n    "


def _table(name: str, rows: Sequence[str], brackets: str = "[]") -> str:
    return f"{name} = {brackets[0]}{''.join(f'{_NEXT}{row},' for row in rows)}{chr(10) * bool(rows)}{brackets[1]}"


def _is_used(line: str, body: str) -> bool:
    """Return True unless an import line imports a name that the code does not use."""
    name = line.split()[-1] if line.startswith(("import", "from")) else ""
    return name in ("", "annotations", "torch") or re.search(rf"\b{name}\b", body) is not None


def _settings(program: Program) -> str:
    mesh, layout = program.mesh, program.outputs[0].layout
    axes = [axis for axis in mesh.sizes if mesh.size(axis) > 1]
    groups = [*axes, *flattened_axes(program), *(["pp backward"] if "pp" in axes else [])]
    tied = {name: tuple(owners(program, stored, "loop")) for name, stored in program.parameters.items()}
    tied = {name: tuple(sorted(stages)) for name, stages in tied.items() if len(stages) > 1}
    sends = program.stages[-1].sends
    rows = [
        ("MESH", dict(mesh.sizes), "{axis: number of ranks}. The last axis varies fastest with the rank."),
        ("GROUPS", groups, "Axes, and combinations of axes, over which ranks communicate."),
        ("NUM_STAGES", program.num_stages, "Pipeline stages."),
        ("MICROBATCHES", program.microbatches, "Microbatches of a step."),
        ("BATCH_AXES", list(mesh.along("rows")), "Axes whose ranks have different samples."),
        ("BATCH_SHARDS", program.data_parallel_size, "Number of shards of the batch."),
        ("INPUTS", list(program.input_names), "Inputs of the model."),
        ("SIZES", list(program.sizes.values()), "Sizes that the prologues have as inputs."),
        ("TIED", tied, "{parameter that several stages use: these stages}."),
        ("LOSS_IS_SUM", layout.get(MICROBATCH_AXIS, R) == P, "True if the loss is a sum over microbatches."),
        ("LOSS_AXES", [axis for axis in axes if layout.get(axis) == P], "Axes over which the loss is all-reduced."),
        ("LOSS_DTYPE", sends[0].dtype, "Dtype of the loss."),
        (
            "REDUCE_DTYPE",
            program.reduce_dtype,
            "Dtype in which gradients are all-reduced; None: their own.",
        ),
    ]
    lines = [line for name, value, doc in rows for line in (f"{name} = {value!r}", f'"""{doc}"""')]
    return "\n".join(['"""Settings of the program, equal on every rank."""', "", "import torch", "", *lines, ""])


def _sources(doc: str, imports: Sequence[str], functions: Any) -> str:
    sources = [inspect.getsource(function).rstrip() for function in functions]
    if any(function.__name__ == "DimSharding" for function in functions):
        sources.append(_WEIGHTS_BELOW)
    head = [f'"""{doc}"""', "", "from __future__ import annotations", "", *imports]
    return "\n".join(head) + "\n\n\n" + "\n\n\n".join(sources) + "\n"


_WEIGHTS_BELOW = '''def weights_below(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): weight for name, weight in w.items() if name.startswith(prefix)}'''


def _readme(program: Program, plan: Plan) -> str:
    ranks = program.mesh.num_ranks
    return f"""# {plan.model["class"]} on {program.mesh}

```bash
torchrun --nproc-per-node {ranks} run.py --steps 3
```

| file | content |
|---|---|
| `run.py` | trains on `batch.pt` (or `--batch FILE`) and prints the loss of each step |
| `stage_N.py` | the forward of pipeline stage N, with its collectives |
| `training.py` | microbatches, pipeline (1F1B), reduction of gradients |
| `collectives.py` | each collective with its backward |
| `settings.py` | mesh, microbatches, process groups |
| `sharding.py`, `local_operators.py` | helpers |
| `weights/rank_N.pt` | parameters and buffers of rank N |

A comment above each collective gives its mesh axis, the placements before and after it, the bytes and predicted time of
its forward and backward, and the line of the model's source. Placements: `S(0)` is sharded along dim 0, `R` replicated,
`P` a partial sum, `R(grad P)` replicated with a gradient that is a partial sum.

With ZeRO, a stage gathers a sharded weight before each use, once per microbatch. autopart's runtime also prefetches
weights, reduces gradients during the backward, and uses kernels that skip masked keys. This package does not.
"""

"""What the passes write for a tiny GPT-2 block, as text: read the difference before updating it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx
from zoo import gpt2

import autopart
from autopart.compiler import prepare
from autopart.ir.graph import DTYPE_NAMES
from autopart.ir.layout import format_layout
from autopart.ir.mesh import Mesh
from autopart.passes.choose.decide import decode
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.tracing.trace import bind_call


def tiny() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return gpt2(num_layers=1, hidden=16, heads=2, vocab=16, rows=4, seq=6)


def printed(graph: fx.Graph) -> str:
    """One line per node: `name = operator(arguments)  # f64[4,6,8]{tp:S(2)}`, without source paths."""
    lines = []
    for node in graph.nodes:
        layout = format_layout(node.meta.get("layout", {})).replace("{}", "")
        kind = kind_of(node.meta.get("val")) + layout
        inputs = ", ".join([str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()])
        target = getattr(node.target, "__name__", node.target) if callable(node.target) else node.target
        called = f"{node.op} {target}" if node.op in ("placeholder", "get_attr") else f"{target}({inputs})"
        text = f"return {node.args[0]}" if node.op == "output" else f"{node.name} = {called}"
        lines.append(f"{text}  # {kind}" if kind else text)
    return "\n".join(lines)


def kind_of(value: Any) -> str:
    """`f64[4,6]`; of several values `(f64[4,6], f64[4])`; nothing for what is not a tensor."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(kind_of, value))})"
    return f"{DTYPE_NAMES[value.dtype]}[{','.join(map(str, value.shape))}]" if isinstance(value, torch.Tensor) else ""


def without_paths(text: str) -> str:
    """No path of the machine that made it."""
    assert not re.search(r"(^|[\s\"'])/[a-z]+/[\w./-]+", text), text
    return text


@pytest.mark.parametrize(("mesh", "options"), [("tp2", {}), ("dp2,pp2", {"zero": 3, "recompute": "full"})])
def test_the_program_of_a_gpt2_block(mesh, options, golden):
    model, batch = tiny()
    plan = autopart.plan(model, mesh, example_kwargs=batch, **options)
    trace = prepare(model, bind_call(model, (), batch))
    loss = trace.graph.output_node().args[0][0]
    program = lower(trace, decode(trace, plan, Mesh.parse(mesh)), [loss], whole_outputs=False)
    stages = [
        f"prologue\n\n{printed(stage.prologue.graph)}\n\nstage {stage.index}\n\n{printed(stage.graph.graph)}"
        for stage in program.stages
    ]
    golden(f"gpt2_block_{mesh.replace(',', '_')}_program", without_paths("\n\n".join(stages)))


def test_the_plan_of_a_gpt2_block(golden):
    model, batch = tiny()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    golden("gpt2_block_pp2_tp2_plan", plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan

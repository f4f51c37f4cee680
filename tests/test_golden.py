"""What the passes write for a tiny GPT-2 block, as text: read the difference before updating it."""

from __future__ import annotations

import re

import torch
from torch import fx
from zoo import gpt2

import autopart
from autopart.compiler import prepare
from autopart.graph import DTYPE_NAMES
from autopart.layout import format_layout
from autopart.mesh import Mesh
from autopart.passes.decide import decode
from autopart.passes.lower import lower
from autopart.plan import Plan
from autopart.trace import bind_call


def tiny() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return gpt2(num_layers=1, hidden=16, heads=2, vocab=16, rows=4, seq=6)


def printed(graph: fx.Graph) -> str:
    """One line per node: `name = operator(arguments)  # f64[4,6,8]{tp:S(2)}`, without source paths."""
    lines = []
    for node in graph.nodes:
        value, layout = node.meta.get("val"), format_layout(node.meta.get("layout", {}))
        shape = ",".join(map(str, value.shape)) if value is not None else ""
        kind = f"{DTYPE_NAMES[value.dtype]}[{shape}]{layout.replace('{}', '')}" if value is not None else ""
        inputs = ", ".join([str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()])
        target = getattr(node.target, "__name__", node.target) if callable(node.target) else node.target
        called = f"{node.op} {target}" if node.op in ("placeholder", "get_attr") else f"{target}({inputs})"
        text = f"return {node.args[0]}" if node.op == "output" else f"{node.name} = {called}"
        lines.append(f"{text}  # {kind}" if kind else text)
    return "\n".join(lines)


def without_paths(text: str) -> str:
    """No path of the machine that made it."""
    assert not re.search(r"(^|[\s\"'])/[a-z]+/[\w./-]+", text), text
    return text


def test_the_tp2_program_of_a_gpt2_block(golden):
    model, batch = tiny()
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    trace = prepare(model, bind_call(model, (), batch))
    loss = trace.graph.output_node().args[0][0]
    program = lower(trace, decode(trace, plan, Mesh.parse("tp2")), [loss], whole_outputs=False)
    (stage,) = program.stages
    text = f"prologue\n\n{printed(stage.prologue.graph)}\n\nstage 0\n\n{printed(stage.graph.graph)}"
    golden("gpt2_block_tp2_program", without_paths(text))


def test_the_plan_of_a_gpt2_block(golden):
    model, batch = tiny()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    golden("gpt2_block_pp2_tp2_plan", plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan

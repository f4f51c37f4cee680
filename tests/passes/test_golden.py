"""What the passes write for a tiny GPT-2 block, as text: read the difference before updating it."""

from __future__ import annotations

import pytest
import torch
from golden_text import without_paths
from zoo import gpt2

import autopart
from autopart.ir.mesh import Mesh
from autopart.passes.choose.plan_codec import decode
from autopart.passes.dump import program_files
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call


def tiny() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return gpt2(num_layers=1, hidden=16, heads=2, vocab=16, rows=4, seq=6)


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options"), [("tp2", {}), ("dp2,pp2", {"zero": 3, "recompute": "full"})])
def test_the_program_of_a_gpt2_block(mesh, options, golden):
    model, batch = tiny()
    plan = autopart.plan(model, mesh, example_kwargs=batch, **options)
    trace = prepare(model, bind_call(model, (), batch))
    loss = trace.graph.output_node().args[0][0]
    program = lower(trace, decode(trace, plan, Mesh.parse(mesh)), [loss], whole_outputs=False)
    golden(f"gpt2_block_{mesh.replace(',', '_')}_program", without_paths("\n".join(program_files(program).values())))


def test_the_plan_of_a_gpt2_block(golden):
    model, batch = tiny()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    golden("gpt2_block_pp2_tp2_plan", plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan

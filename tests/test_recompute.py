"""What is computed again in the backward: which regions there are, that they give what the model gives, and save."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import zoo
from torch import nn
from traced import plan_of, run_of

from autopart.mesh import Mesh
from autopart.passes.decide import decode
from autopart.plan import Plan
from autopart.program import Program


@functools.cache
def eager(build):
    """A builder of a model whose attention is written out."""

    def built():
        model, batch = build()
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = "eager"
        return model, batch

    return built


def program_of(build, mesh: str, recompute: str) -> tuple[Plan, Program]:
    run = run_of(build)
    plan = plan_of(run, mesh, recompute=recompute)
    decisions = decode(run.traced, Plan.from_json(plan.to_json()), Mesh.parse(mesh))
    return plan, run.subject.step(decisions)


def regions_of(program: Program) -> list[dict[int, list[torch.fx.Node]]]:
    """Of every stage, the nodes of each region."""
    found = []
    for stage in program.stages:
        regions: dict[int, list[torch.fx.Node]] = {}
        for node in stage.graph.graph.nodes:
            if "region" in node.meta:
                regions.setdefault(node.meta["region"], []).append(node)
        found.append(regions)
    return found


def names(nodes) -> list[str]:
    return [node.target.__name__.removesuffix(".default") for node in nodes]


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "tp2"), ("llama", "pp2"), ("bert", "dp2"), ("t5", "pp2,tp2")])
def test_full_recomputes_every_block(name, mesh):
    plan, program = program_of(zoo.ZOO[name], mesh, "full")
    assert plan.recompute == "full" and not [n for n in plan.notes if "recompute" in n]
    for stage, regions in zip(program.stages, regions_of(program), strict=True):
        calls = [node for node in stage.graph.graph.nodes if node.op == "call_function"]
        for nodes in regions.values():
            places = [calls.index(node) for node in nodes]
            assert places == list(range(places[0], places[-1] + 1)), "a block is one run of the graph"
        left = {node.meta["key"] for node in calls if node.target is torch.ops.aten.linear.default} - {
            node.meta["key"] for nodes in regions.values() for node in nodes if "key" in node.meta
        }
        assert not [key for key in left if re.search(r"\.\d+\.", key)], left


@pytest.mark.parametrize("mesh", ["tp2", "dp2,pp2"])
def test_selective_recomputes_the_core_of_attention(mesh):
    _, program = program_of(eager(zoo.gpt2), mesh, "selective")
    cores = [nodes for regions in regions_of(program) for nodes in regions.values()]
    assert [names(core) for core in cores] == [["matmul", "mul.Tensor", "add.Tensor", "softmax.int", "matmul"]] * 2


def test_encoders_and_decoders_have_their_own_blocks():
    _, program = program_of(eager(zoo.t5), "tp2", "full")
    paths = [{n.meta["key"].split(".layer")[0] for n in r if "block" in n.meta.get("key", "")}
             for r in regions_of(program)[0].values()]  # fmt: skip
    assert paths == [{f"{part}.block.{i}"} for part in ("encoder", "decoder") for i in (0, 1)]
    _, program = program_of(eager(zoo.t5), "tp2", "selective")
    assert len(regions_of(program)[0]) == 2 + 2 * 2, "self-attention everywhere, and two cross-attentions"


def test_none_marks_nothing():
    plan, program = program_of(zoo.gpt2, "tp2", "none")
    assert plan.recompute == "none" and regions_of(program) == [{}]


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def one_block():
    return OneBlock(), {"x": torch.randn(4, 8)}


def test_where_nothing_can_be_recomputed_the_plan_says_so():
    for recompute, why in (("full", "no repeated blocks"), ("selective", "no product of two activations")):
        plan, program = program_of(one_block, "tp2", recompute)
        assert [why in note for note in plan.notes if "recompute" in note] == [True]
        assert regions_of(program) == [{}]
    plan, program = program_of(zoo.gpt2, "tp2", "selective")
    assert [n for n in plan.notes if "recompute" in n] == [
        "recompute='selective' changes nothing: attention is one operator (scaled_dot_product_attention), which keeps "
        "nothing between its products"
    ]


class Entangled(nn.Module):
    """Two streams of attention whose scores read each other: neither core can be run as one call."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        left, right = a @ a.transpose(1, 2), b @ b.transpose(1, 2)
        mixed = left.softmax(-1) + self.mix[0](right), right.softmax(-1) + self.mix[1](left)
        return ((mixed[0] @ a) + (mixed[1] @ b)).sum()


def entangled():
    return Entangled(), {"x": torch.randn(2, 4, 8)}


def test_regions_that_wait_for_each_other_are_left_alone():
    _, program = program_of(entangled, "dp2", "selective")
    assert regions_of(program) == [{}]

"""Planning a deeper model does no more of the dear work: it is done once per kind of block, however many there are.

What is counted is work, not time: rules fitted, atoms followed, strategies and prices found, calls on fake tensors.
"""

from __future__ import annotations

import importlib
import runpy
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopart
from autopart.cost.count import program_summary, saved_tensors, stage_footprint
from autopart.passes.choose.solve import batch_axis, sharding_costs
from autopart.passes.facts import analyze, strategies
from autopart.passes.normalize import decompose
from autopart.passes.write import lower
from autopart.passes.write.stage_draft import StageGraph

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "depth.py"
WORK = {
    "rules fitted": (analyze, "pattern_for"),
    "rules fitted to take operators apart": (decompose, "pattern_for"),
    "atoms followed": (analyze, "factor_atoms"),
    "strategies found": (strategies, "_strategies"),
    "rows placed": (batch_axis, "_price"),
    "conversions priced": (sharding_costs, "conversion_time_s"),
    "calls on fake tensors": (saved_tensors, "_run"),
}


def planned(layers: int, mesh: str = "dp2,tp2") -> autopart.Plan:
    """The plan of a Llama of so many layers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4,
                        vocab_size=64, num_hidden_layers=layers, max_position_embeddings=16)
        )  # fmt: skip
        ids = torch.zeros(8, 16, dtype=torch.long)
    model.loss_type = "ForCausalLM"
    return autopart.plan(model, mesh, example_kwargs={"input_ids": ids, "labels": ids})


@pytest.fixture
def counts(monkeypatch) -> Callable[[Mapping[str, tuple]], Counter[str]]:
    """How often each of these kinds of work is done from now on."""

    def start(works: Mapping[str, tuple]) -> Counter[str]:
        found: Counter[str] = Counter()
        for kind, (module, name) in works.items():
            monkeypatch.setattr(module, name, counted(found, kind, getattr(module, name)))
        return found

    return start


def counted(found: Counter[str], kind: str, function):
    def run(*args, **kwargs):
        found[kind] += 1
        return function(*args, **kwargs)

    return run


@pytest.mark.large
def test_work_does_not_grow_with_the_number_of_blocks(counts):
    numbers = []
    for layers in (6, 9):  # the two blocks at either end are also tried apart from the others
        saved_tensors.EFFECT_CACHE.effects.clear()
        found = counts(WORK)
        planned(layers)
        numbers.append(dict(found))
    assert numbers[0].keys() == WORK.keys()
    assert numbers[0] == numbers[1]


EVERY_NODE = {
    "facts written": (analyze, "_role"),
    "operators written": (lower, "write_local"),
    "values followed": (stage_footprint, "call"),
    "operators counted": (program_summary, "work"),
}
"""What is done of every node that there is."""


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "depths"), [("dp2,tp2", (8, 12)), ("pp2,tp2", (20, 24))])
def test_of_like_blocks_a_few_are_planned(counts, mesh, depths):
    numbers = []
    for layers in depths:
        found = counts(EVERY_NODE)
        planned(layers, mesh)
        numbers.append(dict(found))
    assert numbers[0].keys() == EVERY_NODE.keys()
    assert numbers[0] == numbers[1]


def test_no_code_is_written_for_a_plan(monkeypatch):
    """Of stage graphs only what runs needs Python code."""

    def fail(self):
        raise AssertionError("code was written")

    monkeypatch.setattr(StageGraph, "_real_recompile", fail)
    planned(2)


def test_the_benchmark_times_functions_that_there_are():
    phases = runpy.run_path(str(BENCHMARK))["PHASES"]
    for home, name in (function for functions in phases.values() for function in functions):
        assert callable(getattr(importlib.import_module(f"autopart.{home}"), name))

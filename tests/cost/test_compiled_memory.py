"""The memory of compiled stages: what is kept is what torch's partitioner keeps, and a real step takes what is
counted."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from cost_models import llama
from dist import run_ranks
from functorch.compile import nop
from held import compiled_peak_on_a_rank, partitioned_on_this_process
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from traced import plan_of, run_of
from zoo import ZOO

import autopart
from autopart.cost.count import compiled_saved_tensors

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")

KEPT = [
    # model, the parameters' dtype, options
    ("llama", torch.float32, {}), ("llama", torch.bfloat16, {}), ("llama", torch.float32, {"precision": "bf16"}),
    ("llama", torch.float32, {"recompute": "full"}), ("gpt2", torch.float32, {}), ("gpt2", torch.bfloat16, {}),
    ("gpt2", torch.float32, {"recompute": "full"}), ("gpt2", torch.float32, {"recompute": "selective"}),
    ("bert", torch.float32, {}), ("bert", torch.float32, {"precision": "bf16"}), ("t5", torch.float32, {}),
    ("t5", torch.float32, {"recompute": "full"}),
]  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize(("name", "dtype", "options"), KEPT, ids=str)
def test_what_is_kept_is_what_the_partitioner_keeps(monkeypatch, name, dtype, options):
    """On the runtime's own pieces, with its own decompositions, whose graphs run operator by operator."""
    backend = aot_autograd(
        fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    kept, planned = partitioned_on_this_process(name, dtype, options)
    assert 0.97 < planned / kept < 1.03, f"{kept} bytes are kept, {planned} planned"


def relu_then_dropout(num_layers=3, hidden=64, rows=8, seq=64, **_):
    """MLPs in which nothing reads the numbers behind the activation but dropout, as in T5."""
    blocks = [
        nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * hidden, hidden))
        for _ in range(num_layers)
    ]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*blocks)

        def forward(self, x):
            return self.blocks(x).square().mean()

    return Model().train(), {"x": torch.randn(rows, seq, hidden)}


@pytest.mark.large
def test_of_what_relu_makes_the_sign_is_kept(monkeypatch):
    monkeypatch.setitem(ZOO, "relu", relu_then_dropout)
    test_what_is_kept_is_what_the_partitioner_keeps(monkeypatch, "relu", torch.float32, {})


PEAKS = [
    ("llama", "dp2", {}), ("gpt2", "dp2", {}), ("llama", "tp2", {}), ("llama", "dp2", {"recompute": "full"}),
    ("llama", "dp2", {"zero": 3}), ("gpt2", "dp2", {"zero": 3}), ("gpt2", "dp2", {"recompute": "full"}),
    ("bert", "dp2", {}), ("t5", "dp2", {}), ("llama", "pp2", {"schedule": "1f1b", "microbatches": 2}),
]  # fmt: skip


@needs_compiler
@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh", "options"), PEAKS, ids=str)
def test_a_compiled_step_takes_what_is_counted(name, mesh, options):
    """Within a tenth, of live bytes; before compiled stages had a count of their own it was 40 to 60 % more."""
    for held, planned in run_ranks(compiled_peak_on_a_rank, 2, name, mesh, options, timeout_s=500):
        assert abs(planned / held - 1) < 0.1, f"{held} bytes are held, {planned} planned"


@pytest.mark.large
def test_a_gradient_is_there_while_it_is_cast():
    """That of a loss's scores over tp, in float32, beside the scores and what is made of it in bfloat16, as
    `benchmarks/memory.py` measures it; on one rank one kernel makes the latter of the scores, in their place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         vocab_size=4096, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(8, 64, dtype=torch.long)
    temporary = {
        mesh: autopart.plan(model, mesh, example_kwargs={"input_ids": ids, "labels": ids.clone()}, compile=True,
                            precision="bf16").memory[0]["temporary"] for mesh in ("dp1", "tp2")
    }  # fmt: skip
    scores_bytes = 4 * ids.numel() * 4096 // 2
    assert temporary["tp2"] == pytest.approx(1.5 * scores_bytes, rel=0.01) and temporary["dp1"] < scores_bytes / 4


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_a_compiled_stage_keeps_less(name):
    run = run_of(ZOO[name])
    plain, compiled = (plan_of(run, "dp1", compile=is_compiled).memory[0] for is_compiled in (False, True))
    assert compiled["activations"] < plain["activations"] and compiled["total"] < plain["total"]
    for kind in ("parameters", "gradients", "optimizer", "buffers", "inputs"):
        assert compiled[kind] == plain[kind]


ONE_NUMBER = [
    ("dp1", {}), ("tp2", {}), ("pp2,dp2", {}), ("dp2", {"zero": 3}), ("dp2", {"precision": "bf16"}),
    ("pp2,tp2", {"recompute": "full"}), ("tp2", {"recompute": "selective", "sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options"), ONE_NUMBER, ids=str)
def test_the_table_says_what_the_plan_says(mesh, options):
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, mesh, example_kwargs=batch, compile=True, **options)
    most = max(row["total"] for row in plan.memory)
    assert plan.cost.at().memory_bytes == pytest.approx(most, rel=1e-9)


@pytest.mark.large
def test_it_grows_with_rows_as_a_plan_made_anew():
    few, many = (
        autopart.plan(model, "dp2", example_kwargs=batch, compile=True)
        for model, batch in (llama(torch.float32, rows=rows) for rows in (16, 64))
    )
    expected = max(row["total"] for row in many.memory)
    assert few.cost.at(b=32).memory_bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.large
def test_one_block_stands_for_many():
    """A deep model's memory is counted of few blocks, and of every further one as much more."""
    totals = [
        autopart.plan(model, "dp1", example_kwargs=batch, compile=True).memory[0]["activations"]
        for model, batch in (llama(torch.float32, layers=layers) for layers in (8, 12, 20))
    ]
    assert totals[2] - totals[1] == 2 * (totals[1] - totals[0]) > 0


@pytest.mark.large
def test_blocks_that_are_alike_are_cut_once():
    model, batch = ZOO["llama"](num_layers=3, hidden=48)
    compiled_saved_tensors._minimum_cut.cache_clear()
    plan_of(run_of(lambda: (model, batch)), "dp1", compile=True)
    before = compiled_saved_tensors._minimum_cut.cache_info()
    model, batch = ZOO["llama"](num_layers=6, hidden=48)
    plan_of(run_of(lambda: (model, batch)), "dp1", compile=True)
    after = compiled_saved_tensors._minimum_cut.cache_info()
    assert after.misses == before.misses and after.hits > before.hits

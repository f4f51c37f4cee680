"""The coverage benchmark: 25 architectures of all kinds are exact, and what it says of them can be wrong."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _coverage_page as page  # noqa: E402
import _coverage_row as rows  # noqa: E402
import _peers  # noqa: E402
import coverage as benchmark  # noqa: E402
from _architectures import ARCHITECTURES, LEFT_OUT, build  # noqa: E402
from _recipe import small_config  # noqa: E402
from transformers import GPT2Config, LlamaConfig, Qwen3NextConfig, SwinConfig  # noqa: E402

from autopart.cost.flops import flop_counter  # noqa: E402
from autopart.proof.verify import VerificationRun  # noqa: E402
from autopart.tracing.trace_model import bind_call  # noqa: E402

ALL, TENSOR = ("tp2", "dp2,pp2,tp2"), ("tp4", "dp2")
MIXED, CUT = ALL[1:], TENSOR[:1]  # of those that take long
SOME = {
    "gpt2": ALL,  # decoders
    "llama": TENSOR,
    "gemma3_text": ALL,  # sliding and full attention
    "mpt": TENSOR,  # alibi
    "falcon": ALL,  # one key-value head
    "opt": TENSOR,
    "deepseek_v3": ALL,  # latent attention, mixture of experts
    "mixtral": ALL,  # mixture of experts
    "qwen3_next": CUT,  # linear attention, mixture of experts
    "mamba": ALL,  # state space
    "jamba": TENSOR,  # state space, attention, mixture of experts
    "rwkv": MIXED,  # linear attention
    "bert": ALL,  # encoders
    "deberta-v2": TENSOR,
    "modernbert": ALL,
    "t5": ALL,  # sequence to sequence
    "bart": TENSOR,
    "vit": ALL,  # vision
    "swin": CUT,
    "resnet": ALL,
    "convnext": TENSOR,
    "peft: LoRA on Llama": ALL,  # others
    "diffusers: DiT": TENSOR,
    "plain: LSTM": ALL,
    "plain: MLP-Mixer": TENSOR,
}


@pytest.mark.large
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SOME)
def test_exact(name):
    model, inputs = build(name)
    if name == "rwkv":  # it loops over the tokens
        inputs = {key: value[:, :6] for key, value in inputs.items()}
    run = VerificationRun(model, bind_call(model, (), inputs))
    for mesh in SOME[name]:
        found = run.check(rows.arrange(run, mesh))
        assert found.ok, str(found)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert "loss" in found.errors and len(trained & set(found.errors)) > len(trained) / 2


def test_there_are_25_of_all_families():
    assert len(SOME) == 25
    assert {ARCHITECTURES[name][0] for name in SOME} == {family for family, _ in ARCHITECTURES.values()}


# The recipe


def test_one_layer_of_every_kind_stays():
    small = small_config(Qwen3NextConfig())
    assert small.layer_types == ["linear_attention", "full_attention"] and small.num_hidden_layers == 2


def test_relations_stay():
    small = small_config(LlamaConfig(num_attention_heads=32, num_key_value_heads=8))
    assert small.hidden_size == small.num_attention_heads * small.head_dim
    assert small.num_key_value_heads < small.num_attention_heads, "grouped heads stay grouped"
    default = LlamaConfig(num_attention_heads=32, num_key_value_heads=32)
    assert small_config(default).num_key_value_heads == small.num_attention_heads, "and others are not grouped"
    assert len(small_config(SwinConfig()).depths) == 4, "a stage is not a layer to be left out"


def test_special_tokens_are_in_the_small_vocabulary():
    small = small_config(GPT2Config())
    assert 0 <= small.eos_token_id < small.vocab_size == 160


def test_overrides_count_over_the_recipe():
    assert small_config(LlamaConfig(), {"hidden_size": 24}).hidden_size == 24


def test_all_built_models_differ():
    classes = [name for _, name in ARCHITECTURES.values()]
    assert len(set(classes)) == len(classes) and not set(LEFT_OUT) & set(ARCHITECTURES)


# What is measured


class HalfSharded(nn.Module):
    """Two products of the same size, one behind an operator that no rule covers: its input is whole on every rank."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return self.a(x).square().sum() + (torch.linalg.matrix_exp(self.b) @ torch.ones_like(x).mT).square().sum()


@pytest.mark.large
def test_share_of_flops_is_what_runs():
    model, x = HalfSharded().double(), torch.randn(8, 32).double()
    run = VerificationRun(model, {"x": x})
    found = rows.sharded_flops(run, run.arrange("tp2"))
    assert 0 < found["share"] < 1 and found["unsharded"], found
    model, inputs = build("plain: nanoGPT")
    run = VerificationRun(model, bind_call(model, (), inputs))
    assert rows.sharded_flops(run, run.arrange("tp2"))["share"] == pytest.approx(1, abs=1e-3)
    assert rows.sharded_flops(run, run.arrange("dp2"))["share"] == pytest.approx(1, abs=1e-3), "rows are shared out"


class Two(nn.Module):
    tp_plan = {"first": "colwise", "second": "rowwise"}  # noqa: RUF012

    def __init__(self, text="right"):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = self.second(torch.relu(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.large
def test_the_others_can_be_right_and_wrong():
    model, x = Two(), torch.randn(4, 8)
    expected = [model(x).detach()]
    for way in (_peers.split_in_two, _peers.transformed):
        assert _peers.answer(way, model, {"x": x}, expected) == "right"
        assert _peers.answer(way, model, {"x": x}, [expected[0] + 1]).startswith("wrong by")
    assert _peers.answer(_peers.transformed, nn.Linear(2, 2), {}, []) == "no plan is shipped"


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv1d(8, 16, 3, groups=4, bias=False)
        self.back = nn.ConvTranspose1d(16, 8, 3, groups=4, bias=False)

    def forward(self, x):
        return self.back(self.grouped(x)).square().sum()


def test_grouped_convolutions_count_their_own_products():
    """3 rows, 5 places of the middle: products of channels within a group; twice as many in the backward."""
    with flop_counter() as counter:
        Convolutions()(torch.randn(3, 8, 7, requires_grad=True)).backward()
    assert counter.get_total_flops() == 3 * (2 * 3 * 5 * 4 * (2 * 4) * 3 + 2 * 3 * 5 * 4 * (4 * 2) * 3)


def test_errors_name_no_folder_of_the_machine():
    """Else the results would differ from machine to machine."""
    text = (
        "in /opt/me/.venv/lib/python3.11/site-packages/torch/nn/functional.py:12, '/home/me/autopart/proof/verify.py' "
        "(/tmp/x/data.json) of layers.0/linear, /mul and and/or; https://pytorch.org/docs/stable "
        "(me/autopart/autopart/proof/finite.py:72)"
    )
    told = rows.told(ValueError(text))["text"]
    assert told == (
        "in torch/nn/functional.py:12, 'verify.py' "
        "(data.json) of layers.0/linear, /mul and and/or; https://pytorch.org/docs/stable "
        "(autopart/proof/finite.py:72)"
    )


# Results


def row(name, **found):
    meshes = {mesh: {"exact": True, "max_error": 1e-15} for mesh in page.MESHES}
    return {"name": name, "family": "causal", "class": "C", "no_rule": {}, "flops": {"share": 1.0, "unsharded": {}},
            "meshes": meshes | found.pop("meshes", {}), **found}  # fmt: skip


NO_EXPERTS = {"exact": False, "error": {"type": "LayoutError", "text": "ep=2 has nothing to shard"}}


def test_what_falls_short_is_said():
    bad = {
        "dp2": {"exact": False, "error": {"type": "StageError", "text": "the batch cannot be cut\n  why    it mixes"}}
    }
    all_rows = {
        "good": row("good", meshes={"cp2": {"exact": True, "max_error": 1e-15}}),
        "bad": row(
            "bad",
            meshes={**bad, "cp2": {"exact": False, "max_error": 1.0}, "ep2": NO_EXPERTS},
            no_rule={"aten::topk": {"calls": 1}},
        ),
        "slow": row("slow", flops={"share": 0.3, "unsharded": {"aten.bmm.default": 0.7}}),
    }
    counts = page.numbers(all_rows.values())
    assert (counts["all"], counts["exact"], counts["sharded"]) == (3, 2, 1)
    text = page.page(all_rows, {"other": "needs a library"}, {})
    assert "StageError: the batch cannot be cut: it mixes (1): bad (dp2)" in text
    assert "bmm (1): slow (30.0%)" in text and "`aten::topk` | 1" in text and "needs a library (1): other" in text
    assert "| bad | C | tp2; tp4; pp2; pp2,tp2; dp2,pp2,tp2 | no | - |" in text
    assert "| good | C | all six | yes |" in text and "sequence, 1 of 2 architectures" in text
    assert "On `ep2`, which shards experts, 0 of 0 architectures with experts are exact" in text
    assert "has nothing to shard" not in text and "bad (cp2)" in text


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    for name in ("b", "a", "b"):
        benchmark.keep(path, row(name))
    assert list(benchmark.load(path)) == ["a", "b"]
    before = {"name": "a", "no_rule": {}, "meshes": {"tp2": {"exact": True}}}
    after = benchmark.merged(before, {"name": "a", "no_rule": {}, "meshes": {"dp2": {"exact": False}}})
    assert after["meshes"] == {"tp2": {"exact": True}, "dp2": {"exact": False}}


def test_a_hang_and_a_crash_cost_their_own_row():
    assert benchmark.run("gpt2", "measure", ["tp2"], 0.01)["error"]["type"] == "TimeLimit"
    assert benchmark.run("gpt2", "no_such_function", ["tp2"], 60)["error"]["type"] == "Crash"

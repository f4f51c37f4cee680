"""What is verified is chosen to fit the free memory, and said before: fewer blocks, then smaller sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import autopart
from autopart.cli.main import main
from autopart.common import progress
from autopart.errors import InputError
from autopart.ir.mesh import Mesh
from autopart.proof import verify_estimate
from autopart.proof.scale import scaled_model
from autopart.proof.scale.scaled_model import VerifyLoad, scaled_copy
from autopart.proof.scale.smaller_config import LADDER, Divisors, scaled_size, smaller, smaller_call
from autopart.proof.verify_estimate import Estimate, cgroup_free_bytes, weights_bytes
from autopart.recipe.model_source import SourceOptions, from_hf_config
from autopart.tracing.trace_model import bind_call

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_layer": 6, "n_embd": 96, "n_head": 4, "vocab_size": 1001, "n_positions": 64,
    "bos_token_id": 1000, "eos_token_id": 1000,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "num_local_experts": 4,
    "num_experts_per_tok": 1,
}  # fmt: skip


def source(entries, tmp_path, **options):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(entries))
    return from_hf_config(path, SourceOptions(meta=True, short=True, dtype="float32", **options))


def copy_of(entries, tmp_path, monkeypatch, free_bytes, mesh="tp2", **options):
    """The copy that is verified where so much memory is free."""
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: int(free_bytes))
    made = source(entries, tmp_path, **options)
    return scaled_copy(made.model, bind_call(made.model, (), made.example), VerifyLoad(Mesh.parse(mesh)))


@pytest.mark.large
def test_an_8b_llama_gets_a_copy_that_fits(tmp_path, monkeypatch):
    """Chosen by numbers alone, but for the copy: 24 GB would be needed for two layers at full width."""
    copy = copy_of(LLAMA_8B, tmp_path, monkeypatch, 4e9, batch=2, sequence=16)
    config = copy.model.config
    assert len(copy.model.model.layers) == 2 and config.num_hidden_layers == 2
    assert config.num_attention_heads % 2 == config.num_key_value_heads % 2 == config.vocab_size % 2 == 0
    assert config.num_attention_heads == 4 * config.num_key_value_heads
    assert config.bos_token_id < config.vocab_size == 2004
    assert weights_bytes(copy.model.parameters(), Mesh.parse("tp2"), False) < 1e9
    assert "2 of 32 blocks (model.layers), vocab_size 2004 of 128256" in copy.notes[0]
    assert copy.notes[1] == "weights of smaller sizes are random here"


@pytest.mark.large
def test_more_memory_more_of_the_model(tmp_path, monkeypatch):
    """The widths that are verified grow with the memory that is free."""
    widths = [
        copy_of(LLAMA_8B, tmp_path, monkeypatch, free, batch=2, sequence=16).model.config.hidden_size
        for free in (5e8, 4e9)
    ]
    assert widths[0] < widths[1] < 4096, widths


@pytest.mark.large
@pytest.mark.parametrize(
    ("entries", "mesh"), [(GPT2, "tp2"), pytest.param(MIXTRAL, "tp2", marks=pytest.mark.large), (GPT2, "pp2")]
)
def test_a_copy_of_smaller_sizes_is_verified_with_the_plan_of_the_model(entries, mesh, tmp_path, monkeypatch):
    made = source(entries, tmp_path, batch=4, sequence=16)
    plan = autopart.plan(made.model, mesh, example_kwargs=made.example)
    needed = weights_bytes(made.model.parameters(), Mesh.parse(mesh), True)
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: needed)
    found = autopart.verify(made.model, mesh, example_kwargs=made.example, plan=plan, steps=2, max_norm=0.1)
    assert found.ok and len(found.steps) == 2, str(found)
    assert any("vocab_size" in note and "blocks" in note for note in found.notes), found.notes


def test_nothing_fits(tmp_path, monkeypatch):
    with pytest.raises(InputError) as error:
        copy_of(GPT2, tmp_path, monkeypatch, 100_000, batch=2, sequence=16)
    assert "GPT2LMHeadModel in float64 needs" in str(error.value) and "GB are free" in str(error.value)
    assert "weights and gradients take" in str(error.value)


def test_a_model_that_was_changed_keeps_its_sizes(tmp_path, monkeypatch):
    made = source(GPT2, tmp_path, batch=2, sequence=16)
    made.model.extra = nn.Linear(3, 3, device="meta")
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: 100_000)
    with pytest.raises(InputError, match="in float64 needs"):
        scaled_copy(made.model, bind_call(made.model, (), made.example))


class Kinds(nn.Module):
    """Blocks that are all of another kind, and too many for the memory together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 64 * n), nn.Linear(64 * n, 8)) for n in (1, 2, 3, 4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


@pytest.mark.large
def test_at_last_kind_by_kind_of_block(monkeypatch):
    model, x = Kinds(), torch.randn(4, 8)
    largest = weights_bytes(model.blocks[3].parameters(), Mesh.parse("tp2"), False)
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: int(2 * largest))
    found = autopart.verify(model, "tp2", example_kwargs={"x": x})
    assert found.ok, str(found)
    assert [note for note in found.notes if "copy" in note] == ["verified on a copy with 1 of 4 blocks (blocks)"]
    assert {name.split(":")[0] for name in found.errors} == {"copy 1", "copy 2", "copy 3", "copy 4"}

    def tamper(program, parameters):
        if program.parameters["blocks.0.0.weight"].shape[0] == 192:
            parameters[1]["blocks.0.0.bias"].data[0] += 1e-3

    wrong = autopart.verify(model, "tp2", example_kwargs={"x": x}, tamper=tamper)
    assert not wrong.ok and wrong.first_mismatch.name == "blocks.0.0.bias"
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: int(largest))
    with pytest.raises(InputError, match="Kinds in float64 needs"):
        autopart.verify(model, "tp2", example_kwargs={"x": x})


@pytest.mark.large
def test_it_is_said_before(tmp_path, monkeypatch):
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: 20_000_000)
    made = source(GPT2, tmp_path, batch=2, sequence=16)
    lines = []
    with progress.shown(lines.append):
        scaled_copy(made.model, bind_call(made.model, (), made.example), VerifyLoad(Mesh.parse("tp2")))
    said = [line for line in lines if line.startswith("verifying ")]
    assert len(said) == 1 and "a copy with 2 of 6 blocks (transformer.h)" in said[0], lines
    assert "which needs about" in said[0] and "0.02 GB are free" in said[0]


@pytest.mark.few
@pytest.mark.parametrize("num_ranks", [1, 2, 6, 8])
@pytest.mark.parametrize("entries", [LLAMA_8B, GPT2, MIXTRAL])
def test_smaller_sizes_divide_as_the_model_s_do(entries, num_ranks, tmp_path):
    config = source(entries, tmp_path, batch=2, sequence=16).model.config
    for divisors in LADDER:
        made, changes = smaller(config, divisors, num_ranks)
        for name, (was, new) in changes.items():
            assert new < was and getattr(made, name) == new and getattr(config, name) == was
            if not name.startswith(("hidden", "n_embd", "head_dim")):
                assert math.gcd(was, num_ranks) == math.gcd(new, num_ranks), (name, was, new)
        assert made.hidden_size % made.num_attention_heads == 0
        assert made.vocab_size >= 256 or made.vocab_size == config.vocab_size


def test_alike():
    assert [scaled_size(50257, d, 8, 256) % 8 for d in (2, 4, 16)] == [50257 % 8] * 3
    assert scaled_size(128256, 64, 2, 256) == 2004 and scaled_size(100, 4, 8, 256) == 100


def test_a_smaller_call():
    ids = torch.tensor([[5, 700, 300, 2], [1, -100, 3, 4]])
    call = smaller_call({"input_ids": ids, "labels": ids, "use_cache": False}, 256, 1, 2)
    assert call["labels"].tolist() == [[5, 188, 44, 2], [1, -100, 3, 4]] and call["use_cache"] is False
    long = {"input_ids": torch.zeros(2, 64, dtype=torch.long)}
    assert smaller_call(long, 256, 4, 2)["input_ids"].shape == (2, 16)
    assert smaller_call({"pixel_values": torch.zeros(1, 3, 8, 8)}, 256, 1, 2) is None


def test_no_divisor_changes_nothing(tmp_path):
    config = source(GPT2, tmp_path, batch=2, sequence=16).model.config
    assert smaller(config, Divisors(), 2)[1] == {}


# --- What is free, and what is needed


def test_replicas_and_optimizers_need_more():
    weights = [torch.empty(1000)]
    once = weights_bytes(weights, Mesh.parse("tp2"), False)
    assert once == 8 * 1000 * 4
    assert weights_bytes(weights, Mesh.parse("dp4,tp2"), False) == 8 * 1000 * 7
    assert weights_bytes(weights, Mesh.parse("tp2"), True) == 8 * 1000 * 10


def test_an_estimate_is_told():
    assert str(Estimate(2_000_000_000, 500_000_000, 42.3)) == "about 2.5 GB and 42 s"
    assert str(Estimate(2_000_000, 0)) == "about 0.002 GB"


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_cgroups_count(version, tmp_path):
    names = ("memory.max", "memory.current", "inactive_file")
    root, line = tmp_path, "0::/jobs/mine"
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        root, line = tmp_path / "memory", "4:cpu,memory:/jobs/mine"
    inner = root / "jobs" / "mine"
    inner.mkdir(parents=True)
    (inner / names[0]).write_text("max\n" if version == 2 else f"{2**63}\n")
    (inner / names[1]).write_text("700\n")
    (inner.parent / names[0]).write_text("1000\n")
    (inner.parent / names[1]).write_text("800\n")
    (inner.parent / "memory.stat").write_text(f"anon 5\n{names[2]} 150\n")
    process = tmp_path / "cgroup"
    process.write_text(f"1:name=systemd:/\n{line}\n")
    assert cgroup_free_bytes(tmp_path, process) == 350
    process.write_text("1:name=systemd:/\n")
    assert cgroup_free_bytes(tmp_path, process) == math.inf
    assert 0 < verify_estimate.available_bytes() < 2**60


# --- The command


@pytest.mark.large
def test_the_command_does_not_build_what_it_does_not_verify(tmp_path, monkeypatch):
    """Weights of the whole model are never made where a copy is verified."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    built = []
    from transformers import GPT2LMHeadModel

    init = GPT2LMHeadModel.__init__

    def counted(self, config, *args, **kwargs):
        init(self, config, *args, **kwargs)
        built.append((config.n_layer, next(self.parameters()).device.type))

    monkeypatch.setattr(GPT2LMHeadModel, "__init__", counted)
    monkeypatch.setattr(scaled_model, "available_bytes", lambda device: 20_000_000)
    command = ["verify", "--hf-config", str(path), "--mesh", "tp2", "--batch", "2", "--sequence", "16", "--steps", "2"]
    result = CliRunner().invoke(main, [*command, "--optimizer", "sgd", "--lr", "0.1", "--max-norm", "1.0"])
    assert result.exit_code == 0, result.output
    assert {layers for layers, device in built if device == "cpu"} <= {2}, built
    assert "step 2: loss" in result.output and "verifying a copy with 2 of 6 blocks" in " ".join(result.output.split())


@pytest.mark.large
def test_the_command_verifies_a_small_model_as_it_is(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "n_layer": 2, "n_embd": 16, "vocab_size": 64, "bos_token_id": 1}))
    result = CliRunner().invoke(
        main, ["verify", "--hf-config", str(path), "--mesh", "tp2", "--batch", "2", "--sequence", "16", "--json"]
    )
    data = json.loads(result.stdout)
    assert data["ok"] and data["steps"] == [] and not any("copy" in note for note in data["notes"])

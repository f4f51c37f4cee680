"""`weights=`: a model on meta whose ranks read, or make, only their shards."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dist
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import autopart
from autopart.errors import CheckpointError, RuntimeSetupError
from autopart.ir.layout import section_sizes
from autopart.runtime.comm.pieces import Cut, boxes, spans_of
from autopart.runtime.state import constructed
from autopart.runtime.state.constructed import Constructor, constructor_of, held_tensors
from autopart.runtime.state.safetensors_files import Files
from autopart.runtime.state.unread import CannotFollow, Unread

ROWS, SEQ, VOCAB = 4, 8, 64
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm", "num_key_value_heads": 2}


class Plain(nn.Module):
    """Parameters that are tied, a buffer that is saved, and one that the forward reads from the files too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)
        self.register_buffer("scale", torch.full((32,), 0.5))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        logits = self.head(x + self.down(self.up(x).relu()) * self.gain)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": SEQ}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **zoo.TOKENS))
    model.loss_type = "ForCausalLM"
    return model


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **zoo.TOKENS))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, **zoo.TOKENS))


def qwen3_moe() -> nn.Module:
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **sizes, **zoo.TOKENS))


def deepseek() -> nn.Module:
    sizes = {
        "n_routed_experts": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_group": 2, "topk_group": 1,
    }  # fmt: skip
    experts = EXPERTS | {"num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **experts, **sizes, **zoo.TOKENS))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain, "gpt2": gpt2, "bert": bert, "llama": llama, "mixtral": mixtral, "qwen3_moe": qwen3_moe,
    "deepseek": deepseek,
}  # fmt: skip


def batch(rows: int = ROWS, seq: int = SEQ) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (rows, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def finished(model: nn.Module) -> nn.Module:
    """The model in float64, without what transformers computes in float32 whatever the model's type."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "variance_epsilon"):
            model.set_submodule(name, zoo.RMSNorm(module.weight, module.variance_epsilon))
    if getattr(model, "loss_type", "") == "ForCausalLM":
        model.loss_function = zoo.causal_loss
    return model.double()


def real(name: str) -> nn.Module:
    """With values, none of which is special: a bias of zero, or the same for two parameters, would hide mistakes."""
    torch.manual_seed(3)
    model = finished(BUILDERS[name]())
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for _, b in persistent_buffers(model))):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    saved = model.state_dict()
    return [(n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point()]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return finished(BUILDERS[name]())


def save(model: nn.Module, folder: Path, size: str = "20KB") -> str:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, max_shard_size=size)
    else:
        folder.mkdir(exist_ok=True)
        state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
        save_file(state, folder / "model.safetensors")
    return str(folder)


def one_device(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(**batch())
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --- on processes --------------------------------------------------------------------------------------------------


class Counted:
    """What this process reads of files: {tensor: how often each of its elements}."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: dict[str, Tensor] = {}
        self.size_bytes = 0
        read = Files.read

        def counting(files: Files, file: Path, name: str, window: Any, size_bytes: int) -> Tensor:
            value = read(files, file, name, window, size_bytes)
            times = self.times.setdefault(name, torch.zeros(files.tensors[name].shape, dtype=torch.int32))
            times[window] += 1
            self.size_bytes += value.numel() * value.itemsize
            return value

        monkeypatch.setattr(Files, "read", counting)

    @property
    def most(self) -> int:
        return max(int(times.max()) for times in self.times.values() if times.numel())


def partitioned(name: str, mesh: str, weights: Any, **options: Any) -> dict[str, Any]:
    """What a rank makes of a model on meta, and what it read of the files."""
    example = batch()
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        given = BUILDERS[name] if weights == "function" else weights
        pm = autopart.parallelize(on_meta(name), mesh, example_kwargs=example, weights=given, **options)
    local = [*pm.parameters(), *(b for _, b in persistent_buffers(pm._source.model))]
    loss = pm.step(**example)
    return {
        "loss": loss, "grads": pm.full_grads(), "state": pm.full_state_dict(),
        "read": counted.size_bytes, "most": counted.most if counted.times else 0,
        "local": sum(tensor.numel() * tensor.itemsize for tensor in local),
    }  # fmt: skip


def assert_is(result: dict[str, Any], model: nn.Module) -> None:
    """The partitioned model has the model's values, to the bit, its loss and its gradients."""
    own = model.state_dict()
    assert set(result["state"]) == set(own)
    for name, value in own.items():
        assert value.dtype == result["state"][name].dtype and torch.equal(value, result["state"][name]), name
    loss, grads = one_device(model)
    # The routers of mixtures of experts compute in float32, whatever the model's type.
    tolerance = 1e-7 if hasattr(getattr(model, "config", None), "num_experts_per_tok") else 1e-10
    assert abs(float(result["loss"] - loss)) < tolerance
    zoo.assert_same_grads(result["grads"], grads, tolerance)


MESHES = [("tp2", {}), ("pp2", {}), ("dp2", {"zero": 3})]


@pytest.mark.whole
@pytest.mark.parametrize("name", BUILDERS)
def test_every_rank_reads_its_part_of_a_folder_once(name: str, tmp_path: Path) -> None:
    model = real(name)
    folder = save(model, tmp_path)
    for mesh, options in MESHES:
        for result in dist.run_ranks(partitioned, 2, name, mesh, folder, **options):
            assert_is(result, copy.deepcopy(model))
            assert result["read"] == result["local"] and result["most"] == 1, (mesh, result["read"], result["local"])


@pytest.mark.few
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_every_rank_of_two_axes_reads_its_part(name: str, tmp_path: Path) -> None:
    model = real(name)
    folder = save(model, tmp_path)
    for result in dist.run_ranks(partitioned, 4, name, "dp2,tp2", folder, zero=3):
        assert_is(result, copy.deepcopy(model))
        assert result["read"] == result["local"] and result["most"] == 1

"""`weights=`: a model on meta whose ranks read, or make, only their shards."""

from __future__ import annotations

import copy
import importlib
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
from click.testing import CliRunner
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
from autopart.cli.main import main
from autopart.errors import AutopartError, CheckpointError, OptionError
from autopart.ir.layout import section_sizes
from autopart.ir.sharding import DimSharding, boxes, spans_of
from autopart.runtime.sharded_tensor.sharded_tensor import ShardedTensor
from autopart.runtime.weights import deferred_init
from autopart.runtime.weights.deferred_init import Constructor, buffers_and_attributes, constructor_of
from autopart.runtime.weights.lazy_tensors import LazyTensor, UnsupportedByLazyTensor
from autopart.runtime.weights.safetensors_files import SafetensorsFiles

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
        read = SafetensorsFiles.read

        def counting(files: SafetensorsFiles, file: Path, name: str, window: Any, size_bytes: int) -> Tensor:
            value = read(files, file, name, window, size_bytes)
            times = self.times.setdefault(name, torch.zeros(files.tensors[name].shape, dtype=torch.int32))
            times[window] += 1
            self.size_bytes += value.numel() * value.itemsize
            return value

        monkeypatch.setattr(SafetensorsFiles, "read", counting)

    @property
    def most(self) -> int:
        return max(int(times.max()) for times in self.times.values() if times.numel())


def local_of(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, ShardedTensor) else parameter


def partitioned(name: str, mesh: str, weights: Any, **options: Any) -> dict[str, Any]:
    """What a rank makes of a model on meta, and what it read of the files."""
    example = batch()
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        given = BUILDERS[name] if weights == "function" else weights
        pm = autopart.parallelize(on_meta(name), mesh, example_kwargs=example, weights=given, **options)
    local = [*map(local_of, pm.parameters()), *(b for _, b in persistent_buffers(pm._source.model))]
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


@pytest.mark.large
@pytest.mark.parametrize("name", BUILDERS)
def test_every_rank_reads_its_part_of_a_folder_once(name: str, tmp_path: Path) -> None:
    model = real(name)
    folder = save(model, tmp_path)
    for mesh, options in MESHES:
        for result in dist.run_ranks(partitioned, 2, name, mesh, folder, **options):
            assert_is(result, copy.deepcopy(model))
            assert result["read"] == result["local"] and result["most"] == 1, (mesh, result["read"], result["local"])


@pytest.mark.large
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_every_rank_of_two_axes_reads_its_part(name: str, tmp_path: Path) -> None:
    model = real(name)
    folder = save(model, tmp_path)
    for result in dist.run_ranks(partitioned, 4, name, "dp2,tp2", folder, zero=3):
        assert_is(result, copy.deepcopy(model))
        assert result["read"] == result["local"] and result["most"] == 1


@pytest.mark.large
@pytest.mark.parametrize("name", ["plain", "gpt2", "bert", "llama", "mixtral"])
def test_weights_are_made_to_the_bit_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    model = finished(BUILDERS[name]())
    ways = ["function"] if name == "plain" else ["init", "function"]
    for mesh, options in MESHES[:2]:
        for weights in ways:
            for result in dist.run_ranks(partitioned, 2, name, mesh, weights, **options):
                assert_is(result, copy.deepcopy(model))


def trained_on(folder: str) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """A few calls of other shapes and modes, a copy, and a state dict that is loaded again."""
    pm = autopart.parallelize(on_meta("llama"), "tp2", weights=folder)  # traced at the first call
    losses = [pm.step(**batch(*shape)).item() for shape in ((4, 8), (8, 8), (4, 6))]
    copied = copy.deepcopy(pm)
    before = pm.full_state_dict()
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.add_(1.0)
    pm.load_state_dict(copied.state_dict())
    loaded = pm.full_state_dict()
    assert all(torch.equal(before[name], loaded[name]) for name in before)
    pm.eval()
    with torch.no_grad():
        logits = [pm(**batch()).logits, copied.eval()(**batch()).logits]
    return losses, before, logits


@pytest.mark.large
def test_later_calls_copies_and_state_dicts_are_as_of_a_loaded_model(tmp_path: Path) -> None:
    model = real("llama")
    folder = save(model, tmp_path)
    losses = [model(**batch(*shape)).loss.item() for shape in ((4, 8), (8, 8), (4, 6))]
    for found, state, logits in dist.run_ranks(trained_on, 2, folder):
        assert found == pytest.approx(losses, rel=1e-12)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        for one in logits:
            torch.testing.assert_close(one, model.eval()(**batch()).logits, rtol=1e-10, atol=1e-12)


# --- in one process ------------------------------------------------------------------------------------------------


def on_one(model: nn.Module, weights: Any, **example: Any) -> dict[str, Tensor]:
    """The whole state of a model that is partitioned over one rank."""
    pm = autopart.parallelize(model, "tp1", example_kwargs=example or batch(), weights=weights)
    return pm.full_state_dict()


def said(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and its warnings about weights."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    texts = [str(w.message) for w in caught]
    return result, [text for text in texts if "weights" in text or "checkpoint" in text]


class Whole(LazyTensor):
    """A tensor in memory as one that is not."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape, self.dtype = value, tuple(value.shape), value.dtype

    def read_box(self, offsets: Any, out: Tensor) -> None:
        window = tuple(slice(start, start + size) for start, size in zip(offsets, out.shape, strict=True))
        out.copy_(self.value[window])


def test_boxes_of_what_is_made_of_files_are_those_of_the_tensors() -> None:
    def made(parts: list[Any]) -> list[Any]:
        gate, up = torch.stack(parts[:3], dim=0), torch.stack(parts[3:], dim=0)
        joined = torch.cat([gate, up], dim=1)
        turned = torch.transpose(joined, 1, 2)
        halves = torch.chunk(joined, 3, dim=-1)
        pieces = torch.split(turned, [2, 4], dim=1)
        return [joined, turned, *halves, *pieces, parts[0].narrow(1, 2, 3), joined.chunk(3)[1].squeeze(0).contiguous()]

    parts = [torch.randn(4, 6) for _ in range(6)]
    generator = torch.Generator().manual_seed(0)
    for expected, found in zip(made(parts), made([Whole(part) for part in parts]), strict=True):
        assert found.shape == tuple(expected.shape)
        for _ in range(20):
            ends = [sorted(torch.randint(size + 1, (2,), generator=generator).tolist()) for size in expected.shape]
            out = torch.empty([b - a for a, b in ends])
            found.read_box([a for a, _ in ends], out)
            assert torch.equal(out, expected[tuple(slice(a, b) for a, b in ends)])


def test_a_shard_is_read_as_it_is_cut() -> None:
    full = torch.randn(12, 10)
    cases = [
        [], [(DimSharding(0, 12, (), 4), 3)], [(DimSharding(1, 10, (8, 2), 2), 1)], [(DimSharding(1, 10, (), 4), 2)],
        [(DimSharding(0, 12, (6, 4, 2), 2), 1), (DimSharding(0, 6, (), 4), 1)],
        [(DimSharding(0, 12, (), 2), 1), (DimSharding(1, 10, (4, 6), 2), 0)],
        [(DimSharding(1, 10, (), 11), 10)],
    ]  # fmt: skip
    for cuts in cases:
        expected = full
        for cut, index in cuts:
            expected = cut.take(expected, index)
        spans = spans_of(full.shape, cuts)
        out = torch.full([sum(n for _, n in dim) for dim in spans], math.nan)
        Whole(full).read(boxes(spans), out)
        assert torch.equal(out, expected), cuts
    assert sum(section_sizes(10, (8, 2))) == 10


def test_what_needs_more_than_moving_is_not_followed() -> None:
    for call in (lambda t: t.reshape(6), lambda t: t @ t, lambda t: t * 2, lambda t: torch.roll(t, 1)):
        with pytest.raises((UnsupportedByLazyTensor, TypeError)):
            call(Whole(torch.ones(2, 3)))


@pytest.mark.large
@pytest.mark.parametrize(
    ("base", "name"), [(LlamaModel, "llama"), (GPT2Model, "gpt2"), (BertModel, "bert")], ids=lambda part: str(part)
)
def test_names_with_and_without_the_prefix_of_the_head(base: Any, name: str, tmp_path: Path) -> None:
    """The model's own base, read from a checkpoint of the model with its head; and of a tied head from its base."""
    model = real(name)
    folder = save(model, tmp_path / "head")
    arguments = {"add_pooling_layer": False} if base is BertModel else {}
    with torch.device("meta"):
        inner = base(model.config, **arguments).double()
    state, notes = said(lambda: on_one(inner, folder, input_ids=batch()["input_ids"]))
    expected = getattr(model, model.base_model_prefix).state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(value, expected[n]) for n, value in state.items())
    assert ("lacks some tensors" in "".join(notes)) == (name != "gpt2")  # a tied head is not in the files
    if name == "gpt2":
        folder = save(getattr(model, model.base_model_prefix), tmp_path / "base")
        state = on_one(on_meta(name), folder)
        assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())


@pytest.mark.large
def test_values_are_converted_to_the_models_type_and_that_is_said(tmp_path: Path) -> None:
    model = real("llama").bfloat16()
    folder = save(model, tmp_path)
    state, notes = said(lambda: on_one(on_meta("llama"), folder))
    assert all(torch.equal(value.double(), state[name]) for name, value in model.state_dict().items())
    assert len(notes) == 1 and "bf16 to f64 ('lm_head.weight', " in notes[0] and "and 13 more" in notes[0]
    save(real("llama"), tmp_path / "wide")
    _, notes = said(lambda: on_one(on_meta("llama").float(), str(tmp_path / "wide")))
    assert "f64 to f32, rounded (" in notes[0]


def test_what_the_model_has_no_place_for_is_left_out_and_listed(tmp_path: Path) -> None:
    model = real("plain")
    save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, **{f"other.{i:02}": torch.ones(1) for i in range(10)}}, tmp_path / "model.safetensors")
    found, notes = said(lambda: on_one(on_meta("plain"), tmp_path))
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    listed = ", ".join(f"'other.{i:02}'" for i in range(8))
    assert notes == [
        f"Plain lacks some tensors of the checkpoint at {tmp_path}, which are not loaded: {listed} and 2 more."
    ]


@pytest.mark.whole
@pytest.mark.parametrize("where", ["file", "other names", "alias", "both names"])
def test_where_tensors_may_lie(where: str, tmp_path: Path) -> None:
    model = real("plain")
    save(model, tmp_path)
    state, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    weights: Any = tmp_path
    if where == "file":
        weights = path.rename(tmp_path / "anything.safetensors")
    elif where == "other names":
        path.unlink()
        for index, name in enumerate(state):
            save_file({name: state[name]}, tmp_path / f"part{index}.safetensors")
    elif where == "alias":
        state["head.weight"] = state.pop("embed.weight")
        save_file(state, path)
    else:
        save_file({**state, "head.weight": state["embed.weight"].clone()}, path)
    found = on_one(on_meta("plain"), weights)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


def test_values_of_a_model_that_has_them_are_replaced_and_its_own_stay(tmp_path: Path) -> None:
    folder = save(real("plain"), tmp_path)
    torch.manual_seed(9)
    other = finished(Plain())
    before = copy.deepcopy(other.state_dict())
    found = on_one(other, folder)
    assert all(torch.equal(value, found[name]) for name, value in real("plain").state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


class Teacher(nn.Module):
    """Its frozen parameter is the moving average of the trained one: the forward writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
        return (self.student(x) - self.teacher(x)).square().mean()


def test_frozen_parameters_that_the_forward_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Teacher(), torch.randn(4, 8)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Teacher()
    pm = autopart.parallelize(empty, "tp1", example_kwargs={"x": x}, weights=tmp_path)
    for _ in range(2):
        assert pm(x=x).item() == pytest.approx(model(x=x).item())
    assert torch.allclose(pm.full_state_dict()["teacher.weight"], model.teacher.weight)


# --- ranks that differ ---------------------------------------------------------------------------------------------


def error_of(folders: list[str], mesh: str = "tp2") -> str:
    try:
        autopart.parallelize(
            on_meta("plain"), mesh, example_kwargs=batch(), weights=folders[torch.distributed.get_rank()]
        )
    except AutopartError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.whole
@pytest.mark.parametrize("second", ["missing", "other shapes", "same", "elsewhere"])
def test_ranks_with_unlike_files_say_so(second: str, tmp_path: Path) -> None:
    one = save(real("plain"), tmp_path / "one")
    two = str(tmp_path / "two")
    if second == "other shapes":
        save_file({"gain": torch.ones(1)}, save_empty(tmp_path / "two"))
    elif second in ("same", "elsewhere"):
        save(real("plain"), tmp_path / "two")
    folders = [two, two] if second == "missing" else [one, two]
    texts = dist.run_ranks(error_of, 2, folders)
    assert texts[0] == texts[1]
    if second == "missing":
        assert texts[0].startswith(f"CheckpointError: there is no checkpoint at {two}")
    elif second == "other shapes":
        assert texts[0].startswith("RuntimeSetupError: the ranks differ in weights=")
        assert "rank 1: the checkpoint at" in texts[0] and "does not fit Plain" in texts[0]
    else:
        assert texts[0] == "nothing was raised"


def save_empty(folder: Path) -> Path:
    folder.mkdir()
    return folder / "model.safetensors"


def seeds_of_ranks() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    try:
        autopart.parallelize(on_meta("llama"), "tp2", example_kwargs=batch(), weights="init")
    except AutopartError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_with_unlike_seeds_say_so() -> None:
    texts = dist.run_ranks(seeds_of_ranks, 2)
    assert texts[0] == texts[1] and "the ranks differ in torch's random state" in texts[0]


def two_modules(folder: str) -> bool:
    """Two modules that share an embedding, each partitioned on its own: the part stays one."""
    with torch.device("meta"):
        one, other = Plain(), Plain()
    other.embed.weight = other.head.weight = one.embed.weight
    parts = [autopart.parallelize(m, "tp2", example_kwargs=batch(), weights=folder) for m in (one, other)]
    return parts[0].embed.weight is parts[1].embed.weight and parts[0].up.weight is not parts[1].up.weight


def test_two_modules_that_share_a_parameter_share_its_part(tmp_path: Path) -> None:
    assert dist.run_ranks(two_modules, 2, save(real("plain").float(), tmp_path)) == [True, True]


def test_what_runs_nothing_takes_no_weights() -> None:
    for function in (autopart.plan, autopart.verify):
        with pytest.raises(OptionError, match=rf"other functions take it, {function.__name__}\(\) does not"):
            function(Plain(), "tp2", example_kwargs=batch(), weights="init")  # type: ignore[operator]


@pytest.mark.large
@pytest.mark.parametrize("weights", ["folder", "init"])
def test_the_command_line_runs_a_config_with_weights(weights: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    save(model, tmp_path)
    config = str(tmp_path / "config.json")
    given = str(tmp_path) if weights == "folder" else weights
    runs = []
    for options in ([], ["--weights", given]):
        command = ["run", "--hf-config", config, "--mesh", "tp1", "--steps", "2", "--batch", "2", "--json", *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        runs.append([step["loss"] for step in json.loads(result.stdout)["steps"]])
    assert runs[0] == runs[1]  # the seed is that of the model that was saved
    refused = CliRunner().invoke(main, ["run", "--hf-config", config, "--mesh", "tp1", "--compare", "--weights", given])
    assert refused.exit_code != 0 and "--compare cannot be combined with --weights" in refused.output


def test_a_conversion_that_computes_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(real("llama"), tmp_path)
    library = importlib.import_module("transformers.core_model_loading")
    names = [".self_attn.q_proj.weight"]
    conversion = library.WeightConverter(names, names, operations=[library.Interleave(dim=0)])
    table = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.setattr(table, "get_model_conversion_mapping", lambda model: [conversion])
    with pytest.raises(CheckpointError) as told:
        on_one(on_meta("llama"), folder)
    first, why, *_ = str(told.value).splitlines()
    name = "model.layers.{}.self_attn.q_proj.weight"
    both = ", ".join(f"'{name.format(i)}' (reshape of '{name.format(i)}')" for i in range(2))
    assert first == f"the checkpoint cannot be read shard by shard for {both}"
    assert why.endswith("converts it for LlamaForCausalLM by computing values, not only by moving elements")


# --- constructors --------------------------------------------------------------------------------------------------


class Various(nn.Module):
    """Random buffers, values drawn before they are registered, a row that is cleared, LSTM, orthogonal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(4))
        self.wide, self.own = nn.Linear(300, 300), nn.Parameter(torch.randn(7))
        self.embed, self.lstm, self.last = nn.Embedding(40, 8, padding_idx=0), nn.LSTM(8, 8), nn.Linear(16, 16)
        nn.init.trunc_normal_(self.wide.weight)
        nn.init.orthogonal_(self.last.weight)


class ComesBack(nn.Module):
    """It reads a weight again after it has gone on to others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))
        with torch.no_grad():
            self.layers[0].weight.mul_(2)
            self.layers[3].weight.copy_(self.layers[1].weight)


@pytest.mark.whole
@pytest.mark.parametrize(
    "build", [Various, ComesBack, *BUILDERS.values(), lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True)]
)
def test_a_constructor_gives_the_same_bits_with_one_tensor_in_memory(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    model = build()
    torch.manual_seed(5)
    constructor, notes = said(lambda: Constructor(build))
    cuts = {name: [(DimSharding(0, p.shape[0], (), 2), 1)] if p.dim() else [] for name, p in model.named_parameters()}
    made, more = said(lambda: constructor.read(cuts))
    for name, parameter in model.named_parameters():
        expected = cuts[name][0][0].take(parameter, 1) if parameter.dim() else parameter
        assert torch.equal(made[name], expected), name
    for name, value in buffers_and_attributes(model).items():
        assert torch.equal(constructor.buffers[name], value), name
    assert torch.equal(torch.get_rng_state(), constructor.random_state)
    whole = [note for note in (*notes, *more) if "every rank stores the full model while" in note]
    assert bool(whole) == (build is ComesBack or build.__name__ == "<lambda>")


def test_a_constructor_has_few_parameters_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    use = deferred_init._OneAtATime._use

    def watching(self: Any, keys: Any) -> None:
        use(self, keys)
        held.append(sum(t.parameter.untyped_storage().nbytes() for t in self._tracked.values()))

    monkeypatch.setattr(deferred_init._OneAtATime, "_use", watching)
    build = constructor_of(real("llama").float())
    assert build is not None
    constructor = Constructor(build)
    made = constructor.read(dict.fromkeys(constructor.shapes, ()))
    sizes = [value.numel() * value.itemsize for value in made.values()]
    # One that was just made, and what was worked on before.
    assert max(held) <= 2 * max(sizes) < sum(sizes) / 3

"""`from_pretrained` and names on the hub: each rank reads its shards, and outputs equal those of transformers."""

import json
from pathlib import Path

import dist
import pytest
import torch
import trainer_cases as cases
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

import autopart
from autopart.cli.main import main
from autopart.errors import AutopartError, CheckpointError, MeshError, OptionError

TIMEOUT_S = 280.0
NAME, COMMIT = "someone/tiny-llama", "0123456789abcdef0123456789abcdef01234567"


def save_tiny(folder):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32, pad_token_id=0, use_cache=False)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A model in a local cache of the hub, in the cache's own format, without a network."""
    cache = tmp_path / "hub"
    repository = cache / f"models--{NAME.replace('/', '--')}"
    save_tiny(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return str(cache)


def load(name, cache, mesh, options, expected):
    """One rank: outputs of a language model and of a classifier with a new head."""
    if cache:
        import huggingface_hub.constants as constants

        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, True
    ids = cases.batch()["input_ids"]
    pm = autopart.from_pretrained(name, mesh, dtype=torch.float64, example_kwargs={"input_ids": ids}, **options)
    assert not pm.training and pm.generation_config.pad_token_id == 0
    with torch.no_grad():
        logits = pm(input_ids=ids).logits
    torch.manual_seed(5)
    with (
        pytest.warns(UserWarning, match=r"lacks 'score.weight', initialised with random values")
        if (torch.distributed.get_rank() == 0)
        else pytest.MonkeyPatch.context()
    ):
        classifier = autopart.from_pretrained(
            name, mesh, task="sequence-classification", config={"num_labels": 3}, dtype="float64",
            example_kwargs={"input_ids": ids}, **options,
        )  # fmt: skip
    with torch.no_grad():
        scores = classifier(input_ids=ids).logits
    for got, right in zip((logits, scores), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)  # norms of Llama compute in float32
    values = classifier.full_state_dict()
    return values["score.weight"], sum(p.to_local().numel() for p in pm.parameters() if hasattr(p, "to_local"))


@pytest.mark.parametrize(("mesh", "options"), [
    ("tp2", {}), pytest.param("dp2", {"zero": 3}, marks=pytest.mark.large),
    pytest.param("pp2", {}, marks=pytest.mark.large),
])  # fmt: skip
def test_outputs_equal_those_of_transformers(mesh, options, cached):
    folder = next(Path(cached).glob("*/snapshots/*"))
    ids = cases.batch()["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    torch.manual_seed(5)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=torch.float64)
    with torch.no_grad():
        expected = model(input_ids=ids).logits, classifier(input_ids=ids).logits
    total = model.num_parameters()
    for name, cache in ((str(folder), ""), (NAME, cached))[: 2 if mesh == "tp2" else 1]:
        results = dist.run_ranks(load, 2, name, cache, mesh, options, expected, timeout_s=TIMEOUT_S)
        for score, numel in results:
            assert torch.equal(score, classifier.score.weight), mesh
            assert numel < 0.6 * total


def test_names_and_folders(cached, tmp_path):
    folder = next(Path(cached).glob("*/snapshots/*"))
    example = {"input_ids": cases.batch()["input_ids"]}
    for name in (folder, NAME):
        pm = autopart.from_pretrained(name, "tp1", example_kwargs=example)
        assert type(pm._source.model) is LlamaForCausalLM and pm.dtype == torch.float32
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "quantized").mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    for name, options, kind, text in (
        ("someone/unknown", {}, CheckpointError, "there is no folder 'someone/unknown', and no such model on the hub"),
        (tmp_path / "none", {}, CheckpointError, "has no config.json"),
        (tmp_path / "adapter", {}, CheckpointError, "parallelize(PeftModel.from_pretrained(model, folder), ...)"),
        (tmp_path / "quantized", {}, CheckpointError, "are quantized"),
        (folder, {"task": "chess"}, OptionError, "task='chess' is not known"),
        (folder, {"weights": "init"}, OptionError, "from_pretrained() has no option weights="),
    ):
        with pytest.raises(kind) as error:
            autopart.from_pretrained(name, "tp1", example_kwargs=example, **options)
        assert text in str(error.value)


def test_configs_of_the_command_line(cached):
    folder = next(Path(cached).glob("*/snapshots/*"))
    for name in (str(folder), NAME):
        answer = CliRunner().invoke(main, ["plan", "--hf-config", name, "--mesh", "tp2", "--sequence", "8"])
        assert answer.exit_code == 0 and '"LlamaForCausalLM"' in answer.output, answer.output
    answer = CliRunner().invoke(main, ["plan", "--hf-config", "someone/unknown", "--mesh", "tp2"])
    assert answer.exit_code == 2 and "there is no config at someone/unknown" in answer.output


def without_a_mesh():
    model, batch = cases.gpt2(), cases.batch()
    return str(autopart.parallelize(model, example_kwargs=batch, hardware="cpu-gloo").mesh)


def test_a_mesh_for_all_processes(monkeypatch):
    first, second = dist.run_ranks(without_a_mesh, 2, timeout_s=TIMEOUT_S)
    assert first == second and autopart.Mesh.parse(first).num_ranks == 2
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(MeshError) as error:
        autopart.parallelize(cases.gpt2(), example_kwargs=cases.batch())
    assert str(error.value).splitlines()[0] == "no mesh is given"
    assert isinstance(error.value, AutopartError)

"""`save_pretrained` and `load_pretrained` of partitioned models: the format of `from_pretrained`."""

import json
import shutil
from pathlib import Path

import dist
import pytest
import torch
import trainer_cases as cases
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autopart
from autopart.common.memory_size import parse_size
from autopart.errors import AutopartError, CheckpointError, OptionError, UsageError
from autopart.runtime.checkpoint import pretrained_folder
from autopart.runtime.checkpoint.pretrained_folder import SavedTensor, files_of

TIMEOUT_S = 280.0


class Plain(nn.Module):
    """A model of torch alone, with a tied weight, a buffer, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 6, bias=False), nn.Linear(6, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.up.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("unsaved", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.head(torch.tanh(self.down(self.up(x))) * self.scale + self.unsaved).square().mean()


def small(kind, config, **sizes):
    torch.manual_seed(0)
    common = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "use_cache": False,
              "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    return kind(config(**(common | sizes))).double()


MODELS = {
    "gpt2, tied": cases.gpt2,
    "llama, untied": lambda: small(LlamaForCausalLM, LlamaConfig),
    "mixtral": lambda: small(MixtralForCausalLM, MixtralConfig, num_local_experts=4, num_experts_per_tok=2).float(),
    "llama, tied": lambda: small(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
}


def save_all(mesh, base, names, size, options):
    """Save each model after a step of SGD, in files of at most `size`, and return its logits."""
    logits, written = {}, {}
    write = pretrained_folder.write_file
    for name in names:
        torch.manual_seed(0)
        model, batch = MODELS[name](), cases.batch()
        pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
        pm.step(**batch)
        torch.optim.SGD(pm.parameters(), lr=0.1).step()
        files = written[name] = []

        def record(tensors, path, files=files):
            files.append(sum(value.nbytes for value in tensors.values()))
            write(tensors, path)

        pretrained_folder.write_file = record
        try:
            pm.save_pretrained(f"{base}/{name}", max_shard_size=size)
        finally:
            pretrained_folder.write_file = write
        pm.eval()
        with torch.no_grad():
            logits[name] = pm(**batch).logits, pm.full_state_dict()
    return logits, written


def load_all(mesh, base, names, logits):
    for name in names:
        batch = cases.batch()
        model = MODELS[name]()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        pm = autopart.parallelize(model, mesh, example_kwargs=batch)
        pm.load_pretrained(f"{base}/{name}")
        for key, value in pm.full_state_dict().items():
            assert torch.equal(value, logits[name][1][key]), (mesh, name, key)


def check_folder(folder, name, logits):
    model = MODELS[name]()
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        assert {folder / file for file in json.loads(index.read_text())["weight_map"].values()} == set(files)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    logits, weights = logits
    assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    with torch.no_grad():  # norms of Llama, and Mixtral, compute in float32
        torch.testing.assert_close(loaded.eval()(**cases.batch()).logits, logits, rtol=1e-4, atol=1e-4, msg=name)
    names = []
    for file in files:
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    assert len(names) == len(set(names)) == len({p.data_ptr() for p in model.state_dict().values()})
    return files


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "names", "size"), [
    ("tp2", ("gpt2, tied", "mixtral", "llama, untied"), "5GB"), ("pp2", ("gpt2, tied", "llama, tied"), 4000),
    ("dp2", ("llama, untied",), "4KB"),
])  # fmt: skip
def test_folders_of_transformers(mesh, names, size, tmp_path):
    results = dist.run_ranks(
        save_all, 2, mesh, str(tmp_path), names, size, {"zero": 3} if mesh == "dp2" else {}, timeout_s=TIMEOUT_S
    )
    logits = results[0][0]
    for name in names:
        files = check_folder(tmp_path / name, name, logits[name])
        by_rank = [written[name] for _, written in results]
        assert sum(map(len, by_rank)) == len(files) > 1 and all(by_rank), by_rank
        total = sum(map(sum, by_rank))
        largest = max(p.nbytes for p in MODELS[name]().parameters())
        if size == "5GB":
            assert max(map(sum, by_rank)) <= total / 2 + largest  # no rank holds the full model
        else:
            assert max(max(sizes) for sizes in by_rank) <= max(4000, largest)
    dist.run_ranks(load_all, 2, {"tp2": "pp2"}.get(mesh, "tp2"), str(tmp_path), names[:2], logits, timeout_s=TIMEOUT_S)


def save_plain(base):
    """One rank's view: files of a torch model, and errors on every rank."""
    torch.manual_seed(0)
    x = torch.randn(4, 8).double()
    pm = autopart.parallelize(Plain().double(), "tp2", example_args=(x,))
    pm.save_pretrained(f"{base}/plain")
    texts = []
    Path(base, "file").touch()
    for use in (
        lambda: pm.save_pretrained(f"{base}/file"),
        lambda: pm.save_pretrained(f"{base}/plain", state_dict=pm.state_dict()),
        lambda: pm.save_pretrained(f"{base}/plain", state_dict={}),
        lambda: pm.save_pretrained(f"{base}/plain", variant="fp16"),
        lambda: pm.save_pretrained(f"{base}/plain", max_shard_size="many"),
        lambda: pm.load_pretrained(f"{base}/none"),
    ):
        with pytest.raises(AutopartError) as error:
            use()
        texts.append((error.type, str(error.value).splitlines()[0].replace(base, ".")))
    pm.save_pretrained(f"{base}/plain", max_shard_size=100)  # other files in the place of the first
    full = pm.full_state_dict()
    other = autopart.parallelize(Plain().double(), "tp2", example_args=(x,), weights=f"{base}/plain")
    torch.testing.assert_close(other(x), pm(x))
    return full, texts


@pytest.mark.large
def test_a_model_of_torch_alone(tmp_path):
    (full, texts), _ = dist.run_ranks(save_plain, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert texts == [
        (CheckpointError, "cannot write to ./file"),
        (UsageError, "save_pretrained(state_dict=...) needs full tensors"),
        (UsageError, "save_pretrained(state_dict=...) needs a model that has this method"),
        (UsageError, "save_pretrained(variant=...) does not work for a partitioned model"),
        (OptionError, "max_shard_size='many' is not a size"),
        (CheckpointError, "there is no checkpoint at ./none"),
    ]
    saved = {}
    for file in (tmp_path / "plain").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            saved |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert saved.keys() == {"up.weight", "down.weight", "down.bias", "scale"}
    assert all(torch.equal(value, full[name]) for name, value in saved.items())
    assert not (tmp_path / "plain" / "config.json").exists()
    shutil.rmtree(tmp_path / "plain")


def test_tensors_are_divided_over_files():
    tensors = [SavedTensor(str(index), size, None) for index, size in enumerate((4, 4, 9, 1, 1))]
    assert [[one.size_bytes for one in file] for file in files_of(tensors, 8)] == [[4, 4], [9], [1, 1]]
    assert files_of([], 8) == []
    assert [parse_size(size) for size in (7, "5GB", "1.5 KB", "2MiB")] == [7, 5 * 10**9, 1500, 2 * 2**20]


@pytest.mark.large
def test_one_process_writes_one_file(tmp_path):
    pm = autopart.parallelize(cases.gpt2(), "tp1", example_kwargs=cases.batch())
    pm.save_pretrained(tmp_path, is_main_process=True, save_function=torch.save)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == cases.gpt2().num_parameters()

"""Files of saves, in one process: the commands, conversion, and indexes with hostile or edited contents."""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemReader

import autopart
from autopart.cli.main import main
from autopart.errors import CheckpointError
from autopart.runtime.saves.checkpoint_index import digest_problems, read_index, size_problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of one rank, saved in the background."""
    folder = tmp_path_factory.mktemp("run")
    pm, optimizer = run()
    step(pm, optimizer)
    pm.save(folder, optimizer=optimizer, wait=False).wait()
    step(pm, optimizer)
    pm.save(folder, optimizer=optimizer)
    return folder


def run() -> tuple[Any, Any]:
    model, batch = zoo.gpt2(num_layers=1, hidden=16, heads=2, vocab=16, rows=2, seq=4)
    pm = autopart.parallelize(model, "tp1", example_kwargs=batch)
    return pm, torch.optim.AdamW(pm.parameters(), lr=1e-2)


def step(pm: Any, optimizer: Any) -> float:
    loss = pm.step(input_ids=torch.arange(8).view(2, 4), labels=torch.arange(8).view(2, 4))
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def told(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_commands(saved, tmp_path):
    text = told("ls", saved)
    assert text.startswith("step-00000001  step 1, GPT2LMHeadModel saved on tp1, ") and "step-00000002" in text
    assert "optimizers AdamW" in told("show", saved) and "step 2" in told("show", saved)
    assert "  model.lm_head.weight  is model.transformer.wte.weight" in told("show", saved, "--tensors")
    assert "all checksums equal" in told("verify", saved / "step-00000001")
    assert json.loads(told("ls", saved, "--json"))["saves"][1]["samples"] == 4
    assert "there is no folder" in told("ls", tmp_path / "none", code=2)
    (tmp_path / ".step-00000001.0123456789abcdef.part").mkdir()
    assert "its save was interrupted" in told("ls", tmp_path, code=1)
    assert "no complete save" in told("show", tmp_path, code=2)


def test_a_resumed_run_of_one_rank_continues_bit_for_bit(saved):
    pm, optimizer = run()
    first = step(pm, optimizer)
    assert pm.load(saved, "step-00000001", optimizer=optimizer).samples == 2
    again = step(pm, optimizer)
    other, other_optimizer = run()
    assert [step(other, other_optimizer) for _ in range(2)] == [first, again]
    pm.load(saved, "latest", optimizer=optimizer)
    assert step(pm, optimizer) == step(other, other_optimizer)


def test_conversion_to_the_format_of_transformers_and_back(saved, tmp_path):
    from transformers import GPT2LMHeadModel

    assert "wrote" in told("convert", saved, tmp_path / "tuned")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "tuned", dtype="auto")
    pm, optimizer = run()
    pm.load(saved, "latest")
    full = pm.full_state_dict()
    assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())

    torch.save(model.state_dict(), tmp_path / "model.pt")
    for source in (tmp_path / "tuned", tmp_path / "model.pt"):
        step(pm, optimizer)
        told("convert", source, tmp_path / "run")
        assert pm.load(tmp_path / "run", "latest").step == 0
        assert all(torch.equal(value, full[name]) for name, value in pm.full_state_dict().items())
    torch.save(model, tmp_path / "whole.pt")
    assert "nothing else is unpickled" in " ".join(told("convert", tmp_path / "whole.pt", tmp_path, code=2).split())


def test_torch_reads_a_save(saved):
    """Under both names of a tied parameter."""
    import torch.distributed.checkpoint as dcp

    model, _ = zoo.gpt2(num_layers=1, hidden=16, heads=2, vocab=16, rows=2, seq=4)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved / "step-00000002", no_dist=True)
    pm, _ = run()
    pm.load(saved, "latest")
    assert all(torch.equal(value, pm.full_state_dict()[name]) for name, value in state["model"].items())
    assert "model.lm_head.weight" in FileSystemReader(saved / "step-00000002").read_metadata().state_dict_metadata


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy of an index with one entry that is gone, or has another value."""
    data = copy.deepcopy(data)
    inner = data
    while True:
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or rng.random() < 0.1:
            break
        inner = inner[key]
    values = [None, -1, 10**30, 2.5, True, "", "../x", "\x1b[31m", [], {}, [1] * 100, [[[]]], 0, 1, "float32"]
    if rng.random() < 0.2:
        del inner[key]
    else:
        inner[key] = rng.choice(values)
    return data


@pytest.mark.parametrize("seed", range(4))
def test_an_edited_index_is_refused_or_harmless(saved, tmp_path, seed):
    """Never an error of another library, and never other values."""
    rng, folder = random.Random(seed), saved / "step-00000002"
    data = json.loads((folder / "index.json").read_text())
    pm, _ = run()
    pm.load(folder)
    expected = {name: value.clone() for name, value in pm.full_state_dict().items()}
    for file in folder.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "index.json").unlink()
    refused = 0
    for _ in range(40):
        (tmp_path / "index.json").write_text(json.dumps(mutated(data, rng)))
        try:
            pm.load(tmp_path)
            list(digest_problems(tmp_path, read_index(tmp_path)))
        except CheckpointError as error:
            refused += 1
            assert all(line.isprintable() for line in str(error).splitlines()), repr(str(error))
        assert all(torch.equal(value, expected[name]) for name, value in pm.full_state_dict().items())
    assert refused > 20


def test_nothing_is_unpickled(saved, tmp_path):
    """A save whose other values are a pickle that would run code."""
    for file in (saved / "step-00000002").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    class Evil:
        def __reduce__(self) -> Any:
            return sys.exit, (7,)

    torch.save({"model": Evil()}, tmp_path / "state.pt")
    content = (tmp_path / "state.pt").read_bytes()
    from autopart.runtime.saves.checkpoint_index import digest_of

    data = json.loads((tmp_path / "index.json").read_text())
    data["files"]["state.pt"] = {"name": "state.pt", "size_bytes": len(content), "digest": digest_of(content)}
    (tmp_path / "index.json").write_text(json.dumps(data))
    (tmp_path / ".metadata").write_bytes(b"cos\nabort\n(tR.")  # DCP's own metadata is not read
    pm, _ = run()
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read"):
        pm.load(tmp_path)


def test_missing_bytes_are_found(saved, tmp_path):
    for file in (saved / "step-00000002").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = size_problems(tmp_path, read_index(tmp_path))
    assert problem.startswith("__0_0.distcp has ") and "is damaged" in told("verify", tmp_path, code=1)

"""`pm.save` and `pm.load`: a run that is resumed continues as if it had not been interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dist
import pytest
import torch
import zoo
from torch import Tensor

import autopart
from autopart.errors import CheckpointError
from autopart.runtime.saves.checkpoint_index import digest_problems, read_index

TIMEOUT_S = 180.0


def batches(vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (4, 8), generator=generator) for _ in range(8)]


def run_of(mesh: str, **options: Any) -> tuple[Any, Any, Any]:
    """A GPT-2 with dropout, its optimizer and scheduler."""
    model, batch = zoo.gpt2(num_layers=2, hidden=32, heads=4, rows=4, seq=8)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    pm = autopart.parallelize(model.train(), mesh, example_kwargs=batch, **options)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    return pm, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(pm: Any, optimizer: Any, scheduler: Any, first: int, last: int) -> list[float]:
    losses = []
    for ids in batches(64)[first:last]:
        losses.append(float(pm.step(input_ids=ids, labels=ids)))
        pm.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def values_of(pm: Any, optimizer: Any) -> dict[str, Tensor]:
    full = pm.full_optimizer_state_dict(optimizer)["state"]
    moments = {f"{name}.{key}": value for name, values in full.items() for key, value in values.items()}
    return {**pm.full_state_dict(), **moments}


def same_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


def resumes(mesh: str, options: dict[str, Any], other: str, other_options: dict[str, Any], folder: str) -> None:
    pm, optimizer, scheduler = run_of(mesh, **options)
    train(pm, optimizer, scheduler, 0, 2)
    saving = pm.save(folder, optimizer=optimizer, scheduler=scheduler, extra={"epoch": 1}, wait=False)
    saved = values_of(pm, optimizer)
    expected = train(pm, optimizer, scheduler, 2, 4)
    final = values_of(pm, optimizer)
    assert saving.wait() == Path(folder, "step-00000002")
    torch.manual_seed(7)

    pm, optimizer, scheduler = run_of(mesh, **options)
    train(pm, optimizer, scheduler, 4, 5)
    resumed = pm.load(folder, "latest", optimizer=optimizer, scheduler=scheduler)
    assert (resumed.step, resumed.samples, resumed.extra) == (2, 8, {"epoch": 1})
    same_values(values_of(pm, optimizer), saved)
    assert train(pm, optimizer, scheduler, 2, 4) == expected
    same_values(values_of(pm, optimizer), final)

    pm, optimizer, scheduler = run_of(other, **other_options)
    pm.load(folder, "latest", optimizer=optimizer, scheduler=scheduler)
    same_values(values_of(pm, optimizer), saved)
    losses = train(pm, optimizer, scheduler, 2, 4)
    if options.get("rng") == other_options.get("rng") == "exact":
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5)
    assert scheduler.last_epoch == 4


@pytest.mark.parametrize(("mesh", "options", "other", "other_options"), [
    ("tp2", {"rng": "exact"}, "pp2", {"rng": "exact"}),
    ("dp2", {"zero": 3}, "tp2", {}),
    ("pp2", {}, "dp2", {"zero": 1}),
], ids=str)  # fmt: skip
def test_a_resumed_run_continues_bit_for_bit(tmp_path, mesh, options, other, other_options):
    dist.run_ranks(resumes, 2, mesh, options, other, other_options, str(tmp_path), timeout_s=TIMEOUT_S)


# --- Faults


def small(mesh: str, hidden: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 6)).to(dtype)
    pm = autopart.parallelize(model, mesh, example_args=(torch.ones(4, 6, dtype=dtype),))
    return pm, torch.optim.Adam(pm.parameters())


def small_step(pm: Any, optimizer: Any) -> None:
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) / 24
    pm.step(x, loss_fn=torch.nn.MSELoss(), target=x)
    optimizer.step()
    optimizer.zero_grad()


def refused(pm: Any, optimizer: Any, folder: Path, *texts: str, scheduler: Any = None) -> None:
    """Loading raises an error with these texts on this rank, and changes nothing."""
    before = {name: value.clone() for name, value in values_of(pm, optimizer).items()}
    with pytest.raises(CheckpointError) as caught:
        pm.load(folder, optimizer=optimizer, scheduler=scheduler)
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    same_values(values_of(pm, optimizer), before)


def edited(folder: Path, name: str, change: Callable[[Path], None]) -> Path:
    """A copy of a save that the first rank changes."""
    copy = folder.parent / name
    if torch.distributed.get_rank() == 0:
        shutil.copytree(folder, copy)
        change(copy)
    torch.distributed.barrier()
    return copy


def flip(folder: Path) -> None:
    """Change one byte of the largest tensor."""
    entry = read_index(folder).entries["model.0.weight"]
    chunk = entry.chunks[-1]
    data = bytearray((folder / chunk.file).read_bytes())
    data[chunk.offset + chunk.length // 2] ^= 1
    (folder / chunk.file).write_bytes(data)


def cut(folder: Path) -> None:
    file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])


def refuses(folder: str) -> None:
    pm, optimizer = small("tp2")
    small_step(pm, optimizer)
    saved = pm.save(folder, optimizer=optimizer).folder
    bad = edited(saved, "flipped", flip)
    refused(
        pm, optimizer, bad, "cannot load", "nothing was changed", "'model.0.weight' has changed since it was written"
    )
    assert list(digest_problems(bad, read_index(bad))) == [
        "'model.0.weight' has changed since it was written (in "
        f"{read_index(bad).entries['model.0.weight'].chunks[-1].file})"
    ]
    refused(pm, optimizer, edited(saved, "cut", cut), "bytes, and", "were written")
    refused(pm, optimizer, edited(saved, "gone", lambda at: (at / "index.json").unlink()), "has no index.json")
    refused(
        pm, optimizer, edited(saved, "lost", lambda at: (at / "state.pt").unlink()), "state.pt cannot be read: No such"
    )
    refused(pm, torch.optim.SGD(pm.parameters()), saved, "the save has optimizer Adam, and SGD is to be loaded")
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    refused(pm, optimizer, saved, "the save has scheduler none, and ConstantLR is to be loaded", scheduler=scheduler)
    refused(pm, torch.optim.Adam([next(pm.parameters())]), saved, "the optimizer lacks '2.bias', which was saved")

    wider, with_wider = small("tp2", hidden=8)
    small_step(wider, with_wider)
    refused(wider, with_wider, saved, "3 differences", "'0.weight' has shape [6, 6] in the save, [8, 6] in the model")
    single, of_single = small("tp2", dtype=torch.float32)
    refused(single, of_single, saved, "'0.weight' has dtype float64 in the save, float32 in the model")
    with pytest.raises(CheckpointError, match="'extra' cannot be saved"):
        pm.save(folder, optimizer=optimizer, extra={"what": Path()})


def keeps_complete_ones(folder: str) -> None:
    pm, optimizer = small("dp2")
    assert pm.load(folder, "latest", missing_ok=True).step == 0
    with pytest.raises(CheckpointError, match="has no complete save"):
        pm.load(folder, "latest")
    for step in range(1, 4):
        small_step(pm, optimizer)
        pm.save(folder, optimizer=optimizer, keep=2, wait=step == 2)
    assert pm.save(folder, optimizer=optimizer, keep=2).folder.name == "step-00000003.1"
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == ["step-00000003", "step-00000003.1"], names
    torch.distributed.barrier()

    with pytest.raises(CheckpointError) as caught, failing_writes(on_rank=1):
        pm.save(folder, optimizer=optimizer, keep=1)
    text = str(caught.value)
    assert "rank 1: No space left" in text and "earlier saves are unchanged" in text, text
    with failing_writes(on_rank=1):
        pm.save(folder, optimizer=optimizer, wait=False)
        with pytest.raises(CheckpointError, match="No space left"):
            pm.save(folder, optimizer=optimizer)  # waits for the one before
    torch.distributed.barrier()  # the first rank deletes what was written
    assert sorted(path.name for path in Path(folder).iterdir()) == names
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        Path(folder, "step-00000009").mkdir()
        Path(folder, ".step-00000010.0123456789abcdef.part").mkdir()
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        assert pm.load(folder, "latest", optimizer=optimizer).folder == Path(folder, "step-00000003.1")
    texts = [str(one.message) for one in caught_warnings if "skipped the save" in str(one.message)]
    assert len(texts) == (2 if torch.distributed.get_rank() == 0 else 0), texts
    pm.save(folder, optimizer=optimizer, keep=1)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-00000003.2", "step-00000009"]


class failing_writes:
    """Make every write of tensors fail on one rank, as on a full disk."""

    def __init__(self, on_rank: int):
        self.fails = torch.distributed.get_rank() == on_rank

    def __enter__(self) -> None:
        from torch.distributed.checkpoint import filesystem

        self.module, self.write = filesystem, filesystem._write_item

        def write(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        if self.fails:
            filesystem._write_item = write

    def __exit__(self, *args: object) -> None:
        self.module._write_item = self.write


def test_a_save_that_does_not_fit_is_refused_before_anything_changes(tmp_path):
    dist.run_ranks(refuses, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def test_an_interrupted_save_costs_no_earlier_one(tmp_path):
    dist.run_ranks(keeps_complete_ones, 2, str(tmp_path / "run"), timeout_s=TIMEOUT_S)


def killed_in_a_save(folder: str) -> None:
    """Rank 1 is killed while its third save is being written."""
    pm, optimizer = small("tp2")
    for step in range(1, 4):
        small_step(pm, optimizer)
        if step == 3 and torch.distributed.get_rank() == 1:
            from autopart.runtime.saves.chunk_storage import IndexedWriter

            IndexedWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        saving = pm.save(folder, optimizer=optimizer, wait=False, keep=1)
    with pytest.raises(CheckpointError, match="another rank has ended, or does not answer"):
        saving.wait()


@pytest.mark.large
def test_a_kill_in_a_save_costs_no_earlier_one(tmp_path):
    with pytest.raises(dist.RankError) as caught:
        dist.run_ranks(killed_in_a_save, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert list(caught.value.errors) == [1] and "exit code -9" in caught.value.traceback
    (complete,) = [path for path in tmp_path.iterdir() if path.name.startswith("step-")]
    assert complete.name == "step-00000002" and not list(digest_problems(complete, read_index(complete)))
    pm, optimizer = small("tp1")
    assert pm.load(tmp_path, "latest", optimizer=optimizer).step == 2


# --- Other optimizers, precisions and methods


def other_run(kind: str, mesh: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model, batch = zoo.gpt2(num_layers=2, hidden=32, heads=4, rows=8, seq=8)
    options = {"fp16": {"precision": "fp16"}, "top-k": {"dp_sync": "top_k:0.1"}, "local": {"dp_sync": "local:3"}}
    pm = autopart.parallelize(model.train(), mesh, example_kwargs=batch, **options.get(kind, {}))
    if kind == "Muon":
        optimizer = pm.optimizer(torch.optim.Muon, lr=0.02, others=torch.optim.AdamW)
        return pm, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if kind == "two":
        named = list(pm.named_parameters())
        parts = [p for n, p in named if "mlp" in n], [p for n, p in named if "mlp" not in n]
        optimizers = [torch.optim.SGD(parts[0], lr=0.1, momentum=0.9), torch.optim.Adam(parts[1], foreach=True)]
        return pm, optimizers, [torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0) for one in optimizers]
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    pm.attach(optimizer)
    return pm, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)


def other_train(pm: Any, optimizer: Any, scheduler: Any, first: int, last: int) -> list[float]:
    losses = []
    for ids in batches(64)[first:last]:
        ids = torch.cat([ids, ids.flip(1)])
        losses.append(float(pm.step(input_ids=ids, labels=ids)))
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
            one.zero_grad()
        for one in scheduler if isinstance(scheduler, list) else [scheduler]:
            one.step(*([losses[-1]] if isinstance(scheduler, list) else []))
    return losses


def others_resume(kind: str, mesh: str, folder: str) -> None:
    pm, optimizer, scheduler = other_run(kind, mesh)
    other_train(pm, optimizer, scheduler, 0, 2)
    saving = pm.save(folder, optimizer=optimizer, scheduler=scheduler, wait=False)
    scale = pm.loss_scale
    expected = other_train(pm, optimizer, scheduler, 2, 6)
    weights = {name: value.clone() for name, value in pm.full_state_dict().items()}
    saving.wait()
    pm, optimizer, scheduler = other_run(kind, mesh)
    other_train(pm, optimizer, scheduler, 4, 5)
    pm.load(folder, "latest", optimizer=optimizer, scheduler=scheduler)
    assert pm.loss_scale == scale
    assert other_train(pm, optimizer, scheduler, 2, 6) == expected, kind
    same_values(pm.full_state_dict(), weights)
    if kind == "local":  # without the method, all ranks continue from the mean of the data ranks
        expected = pm.load(folder, "latest", optimizer=optimizer, scheduler=scheduler) and pm.full_state_dict()
        pm, optimizer, scheduler = other_run("", "tp2")
        pm.load(folder, "latest", optimizer=optimizer, scheduler=scheduler)
        same_values(pm.full_state_dict(), expected)
        other_train(pm, optimizer, scheduler, 2, 3)


@pytest.mark.large
@pytest.mark.parametrize(("kind", "mesh"), [
    ("Muon", "tp2"), ("Muon", "pp2,tp2"), ("two", "pp2"), ("fp16", "dp2"), ("top-k", "dp2"), ("local", "dp2"),
], ids=str)  # fmt: skip
def test_other_optimizers_precisions_and_methods_continue_bit_for_bit(tmp_path, kind, mesh):
    num_ranks = autopart.Mesh.parse(mesh).num_ranks
    dist.run_ranks(others_resume, num_ranks, kind, mesh, str(tmp_path), timeout_s=TIMEOUT_S)

"""Optimizer state of a partitioned model: by torch's distributed checkpoint and whole by names, on any mesh."""

from __future__ import annotations

import copy
from typing import Any

import checkpoint_models
import dist
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import BUILD, TIMEOUT_S, other_weights, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from autopart.errors import CheckpointError
from autopart.runtime.checkpoint.saved_shard import ShardTensor

FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices alone, as is usual."""
    named = dict(module.named_parameters())
    matrices = [p for p in named.values() if p.dim() > 1]
    vectors = [p for p in named.values() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        if hasattr(module, "full_grads"):
            module.step(**batch)
        else:
            out = module(**batch)
            (out if isinstance(out, Tensor) else out.loss).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9


def one_process(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, batch = BUILD[name]()
    optimizer = adamw(model)
    train(model, optimizer, batch, steps)
    return model, optimizer


def made(name: str, mesh: str, options: dict[str, Any], changed: bool = False) -> tuple[Any, Any, dict[str, Tensor]]:
    pm, batch = checkpoint_models.make(name, mesh, changed=changed, **options)
    return pm, adamw(pm), batch


def near(found: Any, expected: Any, where: str = "", tolerance: float = 1e-10) -> None:
    """The same keys and values, numbers and tensors within `tolerance`."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), (where, set(found) ^ set(expected))
        for key in expected:
            near(found[key], expected[key], f"{where}.{key}", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            near(*pair, f"{where}.{index}", tolerance)
    elif isinstance(expected, Tensor):
        assert type(found) is Tensor and found.shape == expected.shape and found.dtype == expected.dtype, where
        assert (found - expected).abs().max() <= tolerance, where
    else:
        assert found == expected, where


# --- on another mesh -------------------------------------------------------------------------------------------------


def save(name: str, mesh: str, options: dict[str, Any], path: str, flat: bool) -> dict[str, Any]:
    """Two steps, then a checkpoint. Returns what it should hold."""
    pm, optimizer, batch = made(name, mesh, options)
    train(pm, optimizer, batch, steps=2)
    full = pm.full_optimizer_state_dict(optimizer)
    model, reference = one_process(name, steps=2)
    near(full, get_optimizer_state_dict(model, reference, options=FULL))
    weights, state = get_state_dict(pm, optimizer, options=FLAT if flat else None)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    return {"weights": pm.full_state_dict(), "state": full}


def resumed(name: str, pm: Any, optimizer: Any, batch: Any, saved: dict[str, Any]) -> None:
    """What was saved is there, bit for bit, and two more steps go as those of one process."""
    same(pm.full_state_dict(), saved["weights"])
    near(pm.full_optimizer_state_dict(optimizer), saved["state"], tolerance=0.0)
    train(pm, optimizer, batch, steps=2)
    model, reference = one_process(name, steps=4)
    near(pm.full_state_dict(), dict(model.state_dict()))
    near(pm.full_optimizer_state_dict(optimizer), get_optimizer_state_dict(model, reference, options=FULL))


def load(name: str, mesh: str, options: dict[str, Any], path: str, flat: bool, saved: dict[str, Any]) -> None:
    pm, optimizer, batch = made(name, mesh, options, changed=True)
    weights, state = get_state_dict(pm, optimizer, options=FLAT if flat else None)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    chosen = {"options": FLAT} if flat else {}
    set_state_dict(pm, optimizer, model_state_dict=weights, optim_state_dict=state, **chosen)
    resumed(name, pm, optimizer, batch, saved)

    pm, optimizer, batch = made(name, mesh, options, changed=True)
    pm.load_state_dict(saved["weights"])
    pm.load_full_optimizer_state_dict(optimizer, saved["state"])
    resumed(name, pm, optimizer, batch, saved)


def load_plain(name: str, path: str, flat: bool, saved: dict[str, Any]) -> None:
    """In one process, without autopart."""
    model, batch = BUILD[name]()
    optimizer = adamw(other_weights(model))
    weights, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    chosen = {"options": FLAT} if flat else {}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, **chosen)
    same(model.state_dict(), saved["weights"])
    near(get_optimizer_state_dict(model, optimizer, options=FULL), saved["state"], tolerance=0.0)
    train(model, optimizer, batch, steps=2)
    near(dict(model.state_dict()), dict(one_process(name, steps=4)[0].state_dict()))


@pytest.mark.large
@pytest.mark.parametrize(("name", "first", "second", "flat"), [
    ("tied", ("tp2", {}), ("pp2", {}), False),
    ("tied", ("pp2", {}), ("tp2", {}), False),
    ("tied", ("pp2", {}), ("pp2", {}), True),
    ("tied", ("dp2", {"zero": 3}), ("tp2", {}), False),
    ("gpt2", ("tp2", {}), ("pp2", {}), False),
], ids=str)  # fmt: skip
def test_training_goes_on_on_another_mesh_and_in_one_process(tmp_path, name, first, second, flat):
    saved = dist.run_ranks(save, 2, name, *first, str(tmp_path), flat, timeout_s=TIMEOUT_S)[0]
    load_plain(name, str(tmp_path), flat, saved)
    dist.run_ranks(load, 2, name, *second, str(tmp_path), flat, saved, timeout_s=TIMEOUT_S)


# --- on the same mesh ------------------------------------------------------------------------------------------------


def files_of_each_rank(mesh: str, folder: str) -> None:
    """`torch.save` and `torch.load` of what each rank has, as with an unpartitioned model."""
    pm, optimizer, batch = made("tied", mesh, {})
    train(pm, optimizer, batch, steps=2)
    path = f"{folder}/{torch.distributed.get_rank()}.pt"
    torch.save((pm.state_dict(), optimizer.state_dict()), path)
    saved = {"weights": pm.full_state_dict(), "state": pm.full_optimizer_state_dict(optimizer)}
    pm, optimizer, batch = made("tied", mesh, {}, changed=True)
    weights, state = torch.load(path, weights_only=True)
    pm.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert {type(value) for values in optimizer.state.values() for value in values.values()} == {Tensor}
    resumed("tied", pm, optimizer, batch, saved)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_files_of_each_rank_are_loaded_on_the_same_mesh(tmp_path, mesh):
    dist.run_ranks(files_of_each_rank, 2, mesh, str(tmp_path), timeout_s=TIMEOUT_S)


def copies(mesh: str) -> None:
    """Moving averages and optimizers that are copied are saved as rightly as the first."""
    pm, optimizer, batch = made("tied", mesh, {})
    train(pm, optimizer, batch, steps=1)
    other, other_optimizer = copy.deepcopy((pm, optimizer))
    assert other_optimizer.param_groups[0]["params"][0] is next(p for p in other.parameters() if p.dim() > 1)
    for one, two in ((pm.state_dict(), other.state_dict()), (optimizer.state_dict(), other_optimizer.state_dict())):
        flat, flat_copy = (torch.utils._pytree.tree_leaves(tree) for tree in (one, two))
        assert [type(value) for value in flat] == [type(value) for value in flat_copy]
        assert any(isinstance(value, ShardTensor) for value in flat)
        assert [v.place for v in flat if isinstance(v, ShardTensor)] == [
            v.place for v in flat_copy if isinstance(v, ShardTensor)
        ]


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_copies_have_their_places(mesh):
    dist.run_ranks(copies, 2, mesh, timeout_s=TIMEOUT_S)


def numbered(mesh: str, path: str) -> None:
    """The first tensor of a fresh optimizer's state, without a step between loading and saving."""
    pm, optimizer, batch = made("tied", mesh, {})
    train(pm, optimizer, batch, steps=1)
    again = adamw(pm)
    again.load_state_dict(optimizer.state_dict())
    if "pp" in mesh:
        with pytest.raises(
            dcp.CheckpointException, match=r"exp_avg' would name different parameters on different ranks"
        ):
            dcp.save({"optimizer": again.state_dict()}, checkpoint_id=path)
        return
    dcp.save({"optimizer": again.state_dict()}, checkpoint_id=path)
    _, reference = one_process("tied", steps=1)
    expected = reference.state_dict()
    state = {"optimizer": other_state(reference).state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    near(state["optimizer"], expected)


def other_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with other values in its state."""
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] + 1.0
    return optimizer


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_a_state_dict_that_counts_parameters_is_saved_where_ranks_count_alike(tmp_path, mesh):
    """Without a pipeline all ranks count as one process does."""
    dist.run_ranks(numbered, 2, mesh, str(tmp_path), timeout_s=TIMEOUT_S)


# --- full_state_dict=True --------------------------------------------------------------------------------------------


def full_options(mesh: str) -> None:
    pm, optimizer, _ = made("tied", mesh, {})
    model, reference = one_process("tied", steps=2)
    weights, state = get_state_dict(model, reference, options=FULL)
    set_state_dict(pm, optimizer, model_state_dict=dict(weights), optim_state_dict=copy.deepcopy(state), options=FULL)
    same(pm.full_state_dict(), weights)
    near(pm.full_optimizer_state_dict(optimizer), state, tolerance=0.0)
    if "pp" in mesh:
        for take in (get_optimizer_state_dict, get_state_dict):
            with pytest.raises(CheckpointError, match="does not gather pipeline stages"):
                take(pm, optimizer, options=FULL)
        with pytest.raises(CheckpointError, match="does not gather pipeline stages"):
            get_model_state_dict(pm, options=FULL)
        return
    found, moments = get_state_dict(pm, optimizer, options=FULL)
    assert set(found) == set(weights)
    same({name: found[name] for name in weights}, weights)
    near(moments, state, tolerance=0.0)
    on_the_first = get_model_state_dict(pm, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert torch.distributed.get_rank() or set(on_the_first) == set(weights)


def from_the_first_rank(mesh: str) -> None:
    pm, optimizer, _ = made("quiet", mesh, {}, changed=True)
    model, reference = one_process("quiet", steps=2)
    weights, state = get_state_dict(model, reference, options=FULL)
    first = torch.distributed.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(pm, dict(weights) if first else {}, options=options)
    same(pm.full_state_dict(), weights)
    given = copy.deepcopy(state) if first else {}
    if "pp" in mesh and not first:
        with pytest.raises(CheckpointError, match="broadcast_from_rank0=True"):
            set_optimizer_state_dict(pm, optimizer, given, options=options)
        return
    set_optimizer_state_dict(pm, optimizer, given, options=options)
    if "pp" not in mesh:
        near(pm.full_optimizer_state_dict(optimizer), state, tolerance=0.0)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
@pytest.mark.parametrize("check", [full_options, from_the_first_rank])
def test_full_state_dicts_of_torch_are_taken_and_given_whole(check, mesh):
    dist.run_ranks(check, 2, mesh, timeout_s=TIMEOUT_S)


# --- what does not fit -----------------------------------------------------------------------------------------------


def what_does_not_fit() -> None:
    pm, optimizer, batch = made("tied", "tp2", {})
    train(pm, optimizer, batch, steps=1)
    full = pm.full_optimizer_state_dict(optimizer)

    def refused(change: Any, text: str) -> None:
        changed = copy.deepcopy(full)
        change(changed)
        with pytest.raises(CheckpointError) as raised:
            pm.load_full_optimizer_state_dict(optimizer, changed)
        assert text in str(raised.value), raised.value

    refused(lambda f: f.pop("state"), "this is not a full optimizer state")
    refused(lambda f: f["state"].update({"up.wait": {}}), "the model has no parameter 'up.wait'")
    refused(lambda f: f["param_groups"][0]["params"].remove("up.weight"), "does not have 'up.weight'")
    refused(lambda f: f["param_groups"][1]["params"].append(f["param_groups"][0]["params"].pop()), "are in groups 0, 1")
    wrong = {"exp_avg": torch.zeros(3, 3)}
    refused(lambda f: f["state"].update({"up.weight": wrong}), "'up.weight (exp_avg)' has shape (3, 3)")
    refused(lambda f: f.update(state={0: {}}), "this optimizer state is keyed by parameter index")
    near(pm.full_optimizer_state_dict(optimizer), full, tolerance=0.0)

    other = torch.optim.SGD([*pm.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"a parameter of shape \(2,\) that does not belong to this module"):
        pm.full_optimizer_state_dict(other)
    first = next(iter(optimizer.state.values()))
    first["row"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"'row' of .* cannot be gathered"):
        pm.full_optimizer_state_dict(optimizer)
    with pytest.raises(dcp.CheckpointException, match="has no known offsets in a checkpoint"):
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id="nowhere")


def test_states_that_do_not_fit_are_refused_in_words():
    dist.run_ranks(what_does_not_fit, 2, timeout_s=TIMEOUT_S)


def groups_of_some_stages() -> None:
    """A stage without matrices of its own makes no group for them."""
    pm, _, batch = made("tied", "pp2", {})
    kept = [p for p in pm.parameters() if p.dim() > 1 or torch.distributed.get_rank() == 0]
    rows = [{"params": [p for p in kept if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in kept if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW([row for row in rows if row["params"]], lr=1e-2)
    train(pm, optimizer, batch, steps=1)
    optimizer.param_groups[0]["lr"] = 0.01
    full = pm.full_optimizer_state_dict(optimizer)
    assert [group["weight_decay"] for group in full["param_groups"]] == [0.1, 0.0]
    pm.load_full_optimizer_state_dict(optimizer, full)
    with pytest.raises(CheckpointError, match="the optimizer's groups differ between pipeline stages"):
        get_optimizer_state_dict(pm, optimizer)


def test_groups_that_some_stages_do_not_have():
    dist.run_ranks(groups_of_some_stages, 2, timeout_s=TIMEOUT_S)

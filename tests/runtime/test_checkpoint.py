"""State dicts of weights: saved and loaded by torch's distributed checkpoint on any mesh, and by `load_state_dict`."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import dist
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import BUILD, TIMEOUT_S, gpt2, make, other_weights, same, tied
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from autopart.errors import CheckpointError, OptionError
from autopart.ir.layout import Placement
from autopart.ir.mesh import Mesh
from autopart.ir.program import StoredTensor
from autopart.runtime.checkpoint.saved_shard import ShardOffsets, ShardTensor, connect_checkpoints, shard_offsets_of
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.shards.shard_owners import ShardInfo

# --- distributed checkpoints -----------------------------------------------------------------------------------------


def save(name: str, mesh: str, path: str, options: dict[str, Any], how: str = "save") -> None:
    pm, _ = make(name, mesh, **options)
    state = {"model": pm.state_dict()}
    if how == "moved":
        state = {"model": {key: copy.deepcopy(value) for key, value in state["model"].items()}}
    if how == "async":
        dcp.async_save(state, checkpoint_id=path).result()
    elif how == "async with a writer":
        dcp.async_save(state, storage_writer=FileSystemWriter(path)).result()
    else:
        dcp.save(state, checkpoint_id=path)


def load(name: str, mesh: str, path: str, options: dict[str, Any]) -> None:
    pm, _ = make(name, mesh, changed=True, **options)
    state = {"model": pm.state_dict()}
    dcp.load(state, checkpoint_id=path)
    pm.load_state_dict(state["model"])
    same(pm.full_state_dict(), BUILD[name]()[0].state_dict())


def load_plain(name: str, path: Path) -> None:
    """Into the unpartitioned model."""
    model = other_weights(BUILD[name]()[0])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    same(model.state_dict(), BUILD[name]()[0].state_dict())


def everything_is_saved_once(path: Path, model: nn.Module) -> None:
    """Under the model's own names and shapes."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    expected = model.state_dict()
    extra = {"model._extra_state.version"} if "_extra_state" in expected else set()
    assert set(saved) == {f"model.{name}" for name, value in expected.items() if isinstance(value, Tensor)} | extra
    for name, value in expected.items():
        if isinstance(value, Tensor):
            entry = saved[f"model.{name}"]
            assert entry.size == value.shape
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == value.numel(), name


@pytest.mark.large
@pytest.mark.parametrize(("name", "first", "second", "how"), [
    ("tied", ("tp2", {}), ("pp2", {}), "save"),
    ("tied", ("pp2", {}), ("tp2", {}), "moved"),
    ("tied", ("dp2", {"zero": 3}), ("tp2", {}), "async with a writer"),
    ("gpt2", ("tp2", {}), ("dp2", {"zero": 3}), "async"),
    ("gpt2", ("pp2", {}), ("tp2", {}), "save"),
    ("gpt2", ("cp2", {"zero": 3}), ("dp2", {"zero": 1}), "save"),
], ids=str)  # fmt: skip
def test_a_checkpoint_is_loaded_on_another_mesh_and_in_one_process(tmp_path, name, first, second, how):
    dist.run_ranks(save, 2, name, first[0], str(tmp_path), first[1], how, timeout_s=TIMEOUT_S)
    everything_is_saved_once(tmp_path, BUILD[name]()[0])
    load_plain(name, tmp_path)
    dist.run_ranks(load, 2, name, second[0], str(tmp_path), second[1], timeout_s=TIMEOUT_S)
    dist.run_ranks(load, 2, name, first[0], str(tmp_path), first[1], timeout_s=TIMEOUT_S)


@pytest.mark.large
def test_a_checkpoint_of_the_plain_model_is_loaded_on_a_mesh_of_two_cuts(tmp_path):
    model, _ = tied()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    dist.run_ranks(load, 4, "tied", "dp2,tp2", str(tmp_path), {"zero": 3}, timeout_s=TIMEOUT_S)


def save_then_load_wrong(path: str) -> None:
    pm, _ = make("tied", "tp2")
    state = pm.state_dict()
    state["up.weight"] = ShardTensor(
        torch.zeros(1, 2), ShardOffsets("up.weight", (2, 2), (((pm.mesh.size("tp"), 1),), ((0, 2),)))
    )
    with pytest.raises(CheckpointException, match=r"'model.up.weight' has shape \(9, 6\), the model's \(2, 2\)"):
        dcp.load({"model": state}, checkpoint_id=path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    dcp.save({"model": tied()[0].state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    dist.run_ranks(save_then_load_wrong, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def in_safetensors(path: str) -> None:
    """What a rank has in one piece can be written so; a fused projection on tp2 cannot."""
    writer = dcp.HuggingFaceStorageWriter
    options: dict[str, Any] = {"save_distributed": True, "enable_consolidation": True}
    pm, _ = make("gpt2", "tp2")
    weights = {name: value for name, value in pm.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(
        CheckpointException, match=r"safetensors cannot hold '.*c_attn.*' as it is sharded on this mesh"
    ):
        dcp.save(weights, storage_writer=writer(path, **options))
    whole = {name: value for name, value in weights.items() if "c_attn" not in name}
    dcp.save(whole, storage_writer=writer(path, **options))


def test_a_tensor_in_pieces_is_not_written_to_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    dist.run_ranks(in_safetensors, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    expected = gpt2()[0].state_dict()
    (file,) = tmp_path.glob("*.safetensors")
    for name, value in safetensors.load_file(file).items():
        assert torch.equal(value, expected[name]), name


# --- where a shard lies ----------------------------------------------------------------------------------------------

LAYOUTS = [
    ("tp2", (10,), {"tp": "S(0; sections=6+2+2)"}),
    ("tp3", (7, 2), {"tp": "S(0)"}),
    ("tp4", (2, 3), {"tp": "S(0)"}),  # two ranks hold nothing
    ("dp2,tp2", (8, 6), {"dp": "S(1)", "tp": "S(0; sections=4+4)"}),
    ("dp2,tp2", (8, 6), {"dp": "S(0)", "tp": "S(0)"}),
    ("dp2,tp3", (12, 5), {"dp": "S(0; sections=4+8)", "tp": "S(0)"}),
    ("cp2,ep2", (10, 3), {"cp": "S(0)", "ep": "S(0)"}),  # three, three, three and one
    ("dp2,tp2", (), {}),
]


def homes(mesh: str, shape: tuple[int, ...], layout: dict[str, str]) -> list[ShardInfo]:
    """Where a parameter of this layout lies on every rank."""
    parsed = Mesh.parse(mesh)
    placements = {axis: Placement.parse(text) for axis, text in layout.items()}
    stored = StoredTensor("weight", shape, placements, stages=(0,), grad_axes=())
    return [
        ShardInfo("weight", stored, (0,), Process(parsed, rank, torch.device("cpu"), {}))
        for rank in range(parsed.num_ranks)
    ]


@pytest.mark.parametrize(("mesh", "shape", "layout"), LAYOUTS, ids=str)
def test_the_chunks_of_all_ranks_are_the_whole_tensor(mesh, shape, layout):
    full = torch.arange(math.prod(shape)).reshape(shape)
    rebuilt = torch.full(shape, -1)
    for home in homes(mesh, shape, layout):
        local = full
        for cut, index in home.local_splits:
            local = cut.take(local, index)
        shard = ShardTensor(local, shard_offsets_of(home))
        assert shard.place.local_shape == local.shape
        for chunk in shard.__create_chunk_list__():
            part = shard.__get_tensor_shard__(MetadataIndex("weight", chunk.offsets))
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(full[box], part)
            rebuilt[box] = part
    assert torch.equal(rebuilt, full)


def test_what_copies_a_shard_keeps_its_place_and_the_rest_is_plain():
    place = ShardOffsets("weight", (4, 2), (((0, 1), (2, 1)), ((0, 2),)))
    local = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    shard = ShardTensor(local, place)
    sent = io.BytesIO(ForkingPickler.dumps(shard))
    copies = [shard.clone(), shard.detach(), shard.cpu(), shard.double(), shard.to(torch.float16), copy.deepcopy(shard)]
    copies += [pickle.load(sent), shard * 0.5 + shard / 2]
    copies += [torch.zeros_like(shard).add_(shard)]
    for copied in copies:
        assert type(copied) is ShardTensor and copied.place == place
        assert torch.equal(copied.to_local().float(), local)
    plain = [shard.t(), shard.view(-1), shard[0], shard @ local, shard.sum(), torch.cat([shard, shard])]
    assert {type(result) for result in plain} == {Tensor}
    torch.testing.assert_close(shard, local)
    shard.mul_(2)
    assert local[1, 1] == 8.0, "it shares its memory"
    assert shard.numpy()[1, 1] == 8.0 and shard.tolist()[0] == [2.0, 4.0]
    assert repr(shard).endswith("'weight' of shape (4, 2))")


READ_WITHOUT_AUTOPART = """
import sys, torch
weight = torch.load(sys.argv[1], weights_only=True)["weight"]
assert type(weight) is torch.Tensor and weight.tolist() == [1.0, 3.0], weight
assert "autopart" not in sys.modules
"""


@pytest.mark.large
def test_a_file_of_shards_is_read_without_autopart_and_not_saved_as_whole(tmp_path):
    path = tmp_path / "rank0.pt"
    torch.save(
        {"weight": ShardTensor(torch.tensor([1.0, 3.0]), ShardOffsets("weight", (4,), (((0, 1), (2, 1)),)))}, path
    )
    subprocess.run([sys.executable, "-c", READ_WITHOUT_AUTOPART, str(path)], check=True, timeout=TIMEOUT_S)
    connect_checkpoints()
    with pytest.raises(CheckpointException, match="'weight' is one rank's shard of 'weight', and would be saved as if"):
        dcp.save(torch.load(path), checkpoint_id=tmp_path / "checkpoint", no_dist=True)


def parameters_themselves(path: str) -> None:
    pm, _ = make("tied", "tp2")
    with pytest.raises(CheckpointException, match=r"'embed.weight' is one rank's shard of"):
        dcp.save(dict(pm.named_parameters(remove_duplicate=False)), checkpoint_id=path)
    with pytest.raises(CheckpointException, match=r"'embed.weight' is one rank's shard of"):
        dcp.save(pm.state_dict(keep_vars=True), checkpoint_id=path)


def test_a_checkpoint_of_the_parameters_themselves_is_refused(tmp_path):
    dist.run_ranks(parameters_themselves, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def test_a_tensor_of_unknown_place_is_not_saved():
    shard = ShardTensor(torch.zeros(2, 1), ShardOffsets("weight", (4, 2), None))
    with pytest.raises(CheckpointError, match="has no known offsets in a checkpoint"):
        shard.__create_write_items__("weight", shard)


# --- load_state_dict -------------------------------------------------------------------------------------------------


def full_tensors(mesh: str) -> None:
    expected = other_weights(tied()[0])
    pm, _ = make("tied", mesh)
    result = pm.load_state_dict(expected.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    same(pm.full_state_dict(), expected.state_dict())
    assert {name: tuple(value.shape) for name, value in pm.state_dict().items() if isinstance(value, Tensor)} == {
        name: tuple(getattr(value, "to_local", lambda value=value: value)().shape)
        for name, value in [*pm.named_parameters(remove_duplicate=False), ("scale", pm.scale)]
    }
    around = nn.ModuleDict({"inner": pm})
    around.load_state_dict({f"inner.{name}": value for name, value in tied()[0].state_dict().items()})
    same(pm.full_state_dict(), tied()[0].state_dict())
    assert any(isinstance(value, ShardTensor) for value in around.state_dict().values())


def wrong_names(mesh: str) -> None:
    pm, _ = make("tied", mesh)
    weights = {**tied()[0].state_dict(), "up.extra": torch.zeros(1)}
    del weights["down.bias"], weights["embed.weight"], weights["_extra_state"]
    result = pm.load_state_dict(weights, strict=False)
    assert sorted(result.missing_keys) == ["_extra_state", "down.bias", "embed.weight"]
    assert result.unexpected_keys == ["up.extra"]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "up.extra"') as raised:
        pm.load_state_dict(weights)
    assert all(f'"{name}"' in str(raised.value) for name in ("down.bias", "embed.weight"))
    weights = {**tied()[0].state_dict(), "up.weight": torch.zeros(3, 6), "head.weight": torch.zeros(2)}
    with pytest.raises(RuntimeError) as raised:
        pm.load_state_dict(weights)
    for text in ("'up.weight' has shape (3, 6)", "(9, 6)", "'head.weight' has shape (2,)", "(14, 6)"):
        assert text in str(raised.value), text
    with pytest.raises(OptionError, match="assign=True"):
        pm.load_state_dict(tied()[0].state_dict(), assign=True)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_full_tensors_are_loaded_under_the_models_own_names(mesh):
    dist.run_ranks(full_tensors, 2, mesh, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_names_and_shapes_that_do_not_fit_are_told(mesh):
    dist.run_ranks(wrong_names, 2, mesh, timeout_s=TIMEOUT_S)


def other_ranks_file(folder: str) -> None:
    pm, _ = make("tied", "tp2")
    rank = torch.distributed.get_rank()
    torch.save(pm.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    own, other = torch.load(f"{folder}/{rank}.pt"), torch.load(f"{folder}/{1 - rank}.pt")
    pm.load_state_dict(own)
    with pytest.raises(RuntimeError, match=r"'head.weight' in the state dict is not the shard that this rank holds"):
        pm.load_state_dict({**own, "head.weight": other["head.weight"]})


def test_another_ranks_shard_is_refused(tmp_path):
    dist.run_ranks(other_ranks_file, 2, str(tmp_path), timeout_s=TIMEOUT_S)

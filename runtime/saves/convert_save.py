"""Conversion of saves to safetensors files in the format of transformers, and of weights to saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopart.common.files import write_whole
from autopart.errors import CheckpointError
from autopart.plans.rank_digest import autopart_version
from autopart.runtime.checkpoint.pretrained_folder import SavedTensor, files_of, write_file, write_index
from autopart.runtime.checkpoint.saved_shard import connect_checkpoints
from autopart.runtime.saves.checkpoint_index import CONFIG_FILE, STATE_FILE, CheckpointIndex, read_file, read_index
from autopart.runtime.saves.step_folders import commit, new_names
from autopart.runtime.saves.training_state import MODEL, VALUES, packed
from autopart.runtime.weights.safetensors_files import SINGLE, SafetensorsFiles

FILE_BYTES = 5 * 10**9
WRAPPED_IN = ("model", "state_dict", "model_state_dict")


def to_safetensors(folder: Path, target: Path) -> int:
    """Write the weights of a save as a folder that `from_pretrained` loads. Return the number of tensors.

    Raises CheckpointError for bytes that have changed.
    """
    from autopart.runtime.saves.chunk_storage import read_shards

    index = read_index(folder)
    entries = {name: entry for name, entry in index.entries.items() if name.startswith(MODEL)}
    tensors = [SavedTensor(name, entry.size_bytes, None) for name, entry in entries.items()]
    files = files_of(tensors, FILE_BYTES)
    target.mkdir(parents=True, exist_ok=True)
    placed: dict[str, str] = {}
    names = []
    for number, file in enumerate(files, start=1):
        names.append(SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors")
        values: dict[str, Tensor] = {}
        for one in file:
            values[one.name] = torch.empty(entries[one.name].shape, dtype=getattr(torch, entries[one.name].dtype))
        read_shards(folder, index, values)
        write_file({name[len(MODEL) :]: value for name, value in values.items()}, target / names[-1])
        placed |= {name[len(MODEL) :]: names[-1] for name in values}
    write_index(target, names, placed, sum(one.size_bytes for one in tensors))
    if CONFIG_FILE in index.files:
        write_whole(target / CONFIG_FILE, read_file(folder, index.files[CONFIG_FILE]).decode())
    return len(entries)


def to_save(source: Path, parent: Path) -> tuple[Path, int]:
    """Write weights as a save of step 0. Return its folder and the number of tensors.

    Args:
        source: a folder or file of safetensors, or a file of `torch.save` with a state dict.
        parent: the folder in which the save is created.
    """
    from autopart.runtime.saves.chunk_storage import IndexedWriter, write_shards

    is_pickled = source.is_file() and source.suffix not in (".safetensors", ".json")
    weights, config = (_of_torch(source), None) if is_pickled else _of_safetensors(source)
    unique: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    aliases = {}
    for name, value in weights.items():
        key = value.data_ptr(), value.shape, value.stride()
        first = unique.setdefault(key, name) if value.numel() else name
        if first != name:
            aliases[MODEL + name] = MODEL + first
    tensors = {MODEL + name: value for name, value in weights.items() if MODEL + name not in aliases}
    values: dict[str, Any] = {
        **dict.fromkeys(VALUES),
        **{key: {} for key in ("model", "optimizer values", "dp_sync", "extra")},
    }
    values |= {"optimizer groups": [], "schedulers": [], "random": []}
    files = {STATE_FILE: packed(values), **({} if config is None else {CONFIG_FILE: config})}
    index = CheckpointIndex(1, 0, 0, torch.__version__, autopart_version(), "", "", 1, aliases=aliases)
    parent.mkdir(parents=True, exist_ok=True)
    name, part = new_names(parent, 0)
    (parent / part).mkdir()
    connect_checkpoints()
    write_shards(
        [tensors], IndexedWriter(parent / part, index, files, lambda: commit(parent / part, parent / name, None))
    )
    return parent / name, len(tensors)


def _of_torch(source: Path) -> Mapping[str, Tensor]:
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for other files
        raise CheckpointError(
            f"{source} cannot be read",
            why=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            hint="a file of torch.save(model.state_dict(), path); nothing else is unpickled",
        ) from None
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in WRAPPED_IN if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{source} has no state dict of tensors", hint="torch.save(model.state_dict(), path)")
    return loaded


def _of_safetensors(source: Path) -> tuple[Mapping[str, Tensor], bytes | None]:
    weights = {}
    with SafetensorsFiles(source) as files:
        for name, stored in files.tensors.items():
            weights[name] = torch.empty(stored.shape, dtype=stored.dtype)
            stored.read_box((0,) * len(stored.shape), weights[name])
    config = source / CONFIG_FILE
    return weights, config.read_bytes() if config.is_file() else None

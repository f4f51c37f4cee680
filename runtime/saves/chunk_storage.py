"""Storage of saves for `torch.distributed.checkpoint` (DCP), with checksums in a JSON index.

Import this file late, because importing DCP takes time.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopart.common.files import write_whole
from autopart.errors import CheckpointError
from autopart.runtime.saves.checkpoint_index import (
    INDEX_FILE,
    CheckpointIndex,
    SavedChunk,
    SavedEntry,
    SavedFile,
    changed_text,
    digest_in_file,
    digest_of,
)


@dataclass(frozen=True)
class DigestedResult(WriteResult):
    """Position of a written chunk, with the checksum of its bytes."""

    digest: str = ""


class IndexedWriter(FileSystemWriter):
    """Storage writer of DCP that also writes checksums and the JSON index.

    Args:
        part: temporary folder.
        index: the index, whose entries and files are still empty.
        files: {name: content} of further files. The first rank writes them.
        complete: called on the first rank when everything is written. It gives the folder its final name.
    """

    def __init__(self, part: Path, index: CheckpointIndex, files: Mapping[str, bytes], complete: Callable[[], None]):
        super().__init__(part, sync_files=True)
        self.part, self.index, self.files_to_write, self.complete = part, index, files, complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        digested: list[WriteResult] = []
        for result in sorted(results, key=lambda one: (one.storage_data.relative_path, one.storage_data.offset)):
            stored = result.storage_data
            with open(self.part / stored.relative_path, "rb") as file:
                digest = digest_in_file(file, stored.offset, stored.length)
            digested.append(DigestedResult(result.index, result.size_in_bytes, stored, digest))
        future: Future[list[WriteResult]] = Future()
        future.set_result(digested)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, DCP's metadata and the files in `files`. DCP calls it on the first rank."""
        entries = entries_of(metadata, [result for of_rank in results for result in of_rank])
        files = {}
        for name, content in self.files_to_write.items():
            with open(self.part / name, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            files[name] = SavedFile(name, len(content), digest_of(content))
        results = [*results, _alias_results(metadata, results, self.index.aliases)]
        super().finish(metadata, results)
        write_whole(self.part / INDEX_FILE, replace(self.index, entries=entries, files=files).to_json())
        self.complete()


def entries_of(metadata: Metadata, results: Sequence[WriteResult]) -> dict[str, SavedEntry]:
    """Return {name: tensor} of a save, from DCP's metadata and the positions of the chunks."""
    written = {(one.index.fqn, tuple(one.index.offset or ())): one for one in results}
    entries = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            result = written[name, tuple(chunk.offsets)]
            assert isinstance(result, DigestedResult)
            data = result.storage_data
            chunks.append(
                SavedChunk(
                    data.relative_path,
                    data.offset,
                    data.length,
                    result.digest,
                    tuple(chunk.offsets),
                    tuple(chunk.sizes),
                )
            )
        entries[name] = SavedEntry(_dtype_name(stored.properties.dtype), tuple(stored.size), tuple(chunks))
    return entries


def _alias_results(
    metadata: Metadata, results: list[list[WriteResult]], aliases: Mapping[str, str]
) -> list[WriteResult]:
    """Add the second names of tied parameters to DCP's metadata.

    Returns results that give the second names the positions of the first names, whose bytes are written once.
    """
    added = []
    for alias, name in aliases.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
        for result in (result for of_rank in results for result in of_rank if result.index.fqn == name):
            added.append(replace(result, index=replace(result.index, fqn=alias)))
    return added


class IndexedReader(FileSystemReader):
    """Storage reader of DCP that gets the positions of chunks from the JSON index and compares checksums."""

    def __init__(self, folder: Path, index: CheckpointIndex):
        super().__init__(folder)
        self.folder, self.index = folder, index
        self.chunks: dict[MetadataIndex, SavedChunk] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {}
        for name, entry in self.index.entries.items():
            chunks = []
            for chunk in entry.chunks:
                start = torch.Size(chunk.start)
                chunks.append(ChunkStorageMetadata(start, torch.Size(chunk.size)))
                self.chunks[MetadataIndex(name, start)] = chunk
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(described, storage_data=self.chunks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each chunk once, in the order in which chunks are stored."""

        def position(item: Any) -> tuple[str, int]:
            chunk = self.chunks[item.storage_index]
            return chunk.file, chunk.offset

        latest: tuple[SavedChunk | None, Tensor] = None, torch.empty(0)
        for item in sorted(plan.items, key=position):
            chunk = self.chunks[item.storage_index]
            if latest[0] is not chunk:
                latest = chunk, self._read(item.storage_index.fqn, chunk)
            target = planner.resolve_tensor(item).detach()
            values = latest[1]
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dim, offset, length)
            target.copy_(values)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, name: str, chunk: SavedChunk) -> Tensor:
        with open(self.folder / chunk.file, "rb") as file:
            file.seek(chunk.offset)
            data = file.read(chunk.length)
        if len(data) != chunk.length or digest_of(data) != chunk.digest:
            raise CheckpointError(changed_text(name, chunk))
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch raises for bytes that were written by something else
            raise CheckpointError(f"'{name}' cannot be read", why=f"{type(error).__name__}: {error}") from None
        entry = self.index.entries[name]
        if not isinstance(tensor, Tensor) or (_dtype_name(tensor.dtype), tuple(tensor.shape)) != (
            entry.dtype,
            chunk.size,
        ):
            raise CheckpointError(f"'{name}' in {chunk.file} has another shape or dtype than its index")
        return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def save_planner() -> SavePlanner:
    """Return DCP's planner for a flat state dict of tensors."""
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def write_shards(shards: Sequence[Mapping[str, Tensor]], writer: IndexedWriter) -> None:
    """Write the shards of several ranks from one process, as DCP's `save` does on all ranks.

    Args:
        shards: for each rank, {name: its shard of a tensor}.
    """
    planners, plans = [], []
    for rank, tensors in enumerate(shards):
        planner = save_planner()
        planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = []
    for planner, plan in zip(planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


def read_shards(folder: Path, index: CheckpointIndex, targets: Mapping[str, Tensor]) -> None:
    """Fill the tensors of one rank from a save that any mesh has written.

    Raises CheckpointError for bytes that have changed.

    Args:
        targets: {name in the index: tensor on the CPU}. Into a `ShardTensor`, only the shard is read.
    """
    reader, planner = (
        IndexedReader(folder, index),
        DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    items = [item for item in plan.items if math.prod(item.lengths)]
    reader.read_data(replace(plan, items=items), planner)

"""A save that is being written, in this thread or in the background."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from autopart.errors import CheckpointError
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.watchdog import is_lost
from autopart.runtime.saves.checkpoint_index import CheckpointIndex
from autopart.runtime.saves.step_folders import commit


class Save:
    """Result of `pm.save`.

    Attributes:
        folder: folder of the save, which exists as soon as the save is complete.
        step: number of the step.
    """

    def __init__(self, folder: Path, step: int, future: Future[Any], part: Path | None = None):
        self.folder, self.step, self._future, self._part = folder, step, future, part

    def __deepcopy__(self, memo: dict[int, Any]) -> Save:
        return self

    def done(self) -> bool:
        """Return True if the save is complete, or has failed."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait until the save is complete, and return its folder. Raises CheckpointError if it has failed."""
        try:
            self._future.result()
        except BaseException as error:  # DCP's exception is no Exception
            if self._part is not None:  # the callback of the future may run after this
                shutil.rmtree(self._part, ignore_errors=True)
            raise _as_error(error, self.folder) from error
        return self.folder


def begin_save(
    tensors: Mapping[str, Tensor], index: CheckpointIndex, files: Mapping[str, bytes], part: Path, final: Path,
    process: Process, keep: int | None, wait: bool,
) -> Save:  # fmt: skip
    """Write the tensors of all ranks. A collective call.

    Args:
        tensors: {name: this rank's tensor, or its shard}.
        part, final: temporary folder, and the path to which it is renamed when the save is complete.
        wait: False to copy the tensors, and write the copies in a background thread.
    """
    import torch.distributed.checkpoint as dcp

    from autopart.runtime.saves.chunk_storage import IndexedWriter, save_planner, write_shards

    writer = IndexedWriter(part, index, files, partial(commit, part, final, keep))
    group, is_first = process.host_group, process.host_group is None or process.host_group.index == 0
    future: Future[Any]
    if group is None:
        staged = dict(tensors) if wait else {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        executor = ThreadPoolExecutor(1)
        future = executor.submit(write_shards, [staged], writer)
        executor.shutdown(wait=wait)
    elif wait:
        future = Future()
        try:
            dcp.save(dict(tensors), storage_writer=writer, planner=save_planner(), process_group=process.save_group())
            future.set_result(None)
        except dcp.CheckpointException as error:
            future.set_exception(error)
    else:
        started = dcp.async_save(
            dict(tensors), storage_writer=writer, planner=save_planner(), process_group=process.save_group()
        )
        assert isinstance(started, Future)
        future = started
    save = Save(final, index.step, future, part if is_first else None)
    if is_first:
        future.add_done_callback(lambda done: _clean_up(done, part, None if wait else final))
    if wait:
        save.wait()
    return save


def _clean_up(done: Future[Any], part: Path, background: Path | None) -> None:
    error = done.exception()
    if error is not None:
        shutil.rmtree(part, ignore_errors=True)
        if background is not None:  # the training loop may never wait for this save
            warnings.warn(str(_as_error(error, background)), stacklevel=2)


def _as_error(error: BaseException, folder: Path) -> BaseException:
    """Return the error of a failed save, with the reason of each rank that failed."""
    failures = getattr(error, "failures", None)
    if failures is None:
        if isinstance(error, RuntimeError) and is_lost(error):
            why = "another rank has ended, or does not answer"
            return CheckpointError(f"cannot write {folder}", why=why, hint="earlier saves are unchanged")
        return CheckpointError(f"cannot write {folder}", why=str(error)) if isinstance(error, OSError) else error
    lines = []
    for rank, failure in sorted(failures.items()):
        reason = failure[0] if isinstance(failure, tuple) else failure
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        lines.append(f"rank {rank}: {text}".replace("\n", "; "))
    return CheckpointError(f"cannot write {folder}", why="\n         ".join(lines), hint="earlier saves are unchanged")

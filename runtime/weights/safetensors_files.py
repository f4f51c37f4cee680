"""Tensors of a checkpoint in safetensors files. Each rank reads only the elements that it needs.

The safetensors library maps files into memory. Pages that were read count as memory of this process until the file is
unmapped. Files are therefore closed before the bytes read exceed 64 MiB (or the size of the largest tensor, if larger).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from autopart.common.files import read_text
from autopart.common.json_text import parse_json, shortened
from autopart.errors import CheckpointError
from autopart.runtime.weights.lazy_tensors import LazyTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAPPED_BYTES = 2**26
"""Maximum bytes of file pages that stay in memory, unless the largest tensor is larger."""
_HINT = "model.save_pretrained(folder), or safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"


class SafetensorsFiles:
    """Lazy tensors of a checkpoint, by their names in the files.

    Use the object as a context manager around reads; on exit it closes the files. Raises CheckpointError if no file
    can be read, or if a file is incomplete.

    Args:
        path: a `.safetensors` file, an index (`model.safetensors.index.json`), or a folder with such files.

    Attributes:
        text: digest of file sizes and of tensors' names, dtypes and shapes. Ranks compare it, to detect that they read
            different checkpoints.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.tensors: dict[str, LazyTensor] = {}
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0
        self._largest_bytes = MAPPED_BYTES
        lines = []
        for file, listed in _files_of(self.path).items():
            lines += self._add(file, listed)
        self._close()
        self.text = "digest " + hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, file: Path, name: str, window: Any, size_bytes: int) -> Tensor:
        """Return a slice of a tensor as a view of the mapped file. Copy it before the next read.

        Args:
            window: index of the slice.
            size_bytes: size of the tensor's rows that contain the slice. Reading it loads these rows into memory.
        """
        if self._mapped_bytes + size_bytes > self._largest_bytes:
            self._close()
        self._mapped_bytes += size_bytes
        return self._file(file).get_slice(name)[window]

    def _add(self, file: Path, listed: Sequence[str] | None) -> list[str]:
        """Add the tensors of a file.

        Return lines of text that describe the tensors, for the digest that ranks compare.
        """
        opened = self._file(file)
        names = sorted(opened.keys())
        absent = sorted(set(listed or ()) - set(names))
        if absent:
            raise CheckpointError(
                f"the index at {self.path} names tensors that are missing: {listing(absent)}",
                why=f"according to the index they are in {file.name}", hint="copy the complete folder again",
            )  # fmt: skip
        lines = [f"{file.name} {file.stat().st_size}"]
        for name in names:
            if name in self.tensors:
                raise CheckpointError(
                    f"two files of {self.path} have the tensor '{name}'", why="it is unclear which one to read",
                    hint="the path of one file, or of a folder with one checkpoint",
                )  # fmt: skip
            tensor = _Stored(self, file, name, opened.get_slice(name))
            self.tensors[name] = tensor
            self._largest_bytes = max(self._largest_bytes, tensor.size_bytes)
            lines.append(f"{name} {tensor.dtype} {list(tensor.shape)}")
        return lines

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            safe_open, wrong = _library()
            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except wrong as error:
                raise CheckpointError(
                    f"{file} is not a complete safetensors file", why=str(error), hint="copy or save it again"
                ) from None
            except OSError as error:
                raise CheckpointError(f"cannot read {file}", why=error.strerror or str(error)) from None
        return self._open[file]

    def _close(self) -> None:
        while self._open:
            _, file = self._open.popitem()
            file.__exit__(None, None, None)
        self._mapped_bytes = 0


class _Stored(LazyTensor):
    """Lazy tensor that is stored in one file."""

    def __init__(self, files: SafetensorsFiles, file: Path, name: str, file_slice: Any):
        self.files, self.file, self.name = files, file, name
        self.shape = tuple(file_slice.get_shape())
        self.dtype = file_slice[0:0].dtype if self.shape else file_slice[()].dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        window = tuple(slice(start, start + size) for start, size in zip(offsets, out.shape, strict=True))
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = out.shape[0] if out.dim() else 1
        out.copy_(self.files.read(self.file, self.name, window, rows * row_bytes))


def listing(names: Sequence[str]) -> str:
    """Return a text with the first eight names and the number of further names."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"'{name}'" for name in names[:8]) + more


def _library() -> tuple[Callable[..., Any], type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError("weights= needs the package safetensors", hint="pip install safetensors") from None
    return safe_open, SafetensorError


def _files_of(path: Path) -> dict[Path, list[str] | None]:
    """Return {file: tensor names that the index lists for the file, or None without an index}."""
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else {path: None}
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}", why="it is neither a folder nor a file", hint=_HINT)
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    paths = sorted(path.glob("*.safetensors"))
    if not paths:
        entries = sorted(entry.name for entry in path.iterdir())
        shown = f"it has {listing(entries)}" if entries else "it is empty"
        raise CheckpointError(f"there are no safetensors files in {path}", why=shown, hint=_HINT)
    return dict.fromkeys(paths)


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    text = read_text(index, "an index of safetensors files", CheckpointError, _HINT)
    data = parse_json(text, str(index), CheckpointError, _HINT)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(
            f"{index} is not an index of safetensors files",
            why="it has no entry 'weight_map', from names of tensors to files", hint=_HINT,
        )  # fmt: skip
    outside = [file for file in places.values() if Path(file).is_absolute() or ".." in Path(file).parts]
    if outside:
        raise CheckpointError(
            f"{index} names a file outside of its folder: {shortened(outside[0])!r}",
            why="a checkpoint is in the folder of its index", hint="a checkpoint from a source that you trust",
        )  # fmt: skip
    files: dict[Path, list[str] | None] = {}
    for name, file in sorted(places.items()):
        listed = files.setdefault(index.parent / file, [])
        assert listed is not None
        listed.append(name)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names files that do not exist: {listing(absent)}",
            why=f"{len(files) - len(absent)} of its {len(files)} files exist", hint="copy the complete folder again",
        )  # fmt: skip
    return files

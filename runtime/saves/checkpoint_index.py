"""JSON index of a saved training run: names, shapes and dtypes of its tensors, and their bytes.

This file imports no torch, so that commands read and verify saves quickly. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopart.common.files import read_text
from autopart.common.json_text import parse_json, shortened
from autopart.errors import CheckpointError

INDEX_FILE, STATE_FILE, PLAN_FILE, CONFIG_FILE = "index.json", "state.pt", "plan.json", "config.json"
FORMAT = "autopart save 1"
HINT = "a folder that pm.save() has written completely; pm.load(parent, 'latest') finds the last one"

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""{dtype that a save can hold: bytes of one entry}."""
BLOCK_BYTES = 2**22
LARGEST = 2**60
"""Upper bound of every number in an index, so that sizes and products stay in range."""

Check = Callable[[bool, str], None]


@dataclass(frozen=True)
class SavedFile:
    """Entry of a save's index for a file without tensors, such as `state.pt`."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class SavedChunk:
    """A rectangular chunk of a tensor, and the position of its bytes in a file.

    Attributes:
        offset, length: first byte in the file, and number of bytes.
        start, size: index of the chunk's first entry in the tensor, and shape of the chunk.
    """

    file: str
    offset: int
    length: int
    digest: str
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class SavedEntry:
    """A tensor of a save, in the shape of the unpartitioned model."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass
class CheckpointIndex:
    """Content of `index.json`.

    Attributes:
        number: 1 for the first save of a folder, 2 for the next one.
        step, samples: training steps, and samples of the global batches, up to this save.
        torch, autopart: versions.
        model, optimizers, schedulers: class names.
        entries: {name: tensor}.
        aliases: {second name of a tied parameter: name in `entries`}.
        files: files that contain no tensors of `entries`.
    """

    number: int
    step: int
    samples: int
    torch: str
    autopart: str
    model: str
    mesh: str
    num_ranks: int
    optimizers: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    entries: dict[str, SavedEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size_bytes for entry in self.entries.values())

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")) + "\n"


def read_index(folder: Path) -> CheckpointIndex:
    """Read and check the index of a save. Raises CheckpointError if it is missing or damaged."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is no complete save", why=f"it has no {INDEX_FILE}", hint=HINT)
    data = parse_json(read_text(path, "the index of a save", CheckpointError, HINT), str(path), CheckpointError, HINT)

    def check(ok: bool, why: str) -> None:
        if not ok:
            raise CheckpointError(f"{path} is damaged", why=why, hint=HINT)

    check(isinstance(data, dict) and data.get("format") == FORMAT, f"its format is not {FORMAT!r}")
    texts = {name: _text(data.get(name), name, check) for name in ("torch", "autopart", "model", "mesh")}
    numbers = {name: _whole(data.get(name), name, check) for name in ("number", "step", "samples", "num_ranks")}
    classes = {name: tuple(_texts(data.get(name), name, check)) for name in ("optimizers", "schedulers")}
    entries = {name: _entry(value, name, check) for name, value in _pairs(data.get("entries"), "entries", check)}
    aliases = {name: _text(value, name, check) for name, value in _pairs(data.get("aliases"), "aliases", check)}
    for name, target in aliases.items():
        check(target in entries, f"{shortened(name)!r} is another name of {shortened(target)!r}, which is not there")
    files = {name: _file(value, name, check) for name, value in _pairs(data.get("files"), "files", check)}
    check(STATE_FILE in files, f"its files have no {STATE_FILE}")
    fields: dict[str, Any] = {**numbers, **texts, **classes}
    return CheckpointIndex(**fields, entries=entries, aliases=aliases, files=files)


def _text(value: Any, name: str, check: Check) -> str:
    check(isinstance(value, str) and len(value) <= 10_000, f"'{shortened(name)}' is not a string")
    return str(value)


def _texts(value: Any, name: str, check: Check) -> list[str]:
    check(isinstance(value, list), f"'{name}' is not a list")
    return [_text(entry, name, check) for entry in value]


def _whole(value: Any, name: str, check: Check) -> int:
    check(type(value) is int and 0 <= value < LARGEST, f"'{shortened(name)}' is not an integer from 0 to {LARGEST}")
    return int(value)


def _pairs(value: Any, name: str, check: Check) -> list[tuple[str, Any]]:
    check(isinstance(value, dict), f"'{name}' is not a JSON object")
    return list(value.items())


def _sizes(value: Any, name: str, check: Check) -> tuple[int, ...]:
    check(isinstance(value, list) and len(value) <= 64, f"a shape of '{shortened(name)}' is not a list of sizes")
    sizes = tuple(_whole(size, name, check) for size in value)
    check(math.prod(sizes) < LARGEST, f"'{shortened(name)}' is too large")
    return sizes


def _file(value: Any, name: str, check: Check) -> SavedFile:
    fields = dict(_pairs(value, name, check))
    return SavedFile(
        _file_name(name, name, check), _whole(fields.get("size_bytes"), name, check), _digest(fields, name, check)
    )


def _file_name(value: Any, name: str, check: Check) -> str:
    ok = isinstance(value, str) and re.fullmatch(r"[\w.-]{1,200}", value) is not None and value.strip(".") != ""
    check(ok, f"'{shortened(name)}' names a file outside of its folder: {shortened(str(value))!r}")
    return str(value)


def _digest(fields: Mapping[str, Any], name: str, check: Check) -> str:
    digest = fields.get("digest")
    check(isinstance(digest, str) and len(digest) == 32, f"'{shortened(name)}' has no checksum of 32 digits")
    return str(digest)


def _entry(value: Any, name: str, check: Check) -> SavedEntry:
    shown, fields = shortened(name), dict(_pairs(value, name, check))
    dtype, shape = fields.get("dtype"), _sizes(fields.get("shape"), name, check)
    check(isinstance(dtype, str) and dtype in ITEM_BYTES, f"'{shown}' has the dtype {shortened(str(dtype))!r}")
    rows = fields.get("chunks")
    check(isinstance(rows, list), f"'{shown}' has no list of chunks")
    chunks, numel = [], 0
    for row in rows or ():
        part = dict(_pairs(row, name, check))
        start, size = _sizes(part.get("start"), name, check), _sizes(part.get("size"), name, check)
        fits = len(start) == len(size) == len(shape)
        fits = fits and all(one + length <= full for one, length, full in zip(start, size, shape, strict=True))
        check(fits, f"a chunk of '{shown}' is outside of its shape {list(shape)}")
        offset, length = _whole(part.get("offset"), name, check), _whole(part.get("length"), name, check)
        check(length >= math.prod(size) * ITEM_BYTES[str(dtype)], f"a chunk of '{shown}' has too few bytes")
        chunks.append(
            SavedChunk(
                _file_name(part.get("file"), name, check), offset, length, _digest(part, name, check), start, size
            )
        )
        numel += math.prod(size)
    check(numel == math.prod(shape), f"the chunks of '{shown}' have {numel} entries, its shape {list(shape)} has more")
    return SavedEntry(str(dtype), shape, tuple(chunks))


def digest_of(data: bytes | memoryview) -> str:
    """Return the checksum that a save records for some bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_in_file(file: Any, offset: int, length: int) -> str:
    """Return the checksum of some bytes of an open file."""
    digest, left = hashlib.blake2b(digest_size=16), length
    file.seek(offset)
    while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def read_file(folder: Path, file: SavedFile) -> bytes:
    """Return the content of a file of a save. Raises CheckpointError if its bytes have changed."""
    data = (folder / file.name).read_bytes()[: file.size_bytes]
    if digest_of(data) != file.digest:
        raise CheckpointError(f"{file.name} has changed since it was written")
    return data


def size_problems(folder: Path, index: CheckpointIndex) -> list[str]:
    """Return one text for each file of a save that is missing or too short."""
    ends = {file.name: file.size_bytes for file in index.files.values()}
    for entry in index.entries.values():
        for chunk in entry.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    problems = []
    for name, end in sorted(ends.items()):
        try:
            size = os.stat(folder / name).st_size
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if size < end:
            problems.append(f"{name} has {size} bytes, and {end} were written")
    return problems


def digest_problems(folder: Path, index: CheckpointIndex) -> Iterator[str]:
    """Read all bytes of a save. Yield one text for each tensor or file whose bytes have changed."""
    for file in index.files.values():
        try:
            read_file(folder, file)
        except CheckpointError as error:
            yield str(error)
    by_file: dict[str, list[tuple[str, SavedChunk]]] = {}
    for name, entry in index.entries.items():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((name, chunk))
    for file_name, chunks in sorted(by_file.items()):
        with open(folder / file_name, "rb") as opened:
            for name, chunk in sorted(chunks, key=lambda pair: pair[1].offset):
                if digest_in_file(opened, chunk.offset, chunk.length) != chunk.digest:
                    yield changed_text(name, chunk)


def changed_text(name: str, chunk: SavedChunk) -> str:
    """Return the message for a chunk whose bytes have changed."""
    return f"'{printable(name)}' has changed since it was written (in {chunk.file})"


def printable(name: str) -> str:
    """Replace characters of a name from a file that cannot be printed, such as control characters."""
    return "".join(character if character.isprintable() else "?" for character in name)


def problem_error(folder: Path, problems: Sequence[str], hint: str = HINT) -> CheckpointError:
    """Return the error that lists what is wrong with a save."""
    lines = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
    count = f"{len(problems)} difference{'s' * (len(problems) > 1)}"
    return CheckpointError(
        f"cannot load {folder}: {count}, and nothing was changed", why="\n         ".join(lines), hint=hint
    )

"""Reading and atomic writing of text files that a user names."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from autopart.errors import AutopartError


def read_text(path: Path, what: str, error: type[AutopartError], hint: str) -> str:
    """Return the text of an existing file.

    Args:
        what: description of the expected content for error messages, such as "a plan" or "a file of pins".
        error: class of the exception that is raised for a folder, an unreadable or empty file, or bytes that are not
            UTF-8.
        hint: advice for the error message.
    """
    if path.is_dir():
        raise error(f"{path} is a folder, not {what}", hint=f"a file in {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"cannot read {path}", why=problem.strerror or str(problem)) from None
    except UnicodeDecodeError as problem:
        why = f"byte {problem.start} is not UTF-8 text, and {what} is JSON"
        raise error(f"{path} is not {what}", why=why, hint=hint) from None
    if not text.strip():
        raise error(f"{path} is empty", why="nothing was written, or not yet", hint=hint)
    return text


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: write a temporary file in the same folder, then rename it.

    A special file such as `/dev/stdout` is written directly. Raises OSError if writing fails.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    # A random name and O_EXCL: a link that somebody has placed there is not followed.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(path: Path, error: type[AutopartError], hint: str = "") -> None:
    """Raise `error` if no file can be written at `path`.

    Commands call it before a long computation whose result they write to `path`.
    """
    folder = path.resolve().parent
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "you may not write there"
    if why:
        raise error(f"cannot write {path}", why=why, hint=hint)

"""Dumps of the graph changes of passes, as files in the folder that `AUTOPART_DUMP` names.

    rank0/1/00-traced.txt          the graph of the first trace of rank 0 (`pid4711` without ranks)
    rank0/1/06-one_reshape.diff    the change of the sixth pass; the first line has the time
    rank0/1/49-lower/stage0.txt    the program of stage 0
    rank0/1/passes.txt             every pass in order: its number, whether it changed anything, milliseconds, name

The diffs, applied in order to `00-traced.txt`, give the graph after every pass. A pass over another graph than the
traced one (`fuse_bias` on stage 0) has a diff of that graph.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import fx

from autopart.common.flags import DUMP, flags
from autopart.errors import OptionError
from autopart.ir.facts import facts
from autopart.ir.graph import kind_of
from autopart.ir.layout import format_layout
from autopart.ir.program import Program

Notes = Callable[[fx.Node], Iterable[str]]
"""Function that yields the comments for one node, which a dump prints after the node's line."""
NodeNotes = Mapping[str, tuple[str, ...]]
"""{name of a node: its comments}, printed after the node's line"""


class Shown(NamedTuple):
    """Functions that print the result of a pass that does not change its graph.

    Args:
        notes: `notes(result)` returns a function that yields comments for one node.
        files: `files(result)` returns {file name: text}.
    """

    notes: Callable[[Any], Notes] | None = None
    files: Callable[[Any], Mapping[str, str]] | None = None


class Dump:
    """Dump folder of one trace, with a file for each pass.

    The object stores the latest text of each graph, to write the change by the next pass.
    """

    def __init__(self, root: str, graph: fx.Graph):
        self.root, self.folder, self.num_passes = root, _new_folder(root), 0
        self.texts: WeakKeyDictionary[fx.Graph, str] = WeakKeyDictionary()
        self.notes: WeakKeyDictionary[fx.Graph, dict[Any, NodeNotes]] = WeakKeyDictionary()
        self.see(graph)
        self._write(self.folder / "00-traced.txt", self.texts[graph])
        self._write(self.folder / "passes.txt", "")

    def see(self, graph: fx.Graph) -> None:
        """Store the text of a graph before its first pass. Does nothing for a graph that has a stored text."""
        if graph not in self.texts:
            self.texts[graph] = graph_text(graph)

    def record(
        self, graph: fx.Graph, name: str, text: str, took_s: float, failed: bool, shown: Shown, result: Any
    ) -> None:
        """Write the files of a pass to the dump folder, and the line of the pass in `passes.txt`.

        Args:
            name: name of the pass, for file names.
            text: name and options of the pass, for users.
            failed: True if the pass raised an error.
            shown: functions that print `result`, the return value of the pass.
        """
        self.num_passes += 1
        numbered = f"{self.num_passes:02}-{name}"
        if shown.notes is not None and not failed:
            note = shown.notes(result)
            texts = {node.name: tuple(note(node)) for node in graph.nodes}
            self.notes.setdefault(graph, {})[shown.notes] = (
                texts  # replaces the comment of an earlier pass of this kind
            )
        files = shown.files(result) if shown.files is not None and not failed else {}
        for file, content in files.items():
            self._write(self.folder / numbered / file, content)
        before, after = self.texts[graph], graph_text(graph, tuple(self.notes.get(graph, {}).values()))
        self.texts[graph] = after
        milliseconds = f"{1000 * took_s:.3f} ms"
        if before != after:
            self._write(self.folder / f"{numbered}.diff", f"{text}, {milliseconds}\n{_diff(before, after)}")
        state = "failed" if failed else "changed" if before != after or files else "-"
        line = f"{self.num_passes:02}  {state:<7}  {milliseconds:>13}  {text}\n"
        self._write(self.folder / "passes.txt", line, "a")

    def _write(self, path: Path, text: str, mode: str = "w") -> None:
        with _in_words(self.root):
            path.parent.mkdir(exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)


_dumps: WeakKeyDictionary[fx.Graph, Dump] = WeakKeyDictionary()
_within: ContextVar[Dump | None] = ContextVar("the dump of the pass that is running", default=None)


def dump_of(graph: fx.Graph, root: str) -> Dump | None:
    """Return the dump that records passes over this graph; None if `root` (the dump folder) is "".

    A graph that a pass creates belongs to the dump of that pass. Any other graph gets a new dump.
    """
    if not root:
        return None
    dump = _dumps.get(graph) or _within.get()
    if dump is None or dump.root != root:
        dump = _dumps[graph] = Dump(root, graph)
    dump.see(graph)
    return dump


@contextmanager
def within(dump: Dump | None) -> Iterator[None]:
    """Record in `dump` each compiler pass that runs on a new graph in the `with` block."""
    token = _within.set(dump)
    try:
        yield
    finally:
        _within.reset(token)


def check_folder() -> None:
    """Raise OptionError if the folder in `AUTOPART_DUMP` cannot be written to. Called before any pass."""
    if root := flags().dump:
        _own_folder(root)


def _own_folder(root: str) -> Path:
    """Return the dump folder of this process. Create it if it is missing.

    Each process has a separate folder, because all processes of a run can share `root`.
    """
    rank = os.environ.get("RANK")
    folder = Path(root).expanduser() / (f"pid{os.getpid()}" if rank is None else f"rank{rank}")
    with _in_words(root):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
    return folder


def _new_folder(root: str) -> Path:
    """Create and return the folder of the next trace (`1`, `2`, ...) in the folder of this process."""
    parent = _own_folder(root)
    for number in itertools.count(1):
        try:
            (parent / str(number)).mkdir()
        except FileExistsError:
            continue
        except OSError as problem:
            raise _unusable(root, problem) from None
        return parent / str(number)
    raise AssertionError("unreachable: itertools.count() does not end")


@contextmanager
def _in_words(root: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise _unusable(root, problem) from None


def _unusable(root: str, problem: OSError) -> OptionError:
    is_file = isinstance(problem, FileExistsError | NotADirectoryError)
    why = "the path or one of its parents is a file" if is_file else problem.strerror or str(problem)
    return OptionError(
        f"{DUMP}={root!r} is not a folder to write to", why=why, where="the environment",
        hint=f"{DUMP}=dump: a folder, which is created if it does not exist",
    )  # fmt: skip


# Text


def graph_text(graph: fx.Graph, notes: Iterable[NodeNotes] = ()) -> str:
    """Return one line per node: `name = operator(arguments)  # f64[4,6,8]{tp:S(2)}; notes`."""
    lines = []
    for node in graph.nodes:
        layout = format_layout(facts(node).get("layout") or {}).replace("{}", "")
        parts = dict.fromkeys(part for note in notes for part in note.get(node.name, ()))
        comment = "; ".join(filter(None, [kind_of(node.meta.get("val")) + layout, *parts]))
        lines.append(f"{_call_text(node)}{'  # ' + comment if comment else ''}\n")
    return "".join(lines)


def _call_text(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {', '.join(str(argument) for argument in node.args if argument != {})}"
    if node.op != "call_function":
        return f"{node.name} = {node.op} {node.target}"
    inputs = ", ".join([*map(str, node.args), *(f"{name}={argument}" for name, argument in node.kwargs.items())])
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({inputs})"


def program_files(program: Program) -> dict[str, str]:
    """Return {file name, such as `stage0.txt`: text of a stage's graphs} for every stage."""
    return {
        f"stage{stage.index}.txt": f"prologue\n\n{graph_text(stage.prologue.graph)}\n"
        f"stage {stage.index}\n\n{graph_text(stage.graph.graph)}"
        for stage in program.stages
    }


def _diff(before: str, after: str) -> str:
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, "a/graph.txt", "b/graph.txt"))

"""Descriptions of what a rank is doing, from its stack: `at all_reduce_12`, or `at train.py:40`."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

PLACES = {
    "finish_comparison": "at the comparison of the calls",
    "check_same_start": "at the comparison of models and plans",
    "check_same_state": "at the comparison of random states",
    **dict.fromkeys(
        (
            "sync_gradients",
            "ReductionQueue.launch",
            "ReductionQueue.finish",
            "_StartReduce.backward",
            "_WaitReduce.backward",
        ),
        "at the sum of gradients",
    ),
    "write_buffers": "at the new values of buffers",
    "next_step": "at the comparison of copies",
    "gather": "at the gathering of parameters",
    "program": "while the model is traced",
}
"""{function name: what a rank that runs it is doing}, for messages of the watchdog.

The key is `Class.method` if several classes have the method.
"""

GRAPH_CODE = "<eval_with_key>"  # torch.fx's file name of generated code
_OURS = tuple(str(folder.resolve()) for folder in Path(__file__).parents[1:3])  # runtime (perhaps a symlink), package
_NOT_THE_USERS = (*_OURS, str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"], "<")


def place_in_stack(thread: int, in_call: bool) -> str:
    """Describe what a thread runs: a node of a stage graph if `in_call`, else a line of user code."""
    frame = sys._current_frames().get(thread)
    frames = [(f, line) for f, line in traceback.walk_stack(frame)] if frame is not None else []
    return (_ours(frames) if in_call else "") or _users(frames)


def place_in_traceback(error: BaseException) -> str:
    """Describe the node of a stage graph that raised an error; "" if the error was raised elsewhere."""
    below = [*traceback.walk_tb(error.__traceback__)][::-1]
    return _ours([*below, *traceback.walk_stack(sys._getframe(1))])


Line = tuple[str, int, dict[str, Any]]
"""A line of a graph's generated code: file, line number, and the globals that have its text."""


def line_of_graph() -> Line | None:
    """Return the line of generated stage code that is running, or None if no such code is running.

    The result identifies the line. Its source text is read only when needed, which is rare.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            break
        if frame.f_code.co_filename.startswith(GRAPH_CODE):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        frame = frame.f_back
    return None


def _ours(frames: list[tuple[FrameType, int]]) -> str:
    """Describe the innermost frame that runs a stage graph or autopart's code; "" without such a frame."""
    for frame, line in frames:
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(GRAPH_CODE):
            node = _node_at((frame.f_code.co_filename, line, frame.f_globals))
            return f"at {node}{_source(frame.f_locals.get('self'), node)}" if node else ""
        context = frame.f_locals.get("ctx") if name == "backward" else None
        if hasattr(context, "conversion"):
            return f"at the backward of {_node_at(context.line) or context.conversion.operator}"
        is_pipelining = "pipelining" in frame.f_code.co_filename and name in ("step", "_step_microbatches")
        if is_pipelining or name in ("_receive", "_send"):
            return "at a send or receive of the pipeline"
        place = PLACES.get(name) or PLACES.get(frame.f_code.co_qualname)
        if place and _is_ours(frame):
            return place
    return ""


def _node_at(line: Line | None) -> str:
    """Return the name of the node that a line of generated code computes, such as `all_reduce_12`."""
    match = re.match(r"\s*(\w+)\s*=", linecache.getline(*line)) if line is not None else None
    return match[1] if match is not None else ""


def _source(module: object, name: str) -> str:
    graph = module.graph if isinstance(module, torch.fx.GraphModule) else None
    for node in graph.nodes if graph is not None else ():
        lines = re.findall(r'File "([^"]*)", line (\d+)', node.stack_trace or "") if node.name == name else []
        if lines:
            return f" ({Path(lines[-1][0]).name}:{lines[-1][1]})"
    return ""


def _users(frames: list[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return f"at {Path(frame.f_code.co_filename).name}:{line}"
    return ""


def _is_ours(frame: FrameType) -> bool:
    return str(Path(frame.f_code.co_filename).resolve()).startswith(_OURS)

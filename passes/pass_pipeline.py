"""Driver of passes: it times and checks them, writes dumps (`dump.py`), and reports failed nodes.

A `Pass` rewrites a graph in place, under `run_passes`. Other functions of a trace analyze it, choose a plan or write a
program. The driver runs them too if they are decorated with `driven`.
"""

from __future__ import annotations

import ast
import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import fx

from autopart.common.flags import flags
from autopart.compat.torch_internals import targets_in
from autopart.errors import AutopartError, OptionError
from autopart.ir.graph import draws_random_numbers, module_path, name_of_target, source_text
from autopart.ir.mesh import Mesh
from autopart.passes.dump import Notes, Shown, dump_of, within

P = ParamSpec("P")
T = TypeVar("T")
Option = bool | int | float | str

UNTOUCHED = object()
"""Return value of a pass that found nothing to rewrite."""
same_calls: ContextVar[dict[tuple, Any]] = ContextVar("results of calls on fake tensors in the running passes")


class PassError(RuntimeError):
    """A pass failed. The text names the pass, the node, and the module and line of the user's code.

    The failure is a fault of autopart. PassError is not an `AutopartError`, so code that handles mistakes of users
    does not catch it.
    """


@dataclass(frozen=True)
class Pass:
    """A function that rewrites a graph in place, with its options.

    Example:
        >>> str(Pass(take_apart, (("depth", 2),)))                           # doctest: +SKIP
        'take_apart{depth=2}'
        >>> Pass.parse("take_apart{depth=2}", PASSES)(graph)                 # doctest: +SKIP
    """

    run: Callable[..., Any]
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.name}{{{options}}}" if options else self.name

    def __call__(self, graph: fx.Graph) -> Any:
        return self.run(graph, **dict(self.options))

    @classmethod
    def parse(cls, text: str, known: Mapping[str, Pass]) -> Pass:
        """Return the pass that a text such as `take_apart{depth=2}` describes. `str` is the inverse.

        `known`: passes by name. Raises OptionError if the pass is unknown or the text is malformed.
        """
        name, brace, rest = text.strip().partition("{")
        if name not in known:
            raise OptionError(f"unknown pass '{name}'", hint=", ".join(known))
        if not brace:
            return known[name]
        parameters = list(inspect.signature(known[name].run).parameters.values())[1:]
        kinds = {p.name: type(p.default) for p in parameters}
        options = _read_options(rest)
        if options is None or any(kinds.get(option) is not type(value) for option, value in options.items()):
            taken = ", ".join(f"{option}: {kind.__name__}" for option, kind in kinds.items()) or "none"
            raise OptionError(
                f"'{text}' is not a valid pass", why=f"the options of {name} are {taken}",
                hint=f"{name}, or {name}{{option=value}}",
            )  # fmt: skip
        return replace(known[name], options=tuple(options.items()))


def _read_options(text: str) -> dict[str, Any] | None:
    """Parse the options of a pass, a text such as `depth=2}`. Return None if it is malformed."""
    try:
        call = ast.parse(f"dict({text.removesuffix('}')})", mode="eval").body
        if not text.endswith("}") or not isinstance(call, ast.Call) or call.args:
            return None
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        return None


def on_calls(*names: str) -> Callable[[Callable[[fx.Graph, fx.Node], None]], Callable[[fx.Graph], Any]]:
    """Decorate a function that rewrites one call.

    The result is a pass that applies the function to all calls of these operators.
    """

    def decorate(rewrite: Callable[[fx.Graph, fx.Node], None]) -> Callable[[fx.Graph], Any]:
        def run(graph: fx.Graph) -> Any:
            targets = [target for target in targets_in(graph) if name_of_target(target) in names]
            calls = [node for t in targets for node in graph.find_nodes(op="call_function", target=t, sort=False)]
            for node in sorted(calls):
                rewrite(graph, node)
            return None if calls else UNTOUCHED

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(run, name, getattr(rewrite, name))
        return run

    return decorate


def run_passes(graph: fx.Graph, passes: tuple[Pass, ...], of: str = "") -> list[Any]:
    """Run passes on a graph, one after another. Return a list of their results.

    After each pass that changed the graph, dead code is removed and the order of nodes is checked. `graph.lint` runs
    after the last pass, or after each pass if `AUTOPART_CHECK` is set. Raises PassError.

    Args:
        of: name of the graph in dumps and errors; "" for the traced graph.
    """
    token = same_calls.set({})

    def call(rewrite: Pass) -> Any:
        result = rewrite(graph)
        if result is not UNTOUCHED or rewrite is passes[0]:
            eliminate_dead_code(graph)
        return result

    try:
        last = len(passes) - 1
        return [_drive(p, graph, partial(call, p), of=of, lint=i == last) for i, p in enumerate(passes)]
    finally:
        same_calls.reset(token)


class Driven(Protocol):
    """Protocol of the first argument of a `driven` function: a trace, or another object with a graph."""

    @property
    def graph(self) -> fx.Graph: ...


Subject = TypeVar("Subject", bound=Driven)


def driven(
    notes: Callable[[Any], Notes] | None = None, files: Callable[[Any], Mapping[str, str]] | None = None
) -> Callable[[Callable[Concatenate[Subject, P], T]], Callable[Concatenate[Subject, P], T]]:
    """Decorate a function that analyzes a trace without changing it, so that the driver runs it.

    The driver times the function, dumps its result by `notes` and `files` (see `Shown`), and checks the graph if
    `AUTOPART_CHECK` is set. Errors that are not the user's mistake become a PassError.
    """
    shown = Shown(notes, files)

    def decorate(function: Callable[Concatenate[Subject, P], T]) -> Callable[Concatenate[Subject, P], T]:
        signature = inspect.signature(function)

        @wraps(function)
        def run(subject: Subject, *args: P.args, **kwargs: P.kwargs) -> T:
            asked: dict[str, Any] = getattr(subject, "options", dict)()
            arguments = {**asked, **signature.bind(subject, *args, **kwargs).arguments}
            options = ((name, str(o) if isinstance(o, Mesh) else o) for name, o in arguments.items()
                       if isinstance(o, Option | Mesh))  # fmt: skip
            called = Pass(function, tuple(options))
            return _drive(called, subject.graph, lambda: function(subject, *args, **kwargs), shown)

        return run

    return decorate


def _drive(
    called: Pass, graph: fx.Graph, call: Callable[[], T], shown: Shown | None = None, of: str = "", lint: bool = False
) -> T:
    asked = flags()
    dump = dump_of(graph, asked.dump)
    start_s, took_s, failed, result = time.perf_counter(), 0.0, True, None
    try:
        with within(dump):
            result = call()
        took_s = time.perf_counter() - start_s
        if (shown is None and result is not UNTOUCHED) or asked.check:
            _check_order(graph)
        if lint or asked.check:
            graph.lint()
        failed = False
        return result
    except (AutopartError, PassError, MemoryError):
        raise
    except Exception as error:
        raise _failed(called, of, error) from error
    finally:
        if dump is not None:
            took_s = took_s or time.perf_counter() - start_s
            dump.record(graph, called.name, _said(called, of), took_s, failed, shown or Shown(), result)


def _failed(called: Pass, of: str, error: Exception) -> PassError:
    node = _node_of(error)
    at = f" at '{node.name}'" if node is not None else ""
    pass_failure = AutopartError(
        f"pass {_said(called, of)} failed{at}",
        why=f"{type(error).__name__}: {error}",
        where=(source_text(node) or module_path(node)) if node is not None else "",
        hint="this is a fault of autopart: report it with the model and the dump (AUTOPART_DUMP=folder)",
    )
    return PassError(str(pass_failure))


def _said(called: Pass, of: str) -> str:
    return f"{called} of {of}" if of else str(called)


def _node_of(error: Exception) -> fx.Node | None:
    """Return the node that a failed pass was working on, found in the local variables of the traceback.

    The result is the variable `node` of the innermost frame that has such a variable. Otherwise it is any local
    variable that is a node, or None.
    """
    named = other = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        nodes = {name: local for name, local in frame.f_locals.items() if isinstance(local, fx.Node)}
        named = nodes.get("node", named)
        other = next(iter(nodes.values()), other)
    return named if named is not None else other


def _check_order(graph: fx.Graph) -> None:
    """Raise RuntimeError if a node uses a later node or an erased node."""
    earlier: set[fx.Node] = set()
    for node in graph.nodes:
        if not earlier.issuperset(node.all_input_nodes):
            missing = [source.name for source in node.all_input_nodes if source not in earlier]
            raise RuntimeError(f"'{node.name}' uses '{missing[0]}', which is not computed before it")
        earlier.add(node)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove unused calls, except random operators, whose removal would change later random numbers."""
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or not draws_random_numbers(node):
            graph.erase_node(node)

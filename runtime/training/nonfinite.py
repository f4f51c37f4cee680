"""NaN and infinity in a training step: detection on all ranks, and search for their origin."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import TorchDispatchMode
from autopart.compat.training_internals import backward_traceback, compiled_from
from autopart.errors import NonFiniteError
from autopart.ir.graph import describe
from autopart.runtime.comm.process_mesh import Process, gather_over_all, is_on_any_rank
from autopart.runtime.consistency.rank_checks import by_rank

if TYPE_CHECKING:
    from autopart.runtime.training.step_options import StepOptions

SHOWN = 3
"""Maximum number of gradients that a message names."""
_COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of operators whose results other ranks compute."""
_GENERATED = re.compile(r'File "(<eval_with_key>[^"]*)", line (\d+)')


def bad_entries(value: Any) -> str:
    """Describe the NaN and infinities of a value: `is nan`, `holds 3 nan of 64`; "" if all are finite."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return ""
    value = value.detach()
    nans, infinities = int(value.isnan().sum()), int(value.isinf().sum())
    if not nans + infinities:
        return ""
    if value.dim() == 0:
        return "is nan" if nans else f"is {float(value.real):g}"
    counts = " and ".join(f"{count} {word}" for count, word in ((nans, "nan"), (infinities, "inf")) if count)
    return f"holds {counts} of {value.numel()}"


@torch.no_grad()
def all_finite(values: Iterable[Tensor], process: Process) -> bool:
    """Return True if the values of all ranks are finite. A collective call."""
    largest = [torch.linalg.vector_norm(value, float("inf")) for value in map(_dense, values) if value.numel()]
    finite = not largest or bool(torch.stack([norm.isfinite() for norm in largest]).all())
    return not is_on_any_rank(not finite, process)


def nonfinite_results(losses: Sequence[Tensor], grads: Mapping[str, Tensor], process: Process) -> str:
    """Describe the NaN and infinities in the losses and gradients of all ranks; "" if there are none.

    A collective call. All ranks return the same text.

    Args:
        losses: losses of the microbatches; [] on ranks that do not run the last stage.
        grads: {name of a parameter: its local gradient}.
    """
    if all_finite([*losses, *grads.values()], process):
        return ""
    mine = dict([("the loss", text) for loss in losses if (text := bad_entries(loss))])
    mine |= {f"the gradient of '{name}'": text for name, grad in grads.items() if (text := bad_entries(_dense(grad)))}
    found: dict[str, str] = {}
    for theirs in gather_over_all(mine, process):
        found = {**theirs, **found}
    named = [f"{name} {text}" for name, text in sorted(found.items(), key=lambda pair: pair[0] != "the loss")]
    return "; ".join([*named[:SHOWN], *([f"and {len(named) - SHOWN} more"] if len(named) > SHOWN else [])])


def _dense(value: Tensor) -> Tensor:
    return value.coalesce().values() if value.is_sparse else value


def report_nonfinite(found: str, origins: str, options: StepOptions, process: Process) -> None:
    """Raise NonFiniteError for a step whose loss or gradients are not finite, or warn if it is skipped.

    Args:
        found: result of `nonfinite_results`.
        origins: operators that compute the first NaN or infinity, if `options.locate` is set; else "".
    """
    if options.on_nonfinite == "skip":
        process.skipped_steps += 1
        if process.rank == 0:
            where = f" ({origins})" if origins else ""
            warnings.warn(f"skipped a batch: {found}{where}", RuntimeWarning, stacklevel=7)
        return
    hint = "step(..., locate=True) names the operator that computes it; on_nonfinite='skip' drops such batches"
    if options.locate:
        hint = "other weights, a smaller learning rate, or an epsilon there; on_nonfinite='skip' drops such batches"
    raise NonFiniteError("the loss or a gradient is not finite", why=found, where=origins, hint=hint)


class OriginSearch(TorchDispatchMode):
    """Dispatch mode that finds the first operator that computes NaN or infinity from finite arguments.

    NaN from infinite arguments counts too. The mode covers forward and backward, but ignores uninitialized memory and
    collectives. It names operators by their nodes in `graphs` and in the submodules of `graphs`.
    """

    def __init__(self, graphs: Iterable[fx.GraphModule]):
        super().__init__()
        self.roots = list(graphs)
        self.nan, self.infinity = "", ""

    @functools.cached_property
    def graph_of_file(self) -> dict[str, fx.GraphModule]:
        """{file name of generated code: its graph}. Computed when an operator runs, so the code exists."""
        graphs = [one for root in self.roots for one in root.modules() if isinstance(one, fx.GraphModule)]
        return {code.co_filename: graph for graph in graphs for code in _code_of(graph)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.nan or func.namespace in _COLLECTIVES or "empty" in func.__name__:
            return func(*args, **kwargs)
        before = [*_bad_kinds((args, kwargs))]
        result = func(*args, **kwargs)
        after = {*_bad_kinds(result)}
        if "nan" in after and "nan" not in before:
            source = "finite numbers"
            if "inf" in before:
                source = f"infinities, which {self.infinity} computes" if self.infinity else "infinities"
            self.nan = f"{self._name(func)} computes nan from {source}"
        elif "inf" in after and "inf" not in before and not self.infinity:
            self.infinity = self._name(func)
        return result

    @property
    def origin(self) -> str:
        """Description of the operator; "" if this rank's operators compute no NaN and no infinity."""
        return self.nan or (f"{self.infinity} computes infinity from finite numbers" if self.infinity else "")

    def _name(self, func: Any) -> str:
        """Return the name of the graph node whose forward or backward runs an operator."""
        for line in reversed(backward_traceback()):
            if (place := _GENERATED.search(line)) and (name := self._node(place[1], int(place[2]))):
                return f"the backward of {name}"
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if name := self._node(frame.f_code.co_filename, frame.f_lineno):
                return name
            frame = frame.f_back
        return f"operator {func}"

    def _node(self, filename: str, line: int) -> str:
        """Describe the graph node that a line of generated code computes; "" if there is none."""
        graph = self.graph_of_file.get(filename)
        target = re.match(r"\s*(\w+)", linecache.getline(filename, line))
        nodes = [] if graph is None or target is None else graph.graph.nodes
        return next((describe(node) for node in nodes if target is not None and node.name == target[1]), "")


def _code_of(graph: fx.GraphModule) -> list[CodeType]:
    """Return a graph's generated code, and the code that `torch.compile` got, which may be older."""
    functions: list[Any] = [type(graph).forward, compiled_from(graph.forward)]
    return [function.__code__ for function in functions if function is not None]


def _bad_kinds(values: Any) -> Iterator[str]:
    """Yield "nan" or "inf" for each tensor or float, in nested `values`, that contains it."""
    if isinstance(values, Mapping):
        values = values.values()
    elif isinstance(values, float):
        values = (torch.tensor(values),)
    elif isinstance(values, Tensor):
        if (values.is_floating_point() or values.is_complex()) and values.layout == torch.strided:
            if bool(values.isnan().any()):
                yield "nan"
            if bool(values.isinf().any()):
                yield "inf"
        return
    elif not isinstance(values, (tuple, list)):
        return
    for value in values:
        yield from _bad_kinds(value)


@contextmanager
def searching(graphs: Iterable[fx.GraphModule]) -> Iterator[OriginSearch]:
    """Context manager in which graphs run uncompiled, and an `OriginSearch` sees all operators."""
    search = OriginSearch(graphs)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of anomaly detection, which stores where each backward comes from
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        stack.enter_context(search)
        yield search


def origins_on_all_ranks(origin: str, begins: Mapping[str, Any], process: Process) -> str:
    """Return the origins of NaN and infinity that all ranks have found, as one text. A collective call.

    Args:
        origin: `OriginSearch.origin` of this rank.
        begins: {name: input or local parameter} of the step. If any of them have NaN, they are the origin. The text
            names those with infinity last, because infinity can be intended, as in a mask.
    """
    bad = [f"'{name}' {text} before the step" for name, value in begins.items() if (text := bad_entries(value))]
    nans = [text for text in bad if " nan" in text]
    mine = "; ".join(filter(None, (nans or [origin, *bad])[: SHOWN + 1]))
    if process.host_group is None:
        return mine
    return by_rank(gather_over_all(mine, process), process.host_group, leaves_out_empty=True)

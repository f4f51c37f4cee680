"""Host functions: code of a forward that uses numpy, scipy or Python, as one operator of a trace.

Examples are the masks of SpecAugment, which numpy draws, and the matching of boxes by
`scipy.optimize.linear_sum_assignment`. A trace has no values, so the function itself becomes an operator in the
namespace `host_function`. Its results have no gradient. The trace needs their shapes: the user passes example results
(`like`), or the function runs during the trace on the real inputs, with random numbers in place of activations.

- A function that reads only inputs, or no tensor, counts as a random operator. So each call of the model runs it once
  on the global batch, before the microbatches, in the order of the model. The first rank's results are sent to all
  ranks.
- A function of activations runs on gathered values, on every rank. It must not draw random numbers.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from autopart.common.scoped import attributes, variable
from autopart.compat.torch_internals import outside_of_tracing, tree_flatten, tree_unflatten
from autopart.errors import Refusal
from autopart.ir.graph import HOST_FUNCTION
from autopart.tracing.dynamic.found_functions import FoundFunctions, ReadsArray
from autopart.tracing.dynamic.index_lists import IndexList
from autopart.tracing.python.concrete_constants import UNKNOWN, ConcreteConstants
from autopart.tracing.python.python_state import random_state
from autopart.tracing.trace_errors import LostInTrace

F = TypeVar("F", bound=Callable[..., Any])
Like = Any
"""Type of the option `like`: example tensors of the results, or a function that returns them."""
_LIBRARY = torch.library.Library(HOST_FUNCTION, "FRAGMENT")
_PLAIN = (bool, int, float, complex, str, bytes, range, type(None), type, np.dtype, torch.dtype, torch.device)
_NUMBERS = (bool, int, float, np.generic)
_DRAWS = {
    np.random: ("rand", "randn", "random", "random_sample", "uniform", "normal", "randint", "choice", "permutation",
                "beta", "binomial", "gamma", "exponential", "standard_normal", "poisson"),
    random: ("random", "uniform", "randint", "randrange", "choice", "sample", "gauss", "betavariate", "normalvariate"),
}  # fmt: skip
"""Functions that draw from the global random generators of numpy and Python, and return new values."""
_traced: ContextVar[ConcreteConstants | None] = ContextVar("the inputs of the running trace", default=None)
_found: ContextVar[FoundFunctions | None] = ContextVar("host functions found in the user's code", default=None)
_runs: ContextVar[bool] = ContextVar("a host function runs", default=False)
exchange: ContextVar[Callable[[Callable[[], list[Tensor]]], list[Tensor]] | None]
exchange = ContextVar("runs a host function, and returns the first rank's results", default=None)


def _operators(*names: str) -> list[Callable[..., Any]]:
    """Return host functions that call the methods of numpy arrays with these names, such as `__add__`."""

    def operator_of(name: str) -> Callable[..., Any]:
        return lambda *operands: host_function(getattr(np.ndarray, name))(*operands)

    return [operator_of(name) for name in names]


class HostArray(IndexList):
    """Stand-in for a numpy array of activations, or an array or list that a host function returns.

    A host function accepts it, and its operators and methods are host functions. It becomes a tensor by `torch.tensor`,
    `torch.as_tensor` or `torch.from_numpy`, and it can index a tensor.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def size(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def copy(self) -> HostArray:
        return HostArray(self.tensor)

    def __getitem__(self, index: Any) -> HostArray:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, (int, slice)) for part in parts):
            self.lost()
        return HostArray(self.tensor[index])

    def __iter__(self) -> Iterator[HostArray]:
        return iter([HostArray(part) for part in self.tensor.unbind()])

    def __getattr__(self, name: str) -> Any:
        method = getattr(np.ndarray, name, None)
        if name.startswith("__") or not callable(method):
            return super().__getattr__(name)
        return functools.partial(host_function(method), self)

    def lost(self, *_: Any, **__: Any) -> NoReturn:
        need_values(self.tensor)

    __eq__, __ne__ = _operators("__eq__", "__ne__")
    __lt__, __le__, __gt__, __ge__ = _operators("__lt__", "__le__", "__gt__", "__ge__")
    __add__, __radd__, __sub__, __rsub__ = _operators("__add__", "__radd__", "__sub__", "__rsub__")
    __mul__, __rmul__, __truediv__, __rtruediv__ = _operators("__mul__", "__rmul__", "__truediv__", "__rtruediv__")
    __neg__, __invert__, __and__, __or__ = _operators("__neg__", "__invert__", "__and__", "__or__")
    __setitem__ = __contains__ = __reversed__ = __array__ = __bool__ = __int__ = __float__ = __index__ = lost
    __hash__ = None  # type: ignore[assignment]


def array_of(tensor: Tensor, func: Callable[..., Any]) -> HostArray:
    """Return a stand-in for `tensor.numpy()`.

    If `func` is `__array__`, numpy needs the values, and an exception is raised (see `need_values`).
    """
    if func is Tensor.numpy:
        return HostArray(tensor.detach())
    need_values(tensor)


def need_values(tensor: Tensor) -> NoReturn:
    """Raise an exception, because Python needs the values of activations.

    Raises ReadsArray if a function that computes with them is found, LostInTrace otherwise.
    """
    found = _found.get()

    def is_array(value: Any) -> bool:
        return value is tensor or any(isinstance(leaf, HostArray) for leaf in tree_flatten(value)[0])

    if found is not None and found.may_be_added(sys._getframe(1), is_array):
        raise ReadsArray
    raise LostInTrace(
        "Python computes with a numpy array",
        "the values of the array differ in every call, and a trace has no values",
        "the same computation in torch, or autopart.host_function around the function that computes with the array",
        Refusal.NUMPY,
    )  # fmt: skip


def host_function(fn: F | None = None, *, like: Like = None) -> Any:
    """Mark a function that computes on the host, with numpy, scipy or any library, for partitioned models.

    Without a partitioned model the function runs as before. In a program of autopart, it is one operator:

    - If its tensors depend on inputs alone, or if it has none, it runs once per call on the global batch. All ranks
      get the first rank's results. So the draws from numpy's and Python's generators equal those of an unpartitioned
      run with the first rank's generator states.
    - If its tensors are activations, they are gathered, and every rank runs the function on the full tensors. It must
      return equal results on all ranks, so it must not draw random numbers.

    Args:
        fn: the function. Its arguments are tensors, numbers, strings and containers of these. It must not change them.
            It returns tensors, numpy arrays, numbers, or containers of these. No gradient flows through it.
        like: example tensors of the results, in the structure of the results; or a function of the arguments that
            returns them. Only shapes and dtypes are used. None: the function runs on the inputs of the traced call,
            with random numbers in place of activations. The shapes must be equal in every call.
    Raises:
        TraceError: from the trace, if the shapes of the results are not known or differ between runs.

    Example:
        >>> @autopart.host_function    # doctest: +SKIP
        ... def permutation(n):
        ...     return torch.from_numpy(np.random.permutation(n))
    """
    if fn is None:
        return functools.partial(host_function, like=like)

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        known = _traced.get()
        if known is None or _runs.get():
            return fn(*args, **kwargs)
        return _HostCall(fn, like, known, args, kwargs).traced()

    return called


@contextmanager
def host_functions(model: nn.Module, known: ConcreteConstants, found: FoundFunctions, draws: bool) -> Iterator[None]:
    """Trace host functions as operators, inside a `with` block.

    Args:
        known: how tensors of the trace are computed from the inputs.
        found: functions that compute with arrays of activations.
        draws: True to also make operators of functions that draw random numbers of Python and numpy: those of `_DRAWS`,
            and functions that use these generators, in the Python modules that define the model's classes.
    """
    from_numpy = torch.from_numpy
    exchanged: dict[tuple[Any, str], Any] = {
        (torch, "from_numpy"): lambda array: array.tensor if isinstance(array, HostArray) else from_numpy(array)
    }
    if draws:
        exchanged |= {(place, name): host_function(getattr(place, name)) for place in _DRAWS for name in _DRAWS[place]}
        for users_module in {type(module).__module__ for module in model.modules()} & sys.modules.keys():
            for name, function in list(vars(sys.modules[users_module]).items()):
                if isinstance(function, FunctionType) and _draws(function):
                    exchanged[sys.modules[users_module], name] = _unless_of_activations(function, known)
    with attributes(exchanged), found.given(_of_arrays), variable(_traced, known), variable(_found, found):
        yield


def _draws(function: FunctionType) -> bool:
    """Return True if the code of a function uses a global generator of Python or numpy."""
    if not function.__code__.co_filename or function.__module__.partition(".")[0] in ("torch", "numpy", "random"):
        return False
    todo, names = [function.__code__], set[str]()
    while todo:
        code = todo.pop()
        names |= {*code.co_names}
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    used = [function.__globals__.get(name) for name in names]
    return ("random" in names and np in used) or any(one is np.random or one is random for one in used)


def _unless_of_activations(function: FunctionType, known: ConcreteConstants) -> Callable[..., Any]:
    marked = host_function(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_known = all(known.is_recorded(tensor) and not tensor.requires_grad for tensor in tensors)
        return marked(*args, **kwargs) if is_known and _are_supported(leaves) else function(*args, **kwargs)

    return called


def _of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function, so that calls on activations without gradients run it as a host function."""
    marked = host_function(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        is_of_activations = bool(tensors) or any(isinstance(leaf, HostArray) for leaf in leaves)
        is_host_call = is_of_activations and not has_gradient and _are_supported(leaves)
        return marked(*args, **kwargs) if is_host_call else function(*args, **kwargs)

    return called


def _are_supported(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (Tensor, HostArray, np.ndarray, *_NUMBERS, *_PLAIN)) for leaf in leaves)


class _HostCall:
    """One call of a host function in a trace."""

    def __init__(
        self, fn: Callable[..., Any], like: Like, known: ConcreteConstants, args: tuple, kwargs: dict[str, Any]
    ):
        self.fn, self.like, self.known = fn, like, known
        self.name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.leaves = [leaf.tensor if isinstance(leaf, HostArray) else leaf for leaf in self.leaves]
        self.is_array = [isinstance(leaf, HostArray) for leaf in tree_flatten((args, kwargs))[0]]
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, np.ndarray, *_NUMBERS, *_PLAIN)):
                raise self._lost(
                    f"it receives a {type(leaf).__name__}; only tensors, numbers and strings are supported"
                )
        self.tensors = [leaf.detach() for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.is_of_inputs = all(map(known.is_recorded, self.tensors))

    def traced(self) -> Any:
        """Add the call to the trace, and return its results with stand-ins for arrays."""
        kinds, shapes, spec = self._results()
        outputs = self._operator(kinds, shapes)(*self.tensors)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return tree_unflatten([_returned(kind, output) for kind, output in zip(kinds, outputs, strict=True)], spec)

    def _lost(self, why: str) -> LostInTrace:
        hint = "results of one shape, and autopart.host_function(fn, like=...) for results whose shapes it cannot find"
        return LostInTrace(f"{self.name} cannot be run as a host function", why, hint, Refusal.NUMPY)

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """Run the function on these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining).detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        leaves = [leaf.numpy() if is_array else leaf for leaf, is_array in zip(leaves, self.is_array, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        before = list(map(_content, leaves))
        with torch.no_grad(), variable(_runs, True):
            results = self.fn(*args, **kwargs)
        after = list(map(_content, tree_flatten((args, kwargs))[0]))
        if after != before:
            raise self._lost("it changes an argument")
        return results

    def _results(self) -> tuple[list[str], list[tuple[tuple[int, ...], torch.dtype]], Any]:
        """Return the kind, shape and dtype of each result, and the structure of all results."""
        if self.like is not None:
            args, kwargs = tree_unflatten(self.leaves, self.spec)
            with outside_of_tracing():
                return self._forms(self.like(*args, **kwargs) if callable(self.like) else self.like)
        states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        forms = []
        try:
            for seed in range(3):
                operands = [self._operand(tensor, seed) for tensor in self.tensors]
                random.seed(seed)
                np.random.seed(seed)
                before = random_state()
                with outside_of_tracing():
                    forms.append(self._forms(self.call(operands)))
                if not self.is_of_inputs and random_state() != before:
                    raise self._lost("it reads activations and draws random numbers, which would differ between ranks")
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        if any(form != forms[0] for form in forms):
            raise self._lost("the shapes of its results differ between calls")
        return forms[0]

    def _operand(self, tensor: Tensor, seed: int) -> Tensor:
        """Return an argument for a trial run: the real values of an input, or random values for an activation."""
        value = self.known.value_of(torch.clone, tensor) if self.known.is_recorded(tensor) else UNKNOWN
        with outside_of_tracing():
            if value is not UNKNOWN:
                return value.detach().clone()
            if not tensor.is_floating_point():
                return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
            generator = torch.Generator().manual_seed(seed)
            return torch.rand(tuple(tensor.shape), dtype=tensor.dtype, generator=generator)

    def _forms(self, results: Any) -> tuple[list[str], list[tuple[tuple[int, ...], torch.dtype]], Any]:
        leaves, spec = tree_flatten(_with_arrays(results))
        kinds, tensors = [_kind(leaf) for leaf in leaves], _tensors_of(leaves, self.name)
        return kinds, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors], spec

    def _operator(self, kinds: Sequence[str], shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Any:
        """Return the custom operator of this call, created on first use. Its name is equal in all processes."""
        plain = [Tensor if isinstance(leaf, Tensor) else _text(leaf) for leaf in self.leaves]
        operands = [(tuple(t.shape), t.dtype, t.device.type) for t in self.tensors]
        full = repr((self.name, plain, self.is_array, str(self.spec), operands, kinds, shapes, self.is_of_inputs))
        key = self.fn, full
        if key not in _OPERATORS:
            namesakes = sum(1 for other in _OPERATORS if other[1] == full)
            overload = f"of_{hashlib.sha256(full.encode()).hexdigest()[:12]}_{namesakes}"
            name = re.sub(r"\W+", "_", self.name)
            _OPERATORS[key] = self._define(f"{name}.{overload}", shapes)
        return _OPERATORS[key]

    def _define(self, name: str, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Any:
        operands = ", ".join(f"Tensor x{i}" for i in range(len(self.tensors)))
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        dtypes = [tensor.dtype for tensor in self.tensors]

        def results(*tensors: Tensor) -> list[Tensor]:
            before = random_state() if not self.is_of_inputs else None
            leaves = tree_flatten(_with_arrays(self.call([tensor.cpu() for tensor in tensors])))[0]
            computed = _tensors_of(leaves, self.name)
            if before is not None and random_state() != before:
                raise RuntimeError(
                    f"{self.name} draws random numbers and reads activations: ranks would differ. "
                    "Draw them with torch functions, or in a function that reads only inputs of the model"
                )
            upcast = any(tensor.dtype is not dtype for tensor, dtype in zip(tensors, dtypes, strict=True))
            forms = [(tuple(t.shape), s[1] if upcast and t.is_floating_point() else t.dtype)
                     for t, s in zip(computed, shapes, strict=len(computed) == len(shapes))]  # fmt: skip
            if forms != list(shapes) or len(computed) != len(shapes):
                found = [list(shape) for shape, _ in forms]
                raise RuntimeError(
                    f"the host function {self.name} returned tensors of shapes {found}; in the trace they were "
                    f"{[list(shape) for shape, _ in shapes]}. The shapes and dtypes must be equal in every call"
                )
            return [tensor.to(dtype) for tensor, (_, dtype) in zip(computed, shapes, strict=True)]

        def run(*tensors: Tensor) -> Any:
            around = exchange.get() if self.is_of_inputs else None
            on = tensors[0].device if tensors else device
            found = results(*tensors) if around is None else around(lambda: results(*tensors))
            outputs = tuple(tensor.to(on) for tensor in found)
            return outputs if len(outputs) > 1 else outputs[0]

        def fake(*tensors: Tensor) -> Any:
            on = tensors[0].device if tensors else device
            outputs = tuple(torch.empty(shape, dtype=dtype, device=on) for shape, dtype in shapes)
            return outputs if len(outputs) > 1 else outputs[0]

        tags = (torch.Tag.nondeterministic_seeded,) if self.is_of_inputs else ()
        _LIBRARY.define(f"{name}({operands}) -> ({', '.join(['Tensor'] * len(shapes))})", tags=tags)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the results have no gradient
        torch.library.register_fake(f"{HOST_FUNCTION}::{name}", fake, lib=_LIBRARY)
        packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, HOST_FUNCTION), packet), overload)


_OPERATORS: dict[tuple[Any, str], Any] = {}


def _content(leaf: Any) -> Any:
    """Return a snapshot of an argument, to find out later whether a function has changed it."""
    array = leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
    if isinstance(array, Tensor):
        return array.contiguous().view(torch.uint8).numpy().tobytes() if array.numel() and array.ndim else str(array)
    return array.tobytes() if isinstance(array, np.ndarray) else array


def _text(leaf: Any) -> str:
    """Return a text of an argument. Equal values have equal texts in all processes."""
    if isinstance(leaf, np.ndarray):
        return f"{leaf.shape} {leaf.dtype} {hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()}"
    return repr(leaf)


def _with_arrays(results: Any) -> Any:
    """Replace lists of numbers in results by arrays."""
    if isinstance(results, list) and results and all(isinstance(one, _NUMBERS) for one in results):
        return _NumberList(results)
    if type(results) in (list, tuple):
        return type(results)(map(_with_arrays, results))
    return results


class _NumberList:
    """A list of numbers that a host function returns."""

    def __init__(self, numbers: list[Any]):
        self.array = np.asarray(numbers)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    return "number" if isinstance(leaf, _NUMBERS) else "array"


def _tensors_of(leaves: Sequence[Any], name: str) -> list[Tensor]:
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf.detach().cpu())
        elif isinstance(leaf, (np.ndarray, _NumberList, *_NUMBERS)):
            array = leaf.array if isinstance(leaf, _NumberList) else np.asarray(leaf)
            tensors.append(torch.from_numpy(np.array(array, copy=True)))
        else:
            raise LostInTrace(
                f"{name} returns a {type(leaf).__name__}", "a program passes only tensors, arrays and numbers on",
                "tensors, arrays or numbers", Refusal.NUMPY,
            )  # fmt: skip
    return tensors


def _returned(kind: str, output: Tensor) -> Any:
    if kind == "tensor":
        return output
    return output.item() if kind == "number" else HostArray(output)

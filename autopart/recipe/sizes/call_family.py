"""Traced calls that differ only in the sizes of their inputs, and calls that are derived from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from autopart.compat.torch_internals import tree_map
from autopart.ir.program import Program
from autopart.recipe.sizes.fitted_values import Fitted, evaluated, fit
from autopart.recipe.sizes.program_template import ProgramTemplate
from autopart.recipe.sizes.size_anchors import SizeAnchors
from autopart.recipe.sizes.size_formula import NotDerivable, Sizes
from autopart.recipe.sizes.size_relations import SizeRelations
from autopart.tracing.python.size_conditions import SizeCondition

Traced = TypeVar("Traced")
MAX_TRACED = 24
"""Maximum number of traced calls that a family keeps."""


def resized(arguments: Any, tensors: Sequence[Tensor], sizes: Sizes) -> Any:
    """Return the arguments of a call with other sizes.

    A tensor that gets shorter loses values at its end. A tensor that gets longer repeats its values from the start.

    Args:
        arguments: the call, or a part of it.
        tensors: the call's inputs.
        sizes: new sizes of all dims of all inputs, in the order of `sizes_of`.
    """
    remaining = iter(sizes)
    shapes = {id(tensor): [next(remaining) for _ in tensor.shape] for tensor in tensors}

    def at_sizes(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in shapes or [*leaf.shape] == shapes[id(leaf)]:
            return leaf
        result = leaf.detach()
        for dim, size in enumerate(shapes[id(leaf)]):
            times = [1] * leaf.dim()
            times[dim] = -(-size // max(leaf.size(dim), 1))
            result = result.repeat(times).narrow(dim, 0, size)
        return result.contiguous().requires_grad_(leaf.requires_grad)

    return tree_map(at_sizes, arguments)


def sizes_of(tensors: Sequence[Tensor]) -> Sizes:
    """Return the sizes of all dims of all inputs of a call, as one flat tuple."""
    return tuple(size for tensor in tensors for size in tensor.shape)


@dataclass(frozen=True)
class _Variables:
    """Dims of a call's inputs whose sizes vary between traced calls, grouped to variables.

    Dims whose sizes are equal in every traced call form one variable.

    Attributes:
        dims: for each variable, its dims, as indices into the tuple that `sizes_of` returns.
    """

    dims: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(calls: Sequence[Sizes]) -> _Variables:
        columns = defaultdict[Sizes, list[int]](list)
        for index, column in enumerate(zip(*calls, strict=True)):
            if len({*column}) > 1:
                columns[column].append(index)
        return _Variables(tuple(map(tuple, columns.values())))

    def values(self, call: Sizes) -> Sizes:
        """Return the size of each variable in a call. Raises NotDerivable if the dims of a variable differ."""
        if any(len({call[dim] for dim in dims}) > 1 for dims in self.dims):
            raise NotDerivable("dims that were equal in all traced calls differ")
        return tuple(call[dims[0]] for dims in self.dims)


class _Conditions:
    """Branches of a model's Python code that depend on sizes (`if length > 512`), in several traced calls.

    Raises NotDerivable if the calls take different branches.
    """

    def __init__(self, conditions: Sequence[Sequence[SizeCondition]], sizes: Sequence[Sizes]):
        if len({len(one) for one in conditions}) > 1:
            raise NotDerivable("the model's Python makes other decisions by sizes")
        self.fitted: list[Fitted] = []
        for row in dict.fromkeys(zip(*conditions, strict=True)):
            try:
                fitted = fit(row, sizes, [])
            except NotDerivable:
                if not row[0].is_checked_at_run_time:
                    raise
                continue
            if fitted:
                self.fitted.append(fitted)

    def check(self, sizes: Sizes) -> None:
        """Raise NotDerivable if the model's Python code would take another branch for these sizes."""
        for fitted in self.fitted:
            condition = evaluated(fitted, sizes)
            if not condition.holds:
                raise NotDerivable(f"{condition.name}({condition.left}, {condition.right}) is not {condition.result}")


class _Template(NamedTuple):
    """A program as a function of sizes, and checks of the sizes for which the function is valid."""

    program: ProgramTemplate
    conditions: _Conditions
    relations: SizeRelations


class CallFamily(Generic[Traced]):
    """Traced calls that differ in the sizes of their inputs only.

    A program for other sizes is derived from traced calls with smaller and larger sizes whose graphs have the same
    structure. Python code that branches on a size mostly compares it with a limit, as in `if length > 512`. If a
    smaller and a larger call are on the same side of the limit, all sizes between them are on that side too.

    Args:
        write: returns the program of a traced call for a purpose, such as "forward".
        conditions: returns the branches on sizes that a traced call took.
        num_shards: `num_shards(call, axes)` returns, for each size of a traced call, the number of shards over these
            mesh axes times the number of microbatches. A program is derived only for sizes whose greatest common
            divisor with this number is the same as in the traced calls. `axes` are the axes over which the program
            shards a dim whose size varies; None: all axes.
        holds: returns True if the Python values that a traced call read are unchanged.

    Attributes:
        reason: why the last program could not be derived.
    """

    def __init__(
        self, write: Callable[[Traced, str], Program], conditions: Callable[[Traced], Sequence[SizeCondition]],
        num_shards: Callable[[Traced, Collection[str] | None], Sizes], holds: Callable[[Traced], bool],
    ):  # fmt: skip
        self.write, self.conditions, self.num_shards, self.holds = write, conditions, num_shards, holds
        self.reason = ""
        self.calls: dict[Sizes, Traced] = {}
        self.anchors = SizeAnchors()
        self._templates: dict[tuple[str, frozenset[Sizes]], _Template | NotDerivable] = {}

    def add(self, sizes: Sizes, traced: Traced) -> None:
        """Add a traced call. If there are more than `MAX_TRACED`, the oldest is dropped."""
        if len(self.calls) >= MAX_TRACED:
            del self.calls[next(iter(self.calls))]
        self.calls[sizes] = traced
        self._templates.clear()

    def traced(self, sizes: Sizes) -> Traced | None:
        """Return the traced call of these sizes; None if there is none, or Python values that it read changed."""
        found = self.calls.get(sizes)
        return found if found is not None and self.holds(found) else None

    def anchor(self, sizes: Sizes) -> Sizes | None:
        """Return the sizes of a further call to trace, so that the call with `sizes` can be derived from it.

        Returns None if no further trace would help.
        """
        calls = [call for call, traced in self.calls.items() if self.holds(traced)]
        if len(calls) < 2:
            return None
        return self.anchors.of(sizes, calls, self.num_shards(self.calls[calls[0]], None))

    def neighbours(self, sizes: Sizes) -> Iterator[list[Sizes]]:
        """Yield sets of traced calls from which a call with `sizes` may be derived.

        The first sets have most sizes in common with the call.
        """
        by_dims = defaultdict[frozenset[int], list[Sizes]](list)
        for call, traced in self.calls.items():
            if self.holds(traced):
                by_dims[frozenset(dim for dim, size in enumerate(call) if size != sizes[dim])].append(call)
        for dims in sorted(filter(None, by_dims), key=len):
            calls = [call for found, others in by_dims.items() if found <= dims for call in others]
            yield from self._alike(calls)
            shards = self.num_shards(self.calls[calls[0]], None)
            divided = [call for call in calls if _divisors(call, shards) == _divisors(sizes, shards)]
            if len(divided) < len(calls):
                yield from self._alike(divided)
            # Uneven shards, such as those of zigzag, are formulas of sizes with equal remainders.
            remainders = [call for call in divided if _remainders(call, shards) == _remainders(sizes, shards)]
            if len(remainders) < len(divided):
                yield from self._alike(remainders)

    def _alike(self, calls: Sequence[Sizes]) -> Iterator[list[Sizes]]:
        """Group calls in which the model's Python takes the same branches. Yield one list per group."""
        groups = defaultdict[Hashable, list[Sizes]](list)
        for call in calls:
            conditions = self.conditions(self.calls[call])
            groups[tuple((c.name, c.result) for c in conditions if type(c.result) is bool)].append(call)
        yield from groups.values()

    def derived(self, sizes: Sizes, purpose: str, constant: bool = False) -> tuple[Program, Traced]:
        """Return (program for a call that was not traced, one of the traced calls it is derived from).

        Raises NotDerivable, with the reason.

        Args:
            constant: True to write the sizes into the graphs as constants. By default, the programs of all sizes share
                their graphs.
        """
        error = NotDerivable("no traced calls have smaller and larger sizes")
        for calls in self.neighbours(sizes):
            try:
                if len(calls) < 2:
                    raise error
                if not all(min(known) <= size <= max(known) for size, *known in zip(sizes, *calls, strict=True)):
                    raise NotDerivable("a size is smaller or larger than in all traced calls")
                variables = _Variables.of(calls)
                values = variables.values(sizes)
                template, conditions, relations = self._template(purpose, calls, variables)
                relations.check(values)
                conditions.check(values)
                shards = self.num_shards(self.calls[calls[0]], template.sharded_over)
                if any(_divisors(call, shards) != _divisors(sizes, shards) for call in calls):
                    raise NotDerivable("a size divides otherwise by the number of shards")
                program = template.with_constant_sizes(values) if constant else template.at(values)
                return program, self.calls[calls[0]]
            except NotDerivable as reason:
                error = reason
        self.reason = str(error)
        raise error

    def _template(self, purpose: str, calls: Sequence[Sizes], variables: _Variables) -> _Template:
        key = purpose, frozenset(calls)
        if key not in self._templates:
            sizes, traced = [variables.values(call) for call in calls], [self.calls[call] for call in calls]
            try:
                conditions = _Conditions([self.conditions(one) for one in traced], sizes)
                program = ProgramTemplate([self.write(one, purpose) for one in traced], sizes)
                self._templates[key] = _Template(program, conditions, SizeRelations(sizes))
            except NotDerivable as reason:
                self._templates[key] = reason
        template = self._templates[key]
        if isinstance(template, NotDerivable):
            raise template
        return template


def _divisors(sizes: Sizes, num_shards: Sizes) -> list[int]:
    return [math.gcd(size, shards) for size, shards in zip(sizes, num_shards, strict=True)]


def _remainders(sizes: Sizes, num_shards: Sizes) -> list[int]:
    return [size % shards for size, shards in zip(sizes, num_shards, strict=True)]

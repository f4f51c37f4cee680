"""Work of the operators of a stage for one microbatch: kernels and collectives, from local shapes.

The FLOPs of a matrix product are those that torch counts for the local shapes. All other operators are counted by their
memory traffic. The forward of a view allocates nothing and costs nothing.

The gradient of each operand of a matrix product costs as much as the product. Fused attention recomputes its scores
(Dao et al. 2022, arXiv:2205.14135, section 3.1): five products in backward, two in forward. The backward of all other
operators reads the output's gradient and the saved tensors, and writes the inputs' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.common.matrix_alignment import unaligned
from autopart.cost.count.saved_tensors import TensorSpec
from autopart.cost.count.scaling_exponents import ScalingExponents
from autopart.cost.count.stage_footprint import Liveness, LocalValue, MemoryBuffer, memories, needs_grad
from autopart.cost.flops import FORMULAS, counted_flops
from autopart.cost.predict.collective_costs import PARTS
from autopart.cost.predict.operator_work import CHOSEN, NOTHING, Exponents, Size, Work
from autopart.ir.collective_nodes import ROTATING
from autopart.ir.facts import cost_notes, facts
from autopart.ir.graph import operator_name, tensor_inputs
from autopart.ir.layout import DIRECTIONS, mesh_axes_of
from autopart.ir.program import Program
from autopart.ir.trace import Trace
from autopart.ops.operators import is_cast

_SUMMED = 3
"""Number of values that adding two gradients reads or writes per element: two reads and one write."""


class OperatorWork(NamedTuple):
    """Kernels and collectives (`Work`) of one operator of a stage for one microbatch.

    Args:
        forward: kernels and collectives of the forward.
        input_backward: backward kernels and collectives that compute gradients of activations.
        weight_backward: backward kernels and collectives that compute gradients of the stage's weights.
        recompute: forward kernels and collectives that run again before the backward.
        accumulate: additions of gradients of weights to the gradients of earlier microbatches. The additions count
            at the first operator that reads the weight.
    """

    node: fx.Node
    forward: tuple[Work, ...]
    input_backward: tuple[Work, ...] = ()
    weight_backward: tuple[Work, ...] = ()
    recompute: tuple[Work, ...] = ()
    accumulate: tuple[Work, ...] = ()


def counted(trace: Trace, program: Program, walks: Sequence[Liveness], fused: bool = False) -> list[list[OperatorWork]]:
    """Return a list per stage: the work of each operator for one microbatch, on the stage's first rank.

    Args:
        walks: liveness analysis of every stage.
        fused: True to count the operators between two matrix products or collectives as one kernel, as compilers and
            Megatron (Narayanan et al. 2021, section 4.2) fuse them. The kernel reads each input once and writes each
            output once. Its work counts at the last of its operators.
    """
    growth = ScalingExponents(trace, program)
    known: dict[Any, OperatorWork] = {}
    counters = [_Counter(walk, growth, known, fused) for walk in walks]
    return [counter.fused(counter.stage()) if fused else counter.stage() for counter in counters]


class _Counter:
    """Counter of the kernels and collectives of one stage.

    Args:
        known: {call signature: work}, a cache. Equal operators of repeated blocks are counted only once.
        fuses: True if pointwise operators are fused.
    """

    def __init__(self, walk: Liveness, growth: ScalingExponents, known: dict[Any, OperatorWork], fuses: bool):
        self.walk, self.growth, self.known, self.fuses = walk, growth, known, fuses
        self.alive = walk.reached()
        self.weights = walk.of_weights(self.alive)
        self.again = {memory for kept in walk.keeps.values() for memory in kept if memory.again}

    def stage(self) -> list[OperatorWork]:
        """Return the kernels and collectives of all operators of the stage."""
        rerun = recomputed_nodes(self.walk, self.alive)
        added, read = set[fx.Node](), set[fx.Node]()
        operators = []
        for node in self.walk.values:
            if node.op != "call_function":
                continue
            one = self._one(node)
            trained = [n for n in node.all_input_nodes if n.op == "get_attr" and n in self.alive and n not in added]
            added.update(trained)
            sums = tuple(Work("other", self.size(weight) * _SUMMED, in_place=True) for weight in trained)
            joined, to_weights = self._gradient_additions(node, read), node in self.weights
            operators.append(one._replace(
                input_backward=one.input_backward + joined * (not to_weights),
                weight_backward=one.weight_backward + joined * to_weights,
                recompute=one.forward if node in rerun else (), accumulate=sums,
            ))  # fmt: skip
        return operators

    def _gradient_additions(self, node: fx.Node, read: set[fx.Node]) -> tuple[Work, ...]:
        """Return the kernels that add up the gradients of values with several consumers.

        If a node reads a value that an earlier node reads too, one addition counts at the node. Compiled graphs fuse
        the additions into other kernels, so this function is for eager mode only.

        Args:
            read: values that earlier nodes read. The function adds the inputs of this node to the set.
        """
        if self.fuses or node not in self.alive:
            return ()
        works = []
        for used in tensor_inputs(node):
            found = self.walk.values[used]
            if used in read:
                works.append(Work("other", self.size(used) * _SUMMED, in_order=True))
            elif used.op != "get_attr" and isinstance(found, LocalValue) and needs_grad(found):
                read.add(used)
        return tuple(works)

    def fused(self, operators: Sequence[OperatorWork]) -> list[OperatorWork]:
        """Replace consecutive operators between matrix products or collectives by one fused kernel."""
        fused, chain = [], list[OperatorWork]()
        ends: tuple[OperatorWork | None, ...] = (*operators, None)
        for one in ends:
            if one is not None and all(work.kind == "other" for works in one[1:4] for work in works):
                chain.append(one)
                continue
            fused += self._chain(chain) if sum(map(bool, (c.forward for c in chain))) > 1 else chain
            fused += [one] if one is not None else []
            chain = []
        return fused

    def _chain(self, chain: Sequence[OperatorWork]) -> list[OperatorWork]:
        nodes = {one.node for one in chain if not is_cast(one.node)}
        works = [one.node for one in chain if one.forward]
        ends = [node for node in nodes if not nodes.issuperset(node.users)]
        written = {m for node in ends for m in memories(self.walk.values[node]) if m.made_by in nodes}
        sources = [used for node in works for used in tensor_inputs(node)]
        read = {m for used in sources for m in memories(self.walk.values[used], lasting=True) if m.made_by not in nodes}
        tables = {m for node in works if cost_notes(node).looks_up
                  for m in memories(self.walk.values[tensor_inputs(node)[0]], lasting=True)}  # fmt: skip
        rows = Size.sum(self._made(node) for node in works if cost_notes(node).looks_up)
        kept = {memory for node in nodes for memory in self.walk.keeps.get(node, ())}
        grads = {m for used in sources if needs_grad(value := self.walk.values[used])
                 for m in memories(value, lasting=True) if m in read}  # fmt: skip
        forward = (Work("other", Size.sum((rows, self._bytes(read - tables), self._bytes(written))), in_order=True),)
        again = self._bytes(kept & (read | written))
        backward = Work("other", Size.sum((self._bytes(written), again, self._bytes(grads))), in_order=True)
        back = () if self.alive.isdisjoint(nodes) else (backward,)
        of_inputs = any(one.input_backward for one in chain)
        last = chain[-1]._replace(
            forward=forward, recompute=forward if any(one.recompute for one in chain) else (),
            input_backward=back if of_inputs else (), weight_backward=() if of_inputs else back,
        )  # fmt: skip
        return [*(OperatorWork(one.node, (), accumulate=one.accumulate) for one in chain[:-1]), last]

    def _bytes(self, pieces: Set[MemoryBuffer]) -> Size:
        return Size.sum(map(self.growth.of_memory, pieces))

    def size(self, node: fx.Node) -> Size:
        return self.growth.of_value(node, self.walk.values[node])

    def _one(self, node: fx.Node) -> OperatorWork:
        name = operator_name(node).removeprefix("autopart::")
        if name in DIRECTIONS:
            return self._conversion(node, name)
        if name in ROTATING:
            return self._rotation(node)
        if is_cast(node):  # `table_rows.Parameter.cast` counts it
            return OperatorWork(node, ())
        read = [self.walk.values[used] for used in tensor_inputs(node)]
        forms = tuple((v.form, self.growth.of(n)) for n, v in zip(tensor_inputs(node), read, strict=True)
                      if isinstance(v, LocalValue))  # fmt: skip
        others = (*(repr(a) for a in node.args if not isinstance(a, fx.Node)), str(node.kwargs))
        which = tuple(used in self.weights for used in tensor_inputs(node))
        key = node.target, forms, others, which, node in self.alive, self.growth.of(node)
        if key not in self.known:
            self.known[key] = self._call(node, read, which)
        return self.known[key]._replace(node=node)

    def _conversion(self, node: fx.Node, name: str) -> OperatorWork:
        if self.walk.gathers_unsharded(node):
            return OperatorWork(node, ())
        forward, backward = DIRECTIONS[name]
        axis: Any = node.args[1]
        sides = (node, node.args[0]) if backward else (node,)
        forms = {n: self.walk.values[n].form for n in sides}
        whole = max(forms, key=lambda n: math.prod(forms[n].shape))  # the unsharded side
        out_dtype, whole_dtype = forms[node].dtype, forms[whole].dtype

        def sent(dtype: torch.dtype) -> Size:
            size = self.size(whole) if forward != "all_to_all" else self._on_all_ranks(self.size(whole), axis)
            return size if dtype == whole_dtype else size * (dtype.itemsize / whole_dtype.itemsize)

        moved = self._moved(axis, forward, sent(out_dtype))
        if node not in self.alive:
            return OperatorWork(node, moved)
        back = self._moved(axis, backward, sent(node.kwargs.get("grad_dtype") or out_dtype))
        towards, others = (back, ()) if node in self.weights else ((), back)
        if self.walk.values[node].memory in self.again:  # the backward uses this weight, so it is gathered again
            others += moved
        return OperatorWork(node, moved, others, towards)

    def _rotation(self, node: fx.Node) -> OperatorWork:
        """Return the work of ring attention: products with the keys of all ranks, and sends around the ring."""
        query, axis, key, value = node.args[0], str(node.args[1]), node.args[2], node.args[3]
        ranks = self.walk.program.mesh.size(axis)
        (rows, heads, queries, width), out = self.walk.values[query].form.shape, self.walk.values[node].form.shape[-1]
        flops = facts(node).get("counted_flops", 2 * rows * heads * queries * int(node.args[5]) * (width + out))
        traffic, moving = Size.sum(self.size(n) for n in (query, key, value, node)), self.size(key) + self.size(value)
        dtype = str(self.walk.values[node].form.dtype).removeprefix("torch.")
        counted = Size.of(float(flops), self.growth.of_product(node))
        one = Work("attention", traffic, counted, dtype, depth=self._width(query))
        if cost_notes(node).counts_attended:
            one = self._as_causal(one, node, int(node.args[5]))
        sent = Work("send", moving, axis=axis, times=ranks - 1.0)
        if node not in self.alive:
            return OperatorWork(node, (one, sent))
        back = Work("send", moving, axis=axis, times=2 * ranks - 1.0)
        return OperatorWork(node, (one, sent), (one._replace(times=2.5), back))

    def _on_all_ranks(self, shard: Size, axis: str) -> Size:
        """Return the total bytes of the shards of a value on all ranks of an axis."""
        mesh = self.walk.program.mesh
        cut = {name: 0 for name, cuts in CHOSEN.items() if mesh.innermost(cuts) in mesh_axes_of(axis)}
        return Size(tuple((powers._replace(**cut), value * mesh.size(axis)) for powers, value in shard.terms))

    def _moved(self, axis: str, kind: str, size: Size) -> tuple[Work, ...]:
        moves = kind in PARTS and self.walk.program.mesh.size(axis) > 1
        return (Work(kind, size, axis=axis),) if moves else ()

    def _call(self, node: fx.Node, read: Sequence[Any], of_weights: Sequence[bool]) -> OperatorWork:
        written, alive = self._made(node), node in self.alive
        if not written.terms:
            back = () if self.fuses or not alive else self._view_backward(node)
            return OperatorWork(node, (), (), back) if node in self.weights else OperatorWork(node, (), back)
        sizes = [self.size(n) for n in tensor_inputs(node)]
        flops = _flops(node)
        if flops:
            return self._product(node, flops, Size.sum((*sizes, written)), read, of_weights)
        notes = cost_notes(node)
        size_in = written if notes.looks_up else Size.sum(sizes)
        forward = (Work("other", size_in + written, in_order=self._in_order(node)),)
        several = any(notes.passes) and not self.fuses  # the operator runs several kernels
        if several:
            forward = (Work("other", sizes[0] * notes.passes[0] + written),)
        if not alive:
            return OperatorWork(node, forward)
        unread = set(memories(read[0], lasting=True)) if notes.looks_up else set()  # only its shape is used
        kept = Size.sum(self.growth.of_memory(memory) for memory in set(self.walk.keeps.get(node, ())) - unread)
        grads = [(weight, size) for weight, size, v in zip(of_weights, sizes, read, strict=True) if needs_grad(v)]
        backward = self._backward(node, written, kept, [size for _, size in grads])
        if several:
            backward = (Work("other", sizes[0] * notes.passes[1] + written),)
        return (
            OperatorWork(node, forward, (), backward)
            if all(w for w, _ in grads)
            else OperatorWork(node, forward, backward)
        )

    def _backward(self, node: fx.Node, written: Size, saved: Size, grads: Sequence[Size]) -> tuple[Work, ...]:
        """Return the backward kernels of an operator without matrix products.

        Args:
            written: bytes of the output.
            saved: bytes of the inputs and outputs that are saved for backward.
            grads: bytes of the gradient of each input.
        """
        notes = cost_notes(node)
        if self.fuses or not notes.is_arithmetic:
            return (Work("other", Size.sum((written, saved, *grads))),)
        small = [size for size in grads if size.value < written.value]
        works = [Work("other", written + size) for size in small]  # the gradient is reduced over the broadcast dims
        if notes.gradients == "handed on":
            return tuple(works)
        return (*works, Work("other", written * 2.0 + saved * (1 / len(grads)), times=float(len(grads)),
                             in_order=self._in_order(node)))  # fmt: skip

    def _in_order(self, node: fx.Node) -> bool:
        """Return True if a call is pointwise arithmetic on contiguous tensors of one shape."""
        if self.fuses or not cost_notes(node).is_arithmetic:
            return False
        out = self.walk.values[node]
        read = [self.walk.values[used] for used in tensor_inputs(node)]
        forms = [one.form for one in (out, *read) if isinstance(one, LocalValue)]
        return all(form.shape == out.form.shape and form.is_contiguous for form in forms)

    def _view_backward(self, node: fx.Node) -> tuple[Work, ...]:
        """Return the backward kernels of a view operator.

        The gradient of a slice is copied into zeros. The gradients of a split are concatenated. The gradient of an
        expand is reduced over the expanded dims. Other views have no backward kernel.
        """
        gradients, (source, *_) = cost_notes(node).gradients, tensor_inputs(node)
        if gradients == "part":
            return (Work("other", self.size(source) + self.size(node) * 2.0),)
        if gradients == "parts":
            return (Work("other", self.size(source) * 2.0),)
        form = self.walk.values[node].form
        whole = TensorSpec.contiguous(
            form.shape, form.dtype
        ).size_bytes  # `size_bytes` of a view is that of its storage
        if gradients == "repeated" and whole > self.size(source).value:
            return (Work("other", Size.of(float(whole), self.growth.of(node)) + self.size(source)),)
        return ()

    def _product(
        self, node: fx.Node, flops: int, traffic: Size, read: Sequence[Any], of_weights: Sequence[bool]
    ) -> OperatorWork:
        dtypes = [v.form.dtype for v in read if isinstance(v, LocalValue)]
        widest = max(dtypes, key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
        dtype = str(widest).removeprefix("torch.")
        counted = Size.of(float(flops), self.growth.of_product(node))
        notes = cost_notes(node)
        if notes.backward_work:
            causal = self._queries(node) if notes.is_causal else NOTHING
            one = Work(notes.kind, traffic, counted, dtype, depth=self._width(tensor_inputs(node)[0]), causal=causal)
            if notes.counts_attended:
                one = self._as_causal(one, node, self.walk.values[tensor_inputs(node)[1]].form.shape[-2])
            back = (one._replace(times=notes.backward_work),) * (node in self.alive)
            return OperatorWork(node, (one,), (), back) if node in self.weights else OperatorWork(node, (one,), back)
        odd = unaligned(map(self._row, (node, *tensor_inputs(node)))) if widest.itemsize == 2 else 0
        one = Work(notes.kind, traffic, counted, dtype, depth=self._depth(node, counted), unaligned=odd)
        parts: dict[bool, tuple[Work, ...]] = {False: (), True: ()}
        for weight, used, v in zip(of_weights, tensor_inputs(node), read, strict=True):
            if node in self.alive and needs_grad(v):
                sum_of_rows = Work("other", self._made(node) + self.size(used))  # the gradient of a bias
                product = one._replace(depth=self._depth(used, counted))
                parts[weight] += (product if len(v.form.shape) > 1 else sum_of_rows,)
        return OperatorWork(node, (one,), parts[False], parts[True])

    def _width(self, query: fx.Node) -> Size:
        """Return the head width of attention as a `Size`. No mesh or batch size changes the width."""
        return Size.of(float(self.walk.values[query].form.shape[-1]), Exponents())

    def _row(self, node: fx.Node) -> int:
        """Return the last dim's size of a node's local value; 0 if the value has fewer than two dims."""
        found = self.walk.values[node]
        return found.form.shape[-1] if isinstance(found, LocalValue) and len(found.form.shape) > 1 else 0

    def _queries(self, node: fx.Node) -> Size:
        """Return the number of queries of attention as a `Size` (a polynomial in batch and sequence).

        The number scales with the sequence length if the FLOPs of the attention do.
        """
        form = self.walk.values[node].form
        return Size.of(float(form.shape[-2]), Exponents(s=min(1, self.growth.of_product(node).s)))

    def _as_causal(self, work: Work, node: fx.Node, keys: int) -> Work:
        """Return `work`, a causal attention, with the FLOPs of attention to all keys (`Work.causal`).

        The FLOPs of `work` count only the keys that a query attends, on average half of all keys. So they are doubled
        here. `Work.seconds` multiplies them by the share that a kernel computes (`Hardware.causal_share`).

        Args:
            keys: number of all keys.
        """
        grown = Exponents(s=min(1, self.growth.of_product(node).s))
        return work._replace(flops=work.flops * 2.0, causal=Size.of(float(keys), grown))

    def _depth(self, product: fx.Node, flops: Size) -> Size:
        """Return the inner dim of a matrix product, the `k` of [m, k] x [k, n], as a `Size`.

        Returns `NOTHING` if the inner dim is the batch or the sequence, as in the gradient of a weight.

        Args:
            product: the node whose value has the shape of the product's output.
            flops: FLOPs of the product.
        """
        if not isinstance(self.walk.values[product], LocalValue):  # a recurrent layer returns several tensors
            return NOTHING
        elements = math.prod(self.walk.values[product].form.shape)
        (powers, number), other = flops.terms[0], self.growth.of(product)
        less = Exponents(*(mine - theirs for mine, theirs in zip(powers, other, strict=True)))
        return NOTHING if less.b or less.s else Size.of(number / (2 * max(1, elements)), less)

    def _made(self, node: fx.Node) -> Size:
        """Return the bytes that a call writes to new buffers, as a `Size`."""
        result = self.walk.values[node]
        values = result if isinstance(result, tuple) else (result,)
        written = {v.memory for v in values if isinstance(v, LocalValue) and v.memory.made_by is node}
        return Size.of(sum(memory.size_bytes for memory in written), self.growth.of(node))


def recomputed_nodes(walk: Liveness, alive: Set[fx.Node]) -> set[fx.Node]:
    """Return the operators that the backward recomputes.

    In each recomputed region, these are the operators up to the last one that saves a tensor, because
    `torch.utils.checkpoint` stops there.
    """
    last: dict[int, int] = {}
    nodes = [node for node in walk.values if "region" in facts(node) and node.op == "call_function"]
    for index, node in enumerate(nodes):
        if node in alive and (walk.keeps.get(node) or walk.others.get(node)):
            last[facts(node)["region"]] = index
    return {node for index, node in enumerate(nodes) if index <= last.get(facts(node)["region"], -1)}


def _flops(node: fx.Node) -> int:
    """Return the matrix FLOPs of a call on local shapes, or 0 if they depend on values of tensors."""
    is_own = operator_name(node).startswith("autopart::")
    if is_own and node.target.overloadpacket not in FORMULAS:
        return facts(node).get("counted_flops", 0)
    try:
        return counted_flops(node)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return 0

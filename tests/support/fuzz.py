"""Random graphs over the rule tables, in random legal layouts, for property tests.

`cases()` is a hypothesis strategy of `autopart.proof.localize.subgraph.Subgraph`: a graph of operators on parameters
and inputs, a mesh, and for every operator any strategy that its rule allows, not only what a solver would choose, so
that every conversion is exercised. `str(case)` is text that can be pasted as a test.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from rule_samples import SAMPLES, Sample
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autopart.compat.torch_internals import tree_flatten, tree_map
from autopart.ir.atoms import BATCH, DATA_DIM, FEATURE
from autopart.ir.decisions import Decisions, Strategy, data_strategies, with_placements
from autopart.ir.facts import ACTIVE, PARAMETER, WEIGHT, facts
from autopart.ir.graph import (
    active_operators,
    is_floating,
    is_tensor,
    operators,
    shape,
    source_of,
    tensor_inputs,
    value,
)
from autopart.ir.layout import R_GRAD_P, P, Placement, R, conversion
from autopart.ir.mesh import AXES, Axis, Mesh
from autopart.ir.trace import Call, Trace
from autopart.passes.choose.solve.layout_pins import FREE, AxisConstraints
from autopart.passes.choose.stages.stage_partition import boundary_bytes
from autopart.passes.facts.analyze import annotate
from autopart.passes.facts.strategies import strategies
from autopart.passes.normalize import NORMALIZE
from autopart.passes.pass_pipeline import run_passes
from autopart.proof.comparison import Arrangement, GraphUnderTest
from autopart.proof.localize.subgraph import Subgraph

aten = torch.ops.aten

# (mesh, microbatches, stages, placement); at most 8 ranks
SETTINGS = [
    ("tp2", 1, 1, "loop"), ("tp3", 1, 1, "loop"), ("tp4", 1, 1, "loop"), ("dp2", 1, 1, "loop"), ("dp3", 1, 1, "loop"),
    ("dp2", 2, 1, "loop"), ("dp2,tp2", 1, 1, "loop"), ("dp2,tp2", 2, 1, "loop"), ("pp2", 2, 2, "loop"),
    ("pp2,tp2", 2, 2, "loop"), ("pp2,tp2", 1, 4, "V"), ("pp2,dp2", 3, 4, "loop"), ("pp2,dp2,tp2", 2, 2, "loop"),
    ("pp4,tp2", 2, 4, "loop"), ("dp4,tp2", 1, 1, "loop"), ("dp2,tp4", 1, 1, "loop"), ("tp8", 1, 1, "loop"),
    ("tp2", 2, 1, "loop"), ("tp6", 1, 1, "loop"), ("dp2,tp2", 1, 1, "loop"), ("dp2,tp2", 3, 1, "loop"),
    ("pp2,dp2,tp2", 1, 2, "loop"), ("dp2,rows2", 1, 1, "loop"), ("dp2,rows3,tp2", 2, 1, "loop"),
    ("tp2,feat2", 1, 1, "loop"), ("tp3,feat2", 1, 1, "loop"), ("pp2,rows2,tp2,feat2", 2, 2, "loop"),
    ("cp2", 1, 1, "loop"), ("cp3", 1, 1, "loop"), ("cp2,tp2", 1, 1, "loop"), ("dp2,ep2", 1, 1, "loop"),
    ("cp2,ep2", 1, 1, "loop"),
]  # fmt: skip
WIDER = (*AXES[:2], Axis("rows", "rows"), Axis("feat", "features"), *AXES[2:])
"""The table of axes that ships, with a second that cuts rows and a second that cuts features."""
SIZES = (2, 3, 4, 6, 8, 12)
MAX_NUMEL = 2000

SMOOTH = ["tanh", "sigmoid", "silu", "gelu", "softplus", "neg", "cos", "atan"]
"""Applied to any value: of bounded slope, and without a point where rounding decides."""

ARGUMENTS = {"mul", "add", "sub", "linear", "matmul"}


class Drawing:
    """A graph that is drawn operator by operator. `pool`: the floating values so far."""

    def __init__(self, draw: Any, rows: int):
        self.draw, self.rows = draw, rows
        self.graph, self.mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.pool: list[fx.Node] = []

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    # Leaves

    def input(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs[node.target] = tensor
        node.meta["val"], facts(node)["input_name"] = self.mode.from_tensor(tensor), node.target
        return node

    def weight(self, *sizes: int, tensor: Tensor | None = None) -> fx.Node:
        if tensor is None:
            tensor = floats(sizes, len(self.weights)).mul(2 / math.sqrt(max(sizes[-1:], default=1))).sub(0.3)
            tensor.requires_grad_()
        name = f"w{len(self.weights)}"
        self.weights[name] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(self.weights[name])
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((node.args, node.kwargs), value)
        with self.mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def parts(self, node: fx.Node) -> list[fx.Node]:
        """The outputs of a call."""
        if is_tensor(node):
            return [node]
        return [self.call(operator.getitem, node, i) for i in range(len(value(node)))]

    # Values

    def any(self, dims: int = 0, but: fx.Node | None = None) -> fx.Node | None:
        """A value of at least so many dims; the last ones more often."""
        fits = [n for n in self.pool if len(shape(n)) >= dims and n is not but]
        return fits[-1 - min(self.draw(st.integers(0, 3)), len(fits) - 1)] if fits else None

    def squashed(self, node: fx.Node) -> fx.Node:
        """In (0, 1), and nowhere at a point where a function jumps: where rounding decides, nothing can be compared."""
        moved = self.call(aten.add.Tensor, node, self.weight(*shape(node)[-1:]))
        return self.call(aten.sigmoid.default, moved)

    def shaped(self, node: fx.Node, sizes: tuple[int, ...]) -> fx.Node | None:
        """A value of this shape made from another."""
        if shape(node) == sizes:
            return node
        have, want = math.prod(shape(node)), math.prod(sizes)
        if have < want:
            return None
        if have > want:
            node = self.call(aten.reshape.default, node, [have])
            node = self.call(aten.slice.Tensor, node, 0, 0, want)
        return self.call(aten.reshape.default, node, list(sizes))

    # Operators

    def step(self) -> None:
        """One operator, or a few that belong together, more."""
        kind = self.pick(*STEPS)
        made = kind(self)
        for node in made or []:
            if is_floating(node) and 0 < value(node).numel() <= MAX_NUMEL:
                self.pool.append(node)

    def linear(self) -> list[fx.Node] | None:
        x = self.any(1)
        if x is None:
            return None
        n, k = self.pick(*SIZES), shape(x)[-1]
        known = [w for w in self.graph.find_nodes(op="get_attr") if shape(w)[-1:] == (k,) and len(shape(w)) == 2]
        weight = self.pick(*known) if known and self.pick(True, False) else self.weight(n, k)
        if self.pick(True, False):
            return [self.call(aten.linear.default, x, weight, self.weight(shape(weight)[0]))]
        if self.pick(True, False):
            product = self.call(aten.matmul.default, x, self.call(aten.t.default, weight))
            return [product] if len(shape(x)) > 1 else None
        return [self.call(aten.linear.default, x, weight)]

    def pointwise(self) -> list[fx.Node] | None:
        x = self.any()
        return x and [self.call(getattr(aten, self.pick(*SMOOTH)).default, x)]

    def binary(self) -> list[fx.Node] | None:
        x = self.any()
        if x is None:
            return None
        fits = [n for n in self.pool if n is not x and _broadcast(shape(n), shape(x))]
        y = self.pick(*fits) if fits and self.pick(True, True, False) else self.weight(*shape(x)[-1:])
        kind = self.pick("add", "sub", "mul", "div", "scaled", "scalar", "where")
        if kind in ("add", "sub"):
            return [self.call(getattr(aten, kind).Tensor, *self.pick((x, y), (y, x)))]
        if kind == "mul":
            return [self.call(aten.mul.Tensor, x, self.call(aten.tanh.default, y))]
        if kind == "div":
            return [self.call(aten.div.Tensor, x, self.call(aten.exp.default, self.call(aten.tanh.default, y)))]
        if kind == "scaled":
            return [self.call(aten.add.Tensor, x, y, alpha=self.pick(2, 0.5))]
        if kind == "scalar":
            return [self.call(self.pick(aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor), x, self.pick(2.0, 0.25))]
        wanted = torch.broadcast_shapes(shape(x), shape(y))
        mask = self.input(floats(wanted, len(self.inputs)) > 0.5)
        return [self.call(aten.where.self, mask, x, y)]

    def reshape(self) -> list[fx.Node] | None:
        x = self.any(1)
        if x is None:
            return None
        sizes = list(shape(x))
        at = self.draw(st.integers(0, len(sizes) - 1))
        divisors = [d for d in range(2, sizes[at]) if sizes[at] % d == 0]
        if at + 1 < len(sizes) and self.pick(True, False):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif divisors:
            outer = self.pick(*divisors)
            sizes[at : at + 1] = [outer, sizes[at] // outer]
        else:
            sizes.insert(at, 1)
        return [self.call(aten.reshape.default, x, sizes)]

    def move(self) -> list[fx.Node] | None:
        x = self.any(2)
        if x is None:
            return None
        dims = len(shape(x))
        kind = self.pick("transpose", "permute", "unsqueeze", "squeeze", "expand", "flip", "roll")
        if kind == "transpose":
            return [self.call(aten.transpose.int, x, *self.draw(st.permutations(range(dims)))[:2])]
        if kind == "permute":
            return [self.call(aten.permute.default, x, list(self.draw(st.permutations(range(dims)))))]
        if kind == "unsqueeze":
            return [self.call(aten.unsqueeze.default, x, self.draw(st.integers(0, dims)))]
        if kind == "squeeze":
            return [self.call(aten.squeeze.dim, x, self.draw(st.integers(0, dims - 1)))]
        if kind == "expand":
            wide = self.call(aten.unsqueeze.default, x, self.draw(st.integers(0, dims)))
            sizes = [self.pick(2, 4) if size == 1 else size for size in shape(wide)]
            return [self.call(aten.expand.default, wide, sizes)]
        at = self.draw(st.integers(0, dims - 1))
        return [self.call(aten.flip.default, x, [at]) if kind == "flip" else self.call(aten.roll.default, x, [1], [at])]

    def cut(self) -> list[fx.Node] | None:
        x = self.any(1)
        if x is None:
            return None
        at = self.draw(st.integers(0, len(shape(x)) - 1))
        size = shape(x)[at]
        kind = self.pick("split", "split", "split", "slice", "select", "unbind", "chunk")
        if kind in ("split", "chunk") and size >= 2:
            equal = [size // n for n in (2, 3) if size % n == 0]
            if kind == "chunk" and equal:
                return self.parts(self.call(aten.chunk.default, x, 2, at))
            first = self.draw(st.integers(1, size - 1))
            sizes = self.pick([first, size - first], *[[e] * (size // e) for e in equal])
            return self.parts(self.call(aten.split_with_sizes.default, x, sizes, at))
        if kind == "slice" and size >= 2:
            return [self.call(aten.slice.Tensor, x, at, 1, size)]
        if kind == "select":
            return [self.call(aten.select.int, x, at, self.draw(st.integers(0, size - 1)))]
        return self.parts(self.call(aten.unbind.int, x, at))[:2] if kind == "unbind" and size <= 4 else None

    def join(self) -> list[fx.Node] | None:
        x = self.any(1)
        if x is None:
            return None
        fits = [n for n in self.pool if shape(n) == shape(x)]
        others = [self.pick(*fits) for _ in range(self.pick(1, 2))]
        at = self.draw(st.integers(0, len(shape(x)) - 1))
        return [self.call(self.pick(aten.cat.default, aten.stack.default), [x, *others], at)]

    def reduce(self) -> list[fx.Node] | None:
        x = self.any(2)
        if x is None:
            return None
        dims, keep = len(shape(x)), self.pick(True, False)
        at = list(self.draw(st.permutations(range(dims))))[: self.pick(1, 1, 2)]
        kind = self.pick("sum", "sum", "mean", "logsumexp", "amax", "var")
        if kind == "sum":
            return [self.call(aten.sum.dim_IntList, x, at, keep)]
        if kind == "mean":
            return [self.call(aten.mean.dim, x, at, keep)]
        if kind == "logsumexp":
            return [self.call(aten.logsumexp.default, x, at, keep)]
        if kind == "amax":
            return [self.call(aten.amax.default, self.squashed(x), at, keep)]
        return [self.call(aten.var.correction, x, at, correction=0, keepdim=keep)]

    def norm(self) -> list[fx.Node] | None:
        x = self.any(2)
        if x is None:
            return None
        k = shape(x)[-1]
        kind = self.pick("layer_norm", "rms_norm", "softmax", "log_softmax", "cumsum", "plain")
        if kind == "layer_norm":
            return [self.call(aten.layer_norm.default, x, [k], self.weight(k), self.weight(k), 0.1)]
        if kind == "rms_norm":
            return [self.call(aten.rms_norm.default, x, [k], self.weight(k), 0.1)]
        if kind == "plain":
            square = self.call(aten.mul.Tensor, x, x)
            mean = self.call(aten.mean.dim, square, [-1], True)
            scale = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, mean, 0.1))
            return [self.call(aten.mul.Tensor, x, scale)]
        target = {"softmax": aten.softmax.int, "log_softmax": aten.log_softmax.int, "cumsum": aten.cumsum.default}[kind]
        return [self.call(target, x, self.draw(st.integers(0, len(shape(x)) - 1)))]

    def product(self) -> list[fx.Node] | None:
        x = self.any(2)
        if x is None:
            return None
        fits = [n for n in self.pool if len(shape(n)) >= 2 and shape(n)[:-2] == shape(x)[:-2]]
        y = self.pick(*fits)
        if shape(y)[-1] == shape(x)[-1]:
            y = self.call(aten.transpose.int, y, -2, -1)
        return [self.call(aten.matmul.default, x, y)] if shape(y)[-2] == shape(x)[-1] else None

    def attention(self) -> list[fx.Node] | None:
        fits = [n for n in self.pool if len(shape(n)) == 3 and shape(n)[-1] % 2 == 0]
        if not fits:
            return None
        x = self.pick(*fits)
        rows, tokens, _ = shape(x)
        heads, groups, size = self.pick((4, 4, 2), (4, 2, 2), (4, 1, 2), (6, 3, 2), (2, 2, 4))
        fused = self.call(aten.linear.default, x, self.weight((heads + 2 * groups) * size, shape(x)[-1]))
        sizes = [heads * size, groups * size, groups * size]
        split = self.parts(self.call(aten.split_with_sizes.default, fused, sizes, 2))
        q, k, v = (
            self.call(aten.transpose.int, self.call(aten.reshape.default, part, [rows, tokens, n, size]), 1, 2)
            for part, n in zip(split, (heads, groups, groups), strict=True)
        )
        options = {"enable_gqa": True} if groups < heads else {}
        mixed = self.call(
            aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, self.pick(True, False), **options
        )
        joined = self.call(
            aten.reshape.default, self.call(aten.transpose.int, mixed, 1, 2), [rows, tokens, heads * size]
        )
        return [self.call(aten.linear.default, joined, self.weight(shape(x)[-1], heads * size))]

    def embedding(self) -> list[fx.Node] | None:
        vocabulary, tokens = self.pick(7, 8, 12), self.pick(3, 4)
        ids = torch.randint(vocabulary, (self.rows, tokens), generator=torch.Generator().manual_seed(len(self.inputs)))
        return [self.call(aten.embedding.default, self.weight(vocabulary, self.pick(4, 6)), self.input(ids))]

    def sample(self) -> list[fx.Node] | None:
        """A call of the rules' own samples, its first floating argument taken from the pool where one fits."""
        chosen: Sample = self.pick(*CALLS)
        packet, _, overload = chosen.operator.partition(".")
        target = getattr(getattr(aten, packet), overload or "default")
        fed = self.pick(True, True, False)

        def read(tensor: Any) -> Any:
            nonlocal fed
            if not isinstance(tensor, Tensor):
                return tensor
            if not tensor.requires_grad:
                return self.input(tensor)
            source = self.any() if fed and tensor.dtype == torch.float64 else None
            made = self.shaped(source, tuple(tensor.shape)) if source is not None else None
            if made is None:
                return self.weight(tensor=tensor)
            fed = False
            return self.squashed(made)

        args, kwargs = tree_map(read, (chosen.args, chosen.kwargs))
        return self.parts(self.call(target, *args, **kwargs))

    # The end

    def loss(self) -> fx.Node | None:
        """A scalar to differentiate, or None: then some values are the outputs."""
        x = self.pool[-1]
        kind = self.pick("outputs", "sum", "mean", "mse", "cross_entropy")
        if kind == "outputs" or not value(x).requires_grad:
            return None
        if kind == "sum":
            return self.call(aten.sum.default, self.call(aten.tanh.default, x))
        if kind == "mean":
            return self.call(aten.mean.default, self.call(aten.mul.Tensor, x, x))
        if kind == "mse":
            return self.call(aten.mse_loss.default, x, self.input(floats(shape(x), 3)))
        if len(shape(x)) < 2:
            return self.call(aten.sum.default, x)
        *rows, classes = shape(x)
        labels = torch.randint(classes, rows, generator=torch.Generator().manual_seed(4))
        labels.view(-1)[0] = -100
        flat = self.call(aten.reshape.default, x, [math.prod(rows), classes])
        target = self.call(aten.reshape.default, self.input(labels), [math.prod(rows)])
        return self.call(aten.cross_entropy_loss.default, flat, target)

    def subject(self) -> GraphUnderTest:
        """The normalised, annotated graph."""
        loss = self.loss()
        outputs = [loss] if loss is not None else self.pool[-1 - self.draw(st.integers(0, 2)) :]
        if loss is not None and self.pick(True, False):
            outputs.append(self.pick(*self.pool))
        self.graph.output(tuple(outputs))
        run_passes(self.graph, NORMALIZE)
        for node in self.graph.nodes:  # placeholders first, for what reads the graph as a module
            if node.op == "placeholder" and not node.users:
                self.inputs.pop(node.target)
                self.graph.erase_node(node)
        outputs = list(self.graph.output_node().args[0])
        call = Call(
            tuple(self.inputs.values()), tuple(self.inputs), {}, tuple(t.requires_grad for t in self.inputs.values())
        )
        used = {n.target for n in self.graph.find_nodes(op="get_attr")}
        weights = {name: weight for name, weight in self.weights.items() if name in used}
        trace = Trace(self.graph, call, weights, {}, {}, {}, tree_flatten(tuple(outputs))[1], (), "train")
        annotate(trace)
        return GraphUnderTest(trace, outputs[0] if loss is not None else None)


STEPS = [
    *[Drawing.linear] * 3, Drawing.pointwise, *[Drawing.binary] * 2, *[Drawing.reshape] * 2, *[Drawing.move] * 2,
    *[Drawing.cut] * 2, Drawing.join, Drawing.reduce, Drawing.norm, Drawing.product, Drawing.attention,
    Drawing.embedding, *[Drawing.sample] * 3,
]  # fmt: skip

CALLS = [
    sample for sample in SAMPLES
    if not sample.operator.startswith(("acosh", "dropout", "to.", "_to_copy", "complex", "view_as_", "polar", "fft_"))
    and hasattr(aten, sample.operator.partition(".")[0])
    and not any(isinstance(arg, Tensor) and arg.is_complex() for arg in sample.args)
]  # fmt: skip
"""Without what is not defined between 0 and 1, what is random, what computes in float32, and complex numbers."""


def floats(sizes: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tuple(sizes), generator=generator, dtype=torch.float64).mul(0.8).add(0.1)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


# --- decisions -----------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: Any) -> Subgraph:
    """A random graph in random layouts."""
    mesh_text, microbatches, stages, placement = draw(st.sampled_from(SETTINGS))
    mesh = Mesh.parse(mesh_text, WIDER)
    drawing = Drawing(draw, mesh.data_parallel_size * microbatches * draw(st.sampled_from((1, 2))))
    first = draw(st.sampled_from([(4,), (6,), (3, 4), (4, 6), (2, 4, 4)]))
    drawing.pool.append(drawing.input(floats((drawing.rows, *first), 99)))
    drawing.pool += drawing.linear() or []
    for _ in range(draw(st.integers(1, 10))):
        drawing.step()
    subject = drawing.subject()
    if not active_operators(subject.traced.graph):
        reject()
    return Subgraph(subject, Arrangement(decisions(draw, subject, mesh, microbatches, stages), placement))


def decisions(draw: Any, subject: GraphUnderTest, mesh: Mesh, microbatches: int, num_stages: int) -> Decisions:
    """Any strategies that can be converted into each other, any cuts that a plan may have."""
    graph = subject.traced.graph
    kinds = draw(st.sampled_from((frozenset({FEATURE}), frozenset({FEATURE, DATA_DIM}))))
    chosen: dict[str, dict[fx.Node, Strategy]] = {}
    stored: dict[str, dict[str, Placement]] = {str(n.target): {} for n in graph.find_nodes(op="get_attr")}
    for axis in mesh.solving_order:
        beside = replace(FREE, axis=axis, cuts=mesh.axis(axis).cuts).with_solved_axes(chosen, stored, mesh)
        places = {
            str(n.target): _stored(draw, n, mesh.size(axis), kinds, beside) for n in graph.find_nodes(op="get_attr")
        }
        chosen[axis] = _choose(draw, graph, mesh.size(axis), kinds, places, True, beside)
        stored = with_placements(stored, axis, places)
    rows = {}
    if mesh.data_parallel_size * microbatches > 1:
        rows = _choose(
            draw, graph, mesh.data_parallel_size * microbatches, frozenset({BATCH}), {}, microbatches == 1, FREE
        )
    nodes = active_operators(graph)
    places = [i for i, size in enumerate(boundary_bytes(nodes)) if i and math.isfinite(size)]
    if len(places) < num_stages - 1:
        reject()
    cuts = sorted(draw(st.permutations(places))[: num_stages - 1])
    stage_of = {node: sum(cut <= i for cut in cuts) for i, node in enumerate(nodes)}
    strategies = {**data_strategies(mesh, microbatches, rows), **chosen}
    return Decisions(
        mesh, microbatches, strategies, stored, stage_of, num_stages, scatter_sends=draw(st.booleans())
    )  # fmt: skip


def _stored(draw: Any, node: fx.Node, num_shards: int, kinds: frozenset[str], beside: AxisConstraints) -> Placement:
    """Where a parameter is stored on an axis: as an operator may read it."""
    read = {
        strategy.inputs[i]
        for user in node.users if user.op == "call_function"
        for i, used in enumerate(tensor_inputs(user)) if used is node
        for strategy in strategies(user, num_shards, kinds)
    }  # fmt: skip
    places = [R, *([R_GRAD_P] if facts(node)["needs_grad"] else []), *sorted(p for p in read if p.is_shard)]
    return draw(st.sampled_from(beside.placements(str(node.target), places)))


def _choose(
    draw: Any, graph: fx.Graph, num_shards: int, kinds: frozenset[str], stored: dict[str, Placement], moves: bool,
    beside: AxisConstraints,
) -> dict[fx.Node, Strategy]:  # fmt: skip
    """A strategy for every operator; without `moves` none that needs a conversion. `beside`: what other axes leave."""
    chosen: dict[fx.Node, Strategy] = {}
    for node in operators(graph):
        if facts(node)["role"] not in (ACTIVE, WEIGHT):
            continue
        options = [
            strategy for strategy in beside.strategies(node, strategies(node, num_shards, kinds))
            if all(
                _fits(used, place, chosen, stored, num_shards, moves)
                for used, place in zip(tensor_inputs(node), strategy.inputs, strict=True)
            ) and (moves or not facts(node)["needs_grad"] or R not in strategy.outputs)
        ]  # fmt: skip
        if not options:
            reject()
        chosen[node] = draw(st.sampled_from(options[::-1]))  # shrinks towards what is sharded least
    return chosen


def _fits(
    used: fx.Node, target: Placement, chosen: dict[fx.Node, Strategy], stored: dict[str, Placement], num_shards: int,
    moves: bool,
) -> bool:  # fmt: skip
    """Whether a value can be had in this placement."""
    source, index = source_of(used)
    if facts(source)["role"] == PARAMETER:
        at = stored.get(source.target, R_GRAD_P)
    elif source in chosen:
        at = chosen[source].outputs[index]
    else:
        return target != P  # of the inputs alone: made where it is needed
    grad = facts(used)["needs_grad"]
    if at == target or (not grad and at.is_replicated and target.is_replicated):
        return True
    uneven = any(p.is_shard and not p.sections and shape(used)[p.dim] % num_shards for p in (at, target))
    exists = conversion(at, target) is not None or target == P
    return moves and exists and not (uneven and at.is_shard and target.is_shard)

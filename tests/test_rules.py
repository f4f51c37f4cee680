"""Every sharding rule is proven by execution: each strategy it claims, against the operator itself.

`SAMPLES` has at least one call of every operator in the rule tables. For every strategy of every call, a program with
this one operator cut as the strategy says runs on all ranks; its outputs and the gradients of all its inputs must be
those of the operator on whole inputs.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autopart.compat import tree_flatten
from autopart.graph import operator_name, operators, shape, tensor_inputs
from autopart.layout import Placement
from autopart.mesh import Mesh
from autopart.passes.analyze import annotate
from autopart.passes.lower import ANY_KIND, Decisions, lower
from autopart.passes.normalize import NORMALIZE, run_passes
from autopart.passes.rules.shapes import BUILDERS
from autopart.passes.rules.tables import ALTERNATIVES, LINES, POINTWISE
from autopart.passes.strategies import Strategy, strategies
from autopart.runtime.gradients import sync_gradients_lockstep
from autopart.runtime.lockstep import LIST_PRIMITIVES, run_lockstep
from autopart.trace import Call, Trace
from autopart.verify import relative, weights_like

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
RULES = {*LINES, *BUILDERS, *POINTWISE}
SEEDS = itertools.count()  # every sample tensor has values of its own


@dataclass(frozen=True)
class Sample:
    """One call: `torch.ops.aten.<operator>(*args, **kwargs)`. Tensors among the arguments are its inputs."""

    operator: str
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        def text(a: Any) -> str:
            return f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, Tensor) else str(a)

        flat = [f"({', '.join(map(text, a))})" if isinstance(a, (list, tuple)) else text(a) for a in self.args]
        return f"{self.operator}({', '.join([*flat, *(f'{k}={text(v)}' for k, v in self.kwargs.items())])})"


def x(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Floats without symmetry; in (0, 1) unless told, where every function of the tables is defined."""
    generator = torch.Generator().manual_seed(next(SEEDS))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).requires_grad_()


def data(*shape: int) -> Tensor:
    """Floats that no gradient is asked of."""
    return x(*shape).detach()


def ints(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def bools(*shape: int) -> Tensor:
    return ints(*shape, below=2).bool()


def labels(*shape: int, classes: int, ignored: int = -100) -> Tensor:
    target = ints(*shape, below=classes)
    target.view(-1)[1] = ignored
    return target


def call(name: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(name, args, kwargs)


# --- samples -------------------------------------------------------------------------------------------------------

UNARY = """abs acos asin atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid
    hardswish hardtanh isfinite isinf isnan log log10 log1p log2 log_sigmoid logical_not mish neg reciprocal relu relu6
    round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus sqrt square tan tanh trunc nan_to_num leaky_relu
    acosh asinh atanh detach zeros_like ones_like tril triu"""
BINARY = """atan2.default copysign.Tensor div.Tensor eq.Tensor fmod.Tensor ge.Tensor gt.Tensor
    le.Tensor lt.Tensor ne.Tensor maximum minimum max.other min.other mul.Tensor pow.Tensor_Tensor remainder.Tensor
    rsub.Tensor sub.Tensor add.Tensor xlogy.Tensor logical_and logical_or logical_xor type_as"""
INTEGER = """bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor"""
LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"

RESHAPES = [
    ((6, 4), (8, 3)), ((6, 4), (4, 6)), ((4, 12, 2), (48, 2, 1)), ((1, 6, 4), (6, 1, 4)), ((24,), (2, 3, 4)),
    ((12, 4), (3, 16)), ((6, 1, 4), (24,)), ((2, 6, 4), (4, 3, 4)), ((4, 6), (2, 12)), ((1,), ()), ((12, 6), (6, 12)),
    ((6, 4, 1), (6, 2, 2)),
]  # fmt: skip
SAMPLES = [
    *(call(name, x(6, 4, low=1.1, high=2.0) if name == "acosh" else x(6, 4)) for name in UNARY.split()),
    *(call(name, x(6, 4), x(6, 4)) for name in BINARY.split()),
    *(call(name, x(2, 6, 4), x(6, 1)) for name in BINARY.split() if name != "max.other"),
    call("floor_divide", data(6, 4), data(4)), call("copy", data(6, 4), data(4)),
    call("add.Tensor", x(6, 4), data(6, 1)), call("mul.Tensor", data(6, 4), x(6, 1)),
    *(call(name, ints(6, 4), ints(6, 4)) for name in INTEGER.split()), call("bitwise_not", bools(6, 4)),
    # pointwise with other arguments
    call("add.Tensor", x(6, 4), 2.5), call("add.Tensor", x(6, 4), x(4), alpha=3),
    call("sub.Tensor", x(6, 4), x(4), alpha=3), call("mul.Tensor", x(6, 4), 2.5), call("mul.Tensor", x(6, 4), x()),
    call("div.Tensor", x(6, 4), 2.5), call("div.Tensor", x(6, 4), x()),
    call("div.Tensor_mode", x(6, 4), x(4), rounding_mode="floor"),
    call("div.Tensor_mode", x(6, 4, high=9), 2, rounding_mode="trunc"), call("rsub.Scalar", x(6, 4), 1.0),
    call("pow.Tensor_Scalar", x(6, 4), 3), call("pow.Scalar", 2.0, x(6, 4)), call("leaky_relu", x(6, 4, low=-1), 0.2),
    call("clamp", x(6, 4), 0.3, 0.6), call("clamp.Tensor", x(6, 4), x(4, high=0.3), x(6, 1, low=0.6)),
    call("clip", x(6, 4), 0.3, 0.6), call("clamp_min", x(6, 4), 0.5), call("clamp_max", x(6, 4), 0.5),
    call("threshold", x(6, 4), 0.5, 0.25), call("lerp.Scalar", x(6, 4), x(6, 4, low=0.5), 0.3),
    call("lerp.Tensor", x(6, 4), x(4), x(6, 1)), call("addcmul", x(6, 4), x(4), x(6, 1), value=2.0),
    call("addcdiv", x(6, 4), x(4), x(6, 1), value=2.0), call("full_like", x(6, 4), 3.0),
    call("masked_fill.Scalar", x(6, 4), bools(6, 4), 2.0), call("masked_fill.Tensor", x(6, 4), bools(4), x()),
    call("where.self", bools(6, 4), x(6, 4), x(4)), call("where.ScalarOther", bools(6, 4), x(6, 4), 0.0),
    call("where.ScalarSelf", bools(6, 1), 1.0, x(6, 4)), call("to.dtype", x(6, 4), torch.float32),
    call("_to_copy", x(6, 4), dtype=torch.float32), call("to.dtype", ints(6, 4), torch.float64),
    call("to.dtype", x(6, 4), torch.int64), call("dropout", x(6, 4), 1e-300, True),
    call("gelu", x(6, 4), approximate="tanh"), call("tril", x(3, 6, 4), -1), call("triu", x(6, 4), 1),
    *(call(name, x(6, 4), x(6, 4, low=0.2), 0) for name in LOSSES.split()[:4]),
    call("binary_cross_entropy", x(6, 4), x(6, 4), None, 0),
    call("binary_cross_entropy", x(6, 4), x(6, 4), data(4), 0),
    call("binary_cross_entropy_with_logits", x(6, 4), x(6, 4), None, None, 0),
    call("binary_cross_entropy_with_logits", x(6, 4), x(6, 4), data(4), data(6, 1), 0),
    *(call(name, x(6, 4), x(6, 4, low=0.2)) for name in LOSSES.split()), call("mse_loss", x(6, 4), x(6, 4), 2),
    call("mse_loss", x(6, 4), x(4), 0), call("max", x(6, 4)), call("min", x(6, 4)),
    # matrix products
    call("linear", x(2, 6, 4), x(12, 4)), call("linear", x(6, 4), x(12, 4), x(12)), call("linear", x(4), x(6, 4)),
    call("linear", x(6, 4), x(4)), call("mm", x(6, 4), x(4, 12)), call("addmm", x(12), x(6, 4), x(4, 12)),
    call("numpy_T", x(6, 4)), call("mT", x(2, 6, 4)), call("movedim.int", x(2, 6, 4), 1, 2),
    call("movedim.intlist", x(2, 6, 4), [0, 1], [2, 0]), call("swapaxes", x(2, 6, 4), 1, 2),
    call("swapdims", x(6, 4), 0, 1), call("matmul", x(4), x(2, 4, 6)), call("layer_norm", x(2, 6, 4), [4], x(4)),
    call("linalg_vector_norm", x(6, 4), 2, [-1], True),
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 2, 6, 8), x(2, 2, 6, 8), bools(2, 1, 6, 6),
        enable_gqa=True),
    call("bmm", x(2, 6, 4), x(2, 4, 12)), call("matmul", x(2, 6, 4), x(2, 4, 6)), call("matmul", x(2, 6, 4), x(4, 6)),
    call("matmul", x(2, 1, 6, 4), x(6, 4, 6)), call("matmul", x(6, 4), x(4)), call("matmul", x(6, 4), x(4, 1)),
    # attention
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 4)),
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 4), None, 0.0, True),
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 4, 12, 8), x(2, 4, 12, 8), bools(6, 12) | bools(12)[None]
        | True),
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 1, 6, 6)),
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 1, 6), scale=0.3),
    call("scaled_dot_product_attention", x(2, 12, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), enable_gqa=True),
    call("scaled_dot_product_attention", x(2, 12, 6, 8), x(2, 2, 6, 8), x(2, 2, 6, 8), None, 0.0, True,
        enable_gqa=True),
    call("scaled_dot_product_attention", x(2, 12, 6, 8), x(2, 2, 6, 8), x(2, 2, 6, 8), x(6, 6), enable_gqa=True),
    call("scaled_dot_product_attention", x(2, 4, 6, 8), x(2, 1, 6, 8), x(2, 1, 6, 8), enable_gqa=True),
    call("scaled_dot_product_attention", x(4, 6, 8), x(4, 6, 8), x(4, 6, 8)),
    # normalisation
    call("layer_norm", x(2, 6, 4), [4], x(4), x(4, low=0.5)), call("layer_norm", x(2, 6, 4), [4]),
    call("layer_norm", x(2, 6, 4), [4], x(4)), call("layer_norm", x(2, 6, 4), [4], None, x(4)),
    call("layer_norm", x(2, 6, 4), [6, 4]), call("layer_norm", x(2, 6, 4), [6, 4], x(6, 4), x(6, 4)),
    call("rms_norm", x(2, 6, 4), [4], x(4)), call("rms_norm", x(2, 6, 4), [4]), call("rms_norm", x(2, 6, 4), [6, 4]),
    call("group_norm", x(2, 12, 6), 6, x(12), x(12, low=0.5)), call("group_norm", x(2, 12, 6, 4), 6),
    call("group_norm", x(2, 12, 6), 4, x(12)),
    # tables and classes
    call("embedding", x(12, 4), ints(2, 6)), call("embedding", x(7, 4), ints(6)),
    call("embedding", x(7, 4), ints(6), 2), call("embedding", x(12, 4), ints(6), padding_idx=2),
    call("embedding", x(12, 4), ints(2, 6), -1, True),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12), None, 0),
    call("cross_entropy_loss", x(2, 6, 4), labels(2, 4, classes=6), None, 0),
    call("cross_entropy_loss", x(6, 7), labels(6, classes=7), None, 0),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12, ignored=3), None, 0, 3, 0.1),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12, ignored=3), reduction=0, ignore_index=3,
        label_smoothing=0.1),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12, ignored=3), ignore_index=3),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12), data(12), 0),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12), data(12)),
    call("cross_entropy_loss", x(6, 12), x(6, 12), None, 0), call("cross_entropy_loss", x(6, 12), x(6, 12)),
    call("cross_entropy_loss", x(12), ints(below=12), None, 0),
    call("nll_loss_nd", x(6, 12), labels(6, classes=12), None, 0),
    call("nll_loss_nd", x(2, 6, 4), labels(2, 4, classes=6)),
    call("nll_loss_nd", x(6, 12), labels(6, classes=12), data(12), 0),
    call("gather", x(6, 4), -1, ints(6, 2, below=4)), call("gather", x(6, 4), 1, ints(1, 2, below=4)),
    call("gather", x(6, 4), 0, ints(2, 4, below=6)), call("gather", x(6, 4), 1, ints(2, 2, below=4)),
    # convolution and pooling
    call("conv1d", x(2, 4, 6), x(6, 4, 3), x(6)), call("conv1d", x(2, 4, 6), x(6, 2, 3), None, [1], [0], [1], 2),
    call("conv1d", x(4, 6), x(6, 4, 3)), call("conv2d", x(2, 4, 6, 6), x(6, 4, 3, 3), x(6), [1, 1], [1, 1]),
    call("conv2d", x(2, 4, 6, 6), x(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4),
    call("conv2d", x(2, 4, 6, 6), x(4, 1, 3, 3), groups=4), call("conv2d", x(2, 1, 6, 6), x(4, 1, 6, 6)),
    call("conv2d", x(2, 4, 6, 6), x(6, 4, 3, 3), stride=[2, 2]), call("max_pool2d", x(2, 4, 6, 6), [2, 2]),
    call("max_pool2d", x(4, 6, 6), [3, 3], [1, 1], [1, 1]), call("avg_pool2d", x(2, 4, 6, 6), [2, 2]),
    call("avg_pool2d", x(2, 4, 6, 6), [3, 3], [1, 1], [1, 1]), call("adaptive_avg_pool2d", x(2, 4, 6, 6), [1, 1]),
    call("adaptive_avg_pool2d", x(2, 4, 6, 6), [3, 2]),
    *(call(name, x(2, 6, 4), size) for name in ("view", "reshape", "_unsafe_view") for size in ([12, 4], [2, 24], [2,
        3, 2, 4], [2, -1])),
    *(call("reshape", x(*before), list(after)) for before, after in RESHAPES),
    call("flatten.using_ints", x(2, 6, 4), 1), call("flatten.using_ints", x(2, 6, 4), 0, 1),
    call("unflatten.int", x(2, 12), 1, [6, 2]), call("expand", x(6, 1), [6, 4]), call("expand", x(6, 4), [2, 6, 4]),
    call("expand", x(6, 1), [2, -1, 4]), call("expand", x(), [6, 4]), call("expand", x(1, 4), [6, -1]),
    call("transpose.int", x(2, 6, 4), 0, 1), call("transpose.int", x(2, 6, 4), -1, -2), call("t", x(6, 4)),
    call("t", x(6)), call("permute", x(2, 6, 4), [2, 0, -2]), call("unsqueeze", x(6, 4), 1),
    call("unsqueeze", x(6, 4), -1), call("squeeze", x(6, 1, 4)), call("squeeze.dim", x(6, 1, 4), 1),
    call("squeeze.dim", x(6, 4), 1), call("squeeze.dims", x(1, 6, 1, 4), [0, -2]),
    # reductions
    *(call(f"{name}.dim{suffix}", x(2, 6, 4), *args) for name, suffix in (("sum", "_IntList"), ("mean", "")) for args
        in (([1],), ([-1], True), ([0, 2],), ([0, 1, 2],), (None,))),
    call("sum", x(6, 4)), call("mean", x(6, 4)), call("sum", ints(6, 4)),
    call("sum.dim_IntList", ints(6, 4), [1], dtype=torch.float64), call("mean.dim", x(6, 4), []),
    *(call(name, x(2, 6, 4), *args) for name in ("amax", "amin") for args in (([1],), ([-1], True), ([0, 2],), ())),
    call("argmax", x(6, 4), -1), call("argmax", x(6, 4), 0, True), call("argmax", x(6, 4)),
    call("any.dim", bools(6, 4), 1), call("any", bools(6, 4)), call("all.dim", bools(6, 4), 0, True),
    call("all", bools(6, 4)), call("var.correction", x(6, 4), [1], correction=1),
    call("std.correction", x(6, 4), [0], correction=0, keepdim=True), call("var", x(6, 4)),
    call("std", x(6, 4), False), call("var.dim", x(6, 4), [1], False), call("logsumexp", x(6, 4), [1]),
    call("logsumexp", x(6, 4), [0, 1], True),
    # along one dim
    *(call(f"{name}.int", x(2, 6, 4), dim) for name in ("softmax", "log_softmax") for dim in (1, -1)),
    *(call(name, x(2, 6, 4), 1, False) for name in ("_softmax", "_log_softmax")), call("cumsum", x(6, 4), 1),
    call("cumsum", x(6, 4), 0), call("flip", x(6, 4), [0]), call("flip", x(2, 6, 4), [0, -1]),
    call("roll", x(6, 4), [1], [1]), call("roll", x(6, 4), [2, 1], [0, 1]), call("roll", x(6, 4), [3]),
    # cutting and joining
    call("slice.Tensor", x(6, 4), 0, 1, 5), call("slice.Tensor", x(6, 4), -1, 0, 9223372036854775807, 2),
    call("slice.Tensor", x(6, 4), 1, 1), call("slice.Tensor", x(6, 4), 0, 0, 4), call("narrow", x(6, 4), 1, 1, 2),
    call("select.int", x(2, 6, 4), 1, -1), call("split_with_sizes", x(6, 12), [4, 8], 1),
    call("split_with_sizes", x(12, 6), [6, 6]), call("split_with_sizes", x(12, 6), [4, 4, 4], 0),
    call("split_with_sizes", x(6, 7), [3, 4], -1), call("split.Tensor", x(6, 12), 4, -1),
    call("split.Tensor", x(12, 6), 8), call("chunk", x(6, 12), 3, 1), call("cat", [x(6, 4), x(6, 8)], 1),
    call("cat", [x(6, 4), x(2, 4)]), call("cat", [x(6, 4), x(6, 4)], -1),
    call("stack", [x(6, 4), x(6, 4, low=0.5)], 1), call("stack", [x(6, 4), x(6, 4, low=0.5)], -1),
    call("pad", x(6, 4), [1, 2]), call("pad", x(2, 6, 4), [0, 0, 1, 2], "constant", 3.0),
    call("constant_pad_nd", x(6, 4), [0, 2], 1.0), call("pad", x(2, 6, 4), [1, 1], "reflect"),
    call("pad", x(6, 4), [1, -1]), call("unbind.int", x(2, 6, 4)), call("unbind.int", x(6, 4), 1),
]  # fmt: skip


# --- proof ---------------------------------------------------------------------------------------------------------


def traced(sample: Sample) -> tuple[Trace, dict[str, nn.Parameter]]:
    """The annotated trace of a model whose parameters are the sample's tensors and whose outputs are the call's."""
    graph, weights = fx.Graph(), {}
    mode = FakeTensorMode()

    def read(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        name = f"p{len(weights)}"
        weights[name] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        node = graph.get_attr(name)
        node.meta["val"] = mode.from_tensor(weights[name])
        return node

    packet, _, overload = sample.operator.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    args = torch.utils._pytree.tree_map(read, (sample.args, sample.kwargs))
    node = graph.call_function(target, *args)
    fake = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*fake[0], **fake[1])
    outputs = _projections(graph, node)
    graph.output(tuple(outputs))
    run_passes(graph, NORMALIZE)
    _ask_for_every_section(graph)
    _, spec = tree_flatten(tuple(outputs))
    trace = Trace(graph, Call((), (), {}), weights, {}, {}, {}, spec, (), "train")
    annotate(trace)
    graph.eliminate_dead_code()  # the splits have asked
    return trace, weights


def _projections(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The node, or a `getitem` for each of its outputs."""
    values = node.meta["val"]
    if isinstance(values, Tensor):
        return [node]
    parts = [graph.call_function(operator.getitem, (node, i)) for i in range(len(values))]
    for part, value in zip(parts, values, strict=True):
        part.meta["val"] = value
    return parts


def _ask_for_every_section(graph: fx.Graph) -> None:
    """Let a later split ask for every dim of the outputs in sections, as a fused projection does: equal and unequal."""
    (outputs,) = graph.output_node().args
    with graph.inserting_before(graph.output_node()):
        for node in outputs:
            for dim, size in enumerate(node.meta["val"].shape):
                for sizes in {4: ([2, 2],), 6: ([4, 2],), 12: ([8, 4], [6, 6], [4, 4, 4])}.get(size, ()):
                    split = graph.call_function(torch.ops.aten.split_with_sizes.default, (node, list(sizes), dim))
                    split.meta["val"] = node.meta["val"].split(sizes, dim)


@dataclass
class Proof:
    """One traced sample, what it computes on whole inputs, and its runs cut in all ways."""

    trace: Trace
    weights: dict[str, nn.Parameter]
    nodes: list[fx.Node]
    outputs: list[Tensor]
    grads: dict[str, Tensor]

    @staticmethod
    def of(sample: Sample) -> Proof:
        trace, weights = traced(sample)
        outputs = fx.GraphModule(weights, trace.graph)()
        _backward(outputs)
        grads = {name: w.grad for name, w in weights.items() if w.grad is not None}
        return Proof(trace, weights, list(operators(trace.graph)), [o.detach() for o in outputs], grads)

    def decisions(self, mesh: Mesh, chosen: dict[str, dict[fx.Node, Strategy]]) -> Decisions:
        """Replicated work, except for what is chosen on the axes "dp" and "tp"."""
        whole = {node: strategies(node, 2, ANY_KIND)[0] for node in operators(self.trace.graph)}
        batch, tensor = {**whole, **chosen.get("dp", {})}, {**whole, **chosen.get("tp", {})}
        return Decisions(mesh, 1, batch, tensor, {}, dict.fromkeys(whole, 0), 1)

    def error(self, mesh: Mesh, chosen: dict[str, dict[fx.Node, Strategy]]) -> str:
        """What is wrong with the outputs and gradients of the program cut as chosen; "" if nothing is."""
        outputs = list(self.trace.graph.output_node().args[0])
        try:
            program = lower(self.trace, self.decisions(mesh, chosen), outputs, whole_outputs=True)
            local = {
                rank: {n: nn.Parameter(w.detach().clone(), w.requires_grad) for n, w in self.weights.items()}
                for rank in range(mesh.num_ranks)
            }
            seeds = [torch.zeros(mesh.size("dp"), dtype=torch.int64) for _ in program.input_names]  # of dropout
            found = {rank: values for rank, (values,) in run_lockstep(program, local, {}, seeds).items()}
            _backward([value for values in found.values() for value in values])
            sync_gradients_lockstep(local, program)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        wrong = []
        tolerance = max(TOLERANCE.get(o.dtype, 0.0) for o in self.outputs)
        for rank, values in found.items():
            for i, (value, expected) in enumerate(zip(values, self.outputs, strict=True)):
                wrong += [f"output {i} on rank {rank} by {e:.2g}" for e in [relative(value, expected)] if e > tolerance]
            for name, grad in self.grads.items():
                mine = local[rank][name].grad
                mine = torch.zeros_like(grad) if mine is None else mine
                error = relative(mine, grad)
                wrong += [f"gradient of {name} on rank {rank} by {error:.2g}"] * (error > tolerance)
        return ", ".join(wrong[:3])


@pytest.fixture(autouse=True)
def _uneven_partial_sums(monkeypatch):
    """Where a whole value or gradient becomes a partial sum, every rank gets a part that is not zero: `own` alone (all
    on the first rank) would let `tanh` pass for linear."""
    own = LIST_PRIMITIVES["own"]

    def parts(values: list[Tensor]) -> list[Tensor]:
        if not values[0].is_floating_point():
            return own(values)
        rest = [(rank + 1) * 0.3 * weights_like(value).sin() for rank, value in enumerate(values[1:])]
        return [values[0] - sum(rest), *rest]

    monkeypatch.setitem(LIST_PRIMITIVES, "own", parts)


def _backward(values: list[Tensor]) -> None:
    seeds = [(v * weights_like(v)).sum() for v in values if v.requires_grad]
    if seeds:
        torch.autograd.backward(seeds)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_strategy_computes_what_the_operator_computes(sample, num_ranks):
    proof = Proof.of(sample)
    wrong = []
    for node in proof.nodes:
        for strategy in strategies(node, num_ranks, ANY_KIND):
            error = proof.error(Mesh({"tp": num_ranks}), {"tp": {node: strategy}})
            wrong += [f"{operator_name(node)} as {strategy}: {error}"] * bool(error)
    assert not wrong, "\n".join([str(sample), *wrong])


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_two_axes_may_cut_two_factors(sample):
    """An operator cut on one axis may be cut on another one by what the same rule says: a rule mentions no mesh."""
    proof = Proof.of(sample)
    wrong = []
    for node in proof.nodes:
        found = [s for s in strategies(node, 2, ANY_KIND) if s.factor and "+" not in str(s)]
        for dp, tp in itertools.permutations(found, 2):
            if dp.factor != tp.factor:
                error = proof.error(Mesh({"dp": 2, "tp": 2}), {"dp": {node: dp}, "tp": {node: tp}})
                wrong += [f"{operator_name(node)} as {dp} on dp and {tp} on tp: {error}"] * bool(error)
    assert not wrong, "\n".join([str(sample), *wrong])


def test_every_rule_has_a_sample():
    proven = set()
    for sample in SAMPLES:
        nodes = operators(traced(sample)[0].graph)
        proven |= {operator_name(n) for n in nodes if n.meta["pattern"] is not None}
    assert set(RULES) - proven == set(), "no call of the samples uses these rules: add one, or remove the rule"


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_every_alternative_form_has_a_sample(name):
    samples = [sample for sample in SAMPLES if f"aten::{sample.operator}" == name]
    nodes = [next(operators(traced(sample)[0].graph)) for sample in samples]
    patterns = [n.meta["pattern"] for n in nodes if n.meta["pattern"] is not None]
    shapes = [([shape(i) for i in tensor_inputs(n)], [shape(n)]) for n in nodes]
    for text in ALTERNATIVES[name]:
        fitted = [replace(LINES[name], text=text).instantiate(*both) for both in shapes]
        assert any(pattern is not None and pattern in patterns for pattern in fitted), text


WITHOUT_A_RULE = [
    call("layer_norm", x(2, 6, 4), [6, 4], x(6, 4), x(6, 4)),
    call("conv2d", x(2, 4, 6, 6), x(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4),
    call("conv1d", x(2, 4, 6), x(6, 2, 3), groups=2),
    call("cross_entropy_loss", x(6, 12), labels(6, classes=12), data(12), 0),
    call("cross_entropy_loss", x(6, 12), x(6, 12), None, 0),
    call("einsum", "bsk,kn->bsn", [x(2, 6, 4), x(4, 6)]),
    call("glu", x(6, 4)),
    call("repeat", x(6, 4), [1, 2]),
    call("repeat_interleave.self_int", x(6, 4), 2, 1),
    call("topk", x(6, 4), 2),
    call("index_select", x(6, 4), 1, ints(3, below=4)),
    call("baddbmm", x(2, 6, 4), x(2, 6, 4), x(2, 4, 4)),
]


@pytest.mark.parametrize("sample", WITHOUT_A_RULE, ids=str)
def test_what_has_no_rule_runs_replicated(sample):
    """Calls that no line of the tables was written for. Where a rule is added, its sample moves to SAMPLES."""
    node = next(n for n in Proof.of(sample).nodes if n.meta["pattern"] is None)
    assert not any(s.is_sharded for s in strategies(node, 2, ANY_KIND))


# --- the proof itself can fail -------------------------------------------------------------------------------------

R_, S0, S1, P_, G = (Placement.parse(text) for text in ("R", "S(0)", "S(1)", "P", "R(grad P)"))
PLANTED = {
    "a sum claimed whole": (call("linear", x(6, 4), x(12, 4)), Strategy((S1, S1), (R_,)), "output 0"),
    "a gradient claimed whole": (call("linear", x(6, 4), x(12, 4)), Strategy((R_, S0), (S1,)), "gradient of p0"),
    "a whole value claimed a sum": (call("tanh", x(6, 4)), Strategy((R_,), (P_,)), "output 0"),
    "a sum through what is not linear": (call("tanh", x(6, 4)), Strategy((P_,), (P_,)), "output 0"),
    "a dim that must be whole": (call("softmax.int", x(6, 4), -1), Strategy((S1,), (S1,)), "output 0"),
    "both factors of a product": (call("mul.Tensor", x(6, 4), x(6, 4)), Strategy((P_, P_), (P_,)), "output 0"),
    "a gradient claimed a sum": (call("tanh", x(6, 4)), Strategy((G,), (R_,)), "gradient of p0"),
    "another dim": (call("reshape", x(6, 4), [6, 2, 2]), Strategy((S1,), (Placement("S", 2),)), "output 0"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_wrong_strategy_is_found(plant):
    sample, strategy, expected = PLANTED[plant]
    proof = Proof.of(sample)
    (node,) = proof.nodes
    error = proof.error(Mesh({"tp": 2}), {"tp": {node: strategy}})
    assert expected in error or "Error" in error

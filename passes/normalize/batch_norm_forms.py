"""Decomposition of batch norm in training, so that its statistics are sums that can be all-reduced."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import changes_precision, operator_name, shape, value
from autopart.ir.selection import is_data_dependent
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, replace, replace_parts

aten = torch.ops.aten

FUNCTIONAL = "aten::_native_batch_norm_legit_functional"
_WITHOUT_UPDATES = ("aten::_native_batch_norm_legit", "aten::native_batch_norm")
_EVAL = "aten::_native_batch_norm_legit_no_training"
_OF_LIBRARIES = ("aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""GPU operators that update running statistics, but do not declare the update in their schema.

In training with running statistics, these operators are not rewritten, and the planner rejects them as operators
without a rule.
"""
BATCH_NORM, INNER = "batch_norm", "batch_statistic"
"""Plan names of the operators that replace a batch norm: of the first one, and of all others."""


@on_calls(_EVAL, FUNCTIONAL, *_WITHOUT_UPDATES, *_OF_LIBRARIES, "aten::batch_norm")
def batch_statistics(graph: fx.Graph, node: fx.Node) -> None:
    """Decompose a batch norm in training into mean, mean of squared differences, and products.

    The mean over samples is then a sum. The sum is all-reduced over data ranks in forward and backward, as in
    SyncBatchNorm. New running statistics (Ioffe and Szegedy 2015, with the unbiased variance) use the same mean and
    variance.
    """
    name = operator_name(node)
    if is_data_dependent(node):  # the number of samples is data-dependent: keep torch's operator, on the full batch
        return
    with graph.inserting_before(node):
        source, weight, bias, *statistics = node.args
        if name == "aten::batch_norm":
            if node.args[5]:
                replace(node, _BatchNormFormula(graph, node, source, node.args[7]).normalised(weight, bias))
            return
        momentum, eps = node.args[-2:]
        in_training = name != _EVAL and node.args[-3]
        if not in_training:
            whole = emit(graph, node, aten.batch_norm.default, *node.args[:5], False, momentum, eps, False)
            parts = {0: whole, **dict(enumerate(statistics[:2], 3))}
            for i in {part.args[1] for part in node.users if part.users} & {1, 2}:
                parts[i] = emit(graph, node, aten.new_empty.default, source, [0])
            replace_parts(node, parts)
        elif in_training and (name not in _OF_LIBRARIES or statistics[:2] == [None, None]):
            updated = (*statistics[:2], momentum) if name == FUNCTIONAL else ()
            replace_parts(node, _BatchNormFormula(graph, node, source, eps).parts(weight, bias, *updated))


class _BatchNormFormula:
    """Nodes of a decomposed batch norm: statistics over all dims but the channels, and outputs.

    Statistics have at least float32 precision. Reduced dims stay in them with size 1, so that they broadcast against
    the input.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, source: fx.Node, eps: float):
        self.graph, self.node = graph, node
        self.first = True
        sizes = shape(source)
        self.dtype = value(source).dtype
        self.working = torch.promote_types(self.dtype, torch.float32)
        self.dims = [dim for dim in range(len(sizes)) if dim != 1]
        self.count = math.prod(sizes[dim] for dim in self.dims)
        self.channels = [sizes[1]] + [1] * (len(sizes) - 2)
        source = self._cast(source, self.working)
        self.mean = self._mean(source)
        self.centred = self._emit(aten.sub.Tensor, source, self.mean)
        self.var = self._mean(self._emit(aten.mul.Tensor, self.centred, self.centred))
        self.scale = self._emit(aten.rsqrt.default, self._emit(aten.add.Tensor, self.var, eps))

    def normalised(self, weight: Any, bias: Any) -> fx.Node:
        scale = self.scale
        if weight is not None:
            scale = self._emit(aten.mul.Tensor, scale, self._per_channel(weight))
        result = self._emit(aten.mul.Tensor, self.centred, scale)
        if bias is not None:
            result = self._emit(aten.add.Tensor, result, self._per_channel(bias))
        return self._cast(result, self.dtype)

    def parts(self, weight: Any, bias: Any, mean: Any = None, var: Any = None, momentum: float = 0.0) -> dict:
        """Return {index: output} of the fused operator.

        Output 0 is the normalized value. Output 1 is the mean and output 2 is one over the standard deviation, both
        without a gradient. Outputs 3 and 4 are the new running mean and variance; they exist only if running
        statistics are passed.
        """
        outputs = {0: self.normalised(weight, bias)}
        used = {part.args[1] for part in self.node.users if part.users}
        for i, statistic in ((1, self.mean), (2, self.scale)):
            outputs[i] = self._flat(self._emit(aten.detach.default, statistic) if i in used else statistic)
        if mean is not None:
            unbiased = self.count / max(self.count - 1, 1)
            outputs[3] = self._moved(mean, self.mean, momentum, 1.0)
            outputs[4] = self._moved(var, self.var, momentum, unbiased)
        return outputs

    def _moved(self, running: fx.Node, batch: fx.Node, momentum: float, factor: float) -> fx.Node:
        """Return the new running statistic, `(1 - momentum) * running + momentum * factor * batch`.

        `batch` is detached: running statistics have no gradient.
        """
        kept = self._emit(aten.mul.Tensor, running, 1 - momentum)
        new = self._flat(self._emit(aten.detach.default, batch))
        new = self._emit(aten.mul.Tensor, new, momentum * factor)
        return self._cast(self._emit(aten.add.Tensor, kept, new), value(running).dtype)

    def _mean(self, source: fx.Node) -> fx.Node:
        total = self._emit(aten.sum.dim_IntList, source, self.dims, True)
        return self._emit(aten.div.Tensor, total, self.count)

    def _per_channel(self, parameter: fx.Node) -> fx.Node:
        return self._emit(aten.reshape.default, self._cast(parameter, self.working), self.channels)

    def _flat(self, statistic: fx.Node) -> fx.Node:
        return self._emit(aten.reshape.default, statistic, [self.channels[0]])

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if value(node).dtype == dtype else self._emit(aten.to.dtype, node, dtype)

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        call = emit(self.graph, self.node, target, *args)
        facts(call)["written_for"] = BATCH_NORM
        is_first = self.first and not changes_precision(call)
        facts(call)["named"] = BATCH_NORM if is_first else INNER
        self.first = self.first and not is_first
        return call

"""Facts: typed entries of `fx.Node.meta` in which one pass stores results for later passes.

`Facts` declares all keys. Passes communicate through no other keys, and the type checker rejects undeclared ones.
Copies of a node share its facts, as with torch.export.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
from torch import fx

if TYPE_CHECKING:
    from autopart.ir.layout import Layout, Sections
    from autopart.ir.mask_structure import MaskWindow
    from autopart.ir.pattern import Pattern


INPUT, DATA, PARAMETER, WEIGHT, ACTIVE = "input", "data", "parameter", "weight", "active"
"""Roles of nodes (passes/facts/analyze.py)."""


class CostNotes(NamedTuple):
    """Cost properties of an operator that do not follow from its tensor shapes.

    Attributes:
        kind: which efficiency curve of the hardware profile applies to its products, "matmul" or "attention".
        backward_work: FLOPs of the backward divided by FLOPs of the forward, if the backward is one kernel. 0: the
            backward runs one matrix product per operand.
        looks_up: the operator reads one row of its first operand for each row of its output, like an embedding.
        gradient_is_view: the gradient of its operand is a view of the gradient of its output.
        is_causal: attention with a kernel that skips masked keys of a causal mask.
        counts_attended: its FLOPs include only attended pairs of queries and keys.
        joins: how `torch.compile` fuses the operator with others. "": not fused, unless the operator is elementwise.
            "remade": fused, and the backward recomputes it if that saves memory. "copied": fused, never recomputed.
            "drawn": fused, and its random mask is saved for backward.
        gradients: kernels of the operator's backward in eager torch. "together": one kernel for the gradients of all
            operands. "each": one kernel per operand. "handed on": no kernel; an addition passes its output gradient on.
            "part": a slice copies its gradient into zeros. "parts": a split concatenates gradients. "repeated": an
            `expand` sums its gradient.
        passes: values that the kernels of the operator read or write, forward and backward, per value of its first
            operand, in eager torch. (0, 0): as the shapes of inputs, outputs and saved tensors say.
        keeps_sign: the backward needs only the sign of the input, for which a compiler saves one byte per element.
    """

    kind: str = "matmul"
    backward_work: float = 0.0
    looks_up: bool = False
    gradient_is_view: bool = False
    is_causal: bool = False
    counts_attended: bool = False
    joins: Literal["", "remade", "copied", "drawn"] = ""
    gradients: Literal["together", "each", "handed on", "part", "parts", "repeated"] = "together"
    passes: tuple[int, int] = (0, 0)
    keeps_sign: bool = False

    @property
    def is_arithmetic(self) -> bool:
        return self.gradients in ("each", "handed on")


class Facts(TypedDict, total=False):
    """Facts of a graph node: results that a pass stores in the node's `meta` for later passes.

    A key is absent if the fact does not apply to the node.
    """

    # From torch.export: the stack of running modules, and the user's source lines.
    nn_module_stack: dict[str, tuple[str, Any]]
    stack_trace: str

    # From the trace.
    input_name: str  # of a placeholder: name of the model input
    input_grad: bool  # of a placeholder: the caller's tensor needs a gradient
    parameter: bool  # of a placeholder: it represents a parameter
    constant: bool  # a tensor that the trace captured, not an input
    repeated_template: tuple[int, int]  # of a cached block trace: its number, and the number of the call
    repeated_block: int  # of a marker node: the repetition of blocks to insert here
    custom: dict[str, Any]  # torch copies it to the nodes that replace this one. `copied`: for a node of a cached
    # block trace, the block's number, its copy, and the number of the call
    block: tuple[str, int]  # of a deduplicated graph, traced or lowered: chain of equal blocks, and block number
    times: int  # of a deduplicated graph: how many nodes of the model the node represents, if more than one
    counted: bool  # its size is data-dependent
    numbers: frozenset[int]  # of the output node: which of the model's outputs are Python numbers, computed by it

    # From the passes that normalise.
    named: str  # operator name for `key`, if a pass wrote the node in place of another operator
    written_for: str  # the operator that a pass decomposed into this node and others
    attention: str  # of decomposed attention with dropout: the attention call it was decomposed from
    tied_to_mode: bool  # it exists only in train mode, or only in eval mode
    inexact: str  # why `rng="exact"` cannot reproduce this random op
    inexact_on_gpu: str  # why `rng="exact"` cannot reproduce this random op on a GPU
    loss: bool  # an operator of the loss function, or an input that only the loss function reads
    reads_no_value: bool  # it reads only the shape and dtype of its input
    counted_flops: int

    # From the analysis of every value (passes/facts/analyze.py).
    role: str  # INPUT, DATA, PARAMETER, WEIGHT or ACTIVE
    needs_grad: bool  # a gradient flows through it
    whole_grads: bool  # its backward is not linear in the gradients, so partial gradients must be reduced first
    key: str  # its name in plans: `model.layers.3.mlp/mul#1`
    group: str  # `key` with `*` in place of block numbers
    pattern: Pattern | None  # its sharding rule fitted to its shapes; None if it has no rule
    moves: bool  # it moves elements and computes nothing
    atoms: Any  # the atoms of every dim (`atoms.Atom`); for several outputs a tuple of these
    sections: dict[int, set[Sections]]  # by dim, the sections that a later view or split needs
    offered: dict[int, set[Sections]]  # by dim, the sections that an earlier `cat` concatenated
    rows: set[int]  # of an input-independent tensor: the dims that are used as the batch
    first_dim_is_data: bool  # of an input: its first dim has the size of the batch, but is not the batch
    zigzag: bool  # the sequence is sharded in zigzag, because of causal attention
    other_positions: frozenset[str]  # factors of its rule that are not a sequence, if the user names sequence dims
    for_buffers: bool  # it only computes new values of buffers
    strategies: dict[Any, Any]  # cache of `strategies`, shared by all nodes with equal inputs to that function
    place: Any  # its position in its repeated block (`find_blocks.BlockPosition`)
    band: MaskWindow  # of an attention mask, traced or lowered: its structure in the traced call
    queries: int  # of an attention mask: the number of queries in the traced call
    routed: bool  # its rows are dispatched to experts: `to_experts`, and what is computed from it
    shares: dict[int, float]  # by dim of selected elements, the fraction of the mask's elements that a plan assumes
    on_host: bool  # it computes its value on the CPU in a model that is on a GPU

    # Of a node of a stage graph.
    scores: tuple[int | str, int | str]  # of a call that reads a mask, in a graph with sizes as inputs: the numbers
    # of queries and keys, or the names of the inputs with these numbers
    origin: str  # the traced node whose value it computes
    layout: Layout  # the layout of that value
    region: int  # number of the nodes that are recomputed together
    received: bool  # it gathers the shards of a received value
    cost: CostNotes  # cost properties of its operator, if there are any

    # Of a subgraph that is shown as text.
    recorded: bool  # it represents a value that is computed elsewhere
    hidden: bool  # it is left out of the text
    comment: str


def facts(node: fx.Node) -> Facts:
    """Return the facts of a node, its `meta`, as a dict that the caller can change."""
    return node.meta  # without `cast`, which takes time: this function is called very often


def times(node: fx.Node) -> int:
    """Return how many nodes of the model this node represents: 1 unless the trace is deduplicated."""
    return facts(node).get("times", 1)


def weighted(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """Yield (node, number of nodes of the model that it represents).

    A sum over a deduplicated graph multiplies the value of each node by this number.
    """
    return ((node, times(node)) for node in nodes)


def num_represented(nodes: Iterable[fx.Node]) -> int:
    """Return how many nodes of the model these nodes represent."""
    return sum(map(times, nodes))


def cost_notes(node: fx.Node) -> CostNotes:
    """Return the cost properties of a node of a stage graph."""
    return facts(node).get("cost", CostNotes())


def is_fusible(node: fx.Node) -> bool:
    """Return True if a compiler fuses this operator with others."""
    return bool(cost_notes(node).joins) or torch.Tag.pointwise in getattr(node.target, "tags", ())

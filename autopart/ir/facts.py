"""What is known of a node of a graph, by name and type: the one place that says what passes tell each other.

A graph's nodes carry their facts along in `fx.Node.meta`, as torch.export does: copies of a node have them too. No
pass reads or writes another key, so that a name that is not here is an error of the type checker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
from torch import fx

if TYPE_CHECKING:
    from autopart.ir.layout import Layout, Sections
    from autopart.ir.mask_structure import Band
    from autopart.ir.pattern import Pattern


INPUT, DATA, PARAMETER, WEIGHT, ACTIVE = "input", "data", "parameter", "weight", "active"
"""The roles of nodes (passes/facts/analyze.py)."""


class CostNotes(NamedTuple):
    """What of an operator's cost does not follow from the shapes of a call.

    `kind`: whose rate its matrix work has, "matmul" or "attention". `backward_work`: the matrix work of its backward,
    in forwards, where that is one kernel; 0: one product for every operand. `looks_up`: it reads, of its first
    operand, a row for each that it makes. `gradient_is_view`: the gradient of its operand is a view of its output's.
    `is_causal`: it is attention whose kernel leaves out the keys behind a query. `counts_seen`: the same, of work
    that was counted of the keys that are seen alone. `joins`: a compiler makes it part of a kernel with others, as it
    does with all that works number by number: "remade" in the backward where that keeps less, "copied" where it is not
    made again, or "drawn" where the mask that it keeps is not. `gradients`: what makes those of its operands in eager
    torch: one kernel ("together"), one for each ("each"), of sums none ("handed on"); of a view zeros and the "part",
    the "parts" joined, or what was "repeated" summed. Arithmetic has "each" or "handed on". `keeps_sign`: of what
    its backward reads it needs the sign alone, of which a compiler keeps a byte a number.
    """

    kind: str = "matmul"
    backward_work: float = 0.0
    looks_up: bool = False
    gradient_is_view: bool = False
    is_causal: bool = False
    counts_seen: bool = False
    joins: Literal["", "remade", "copied", "drawn"] = ""
    gradients: Literal["together", "each", "handed on", "part", "parts", "repeated"] = "together"
    keeps_sign: bool = False

    @property
    def is_arithmetic(self) -> bool:
        return self.gradients in ("each", "handed on")


class Facts(TypedDict, total=False):
    """Facts of a node; those that do not hold are left out."""

    # Of torch.export: the modules that were running, and the lines of the user's code.
    nn_module_stack: dict[str, tuple[str, Any]]
    stack_trace: str

    # Of the trace.
    input_name: str  # of a placeholder: of the model's input
    input_grad: bool  # of a placeholder: the caller's tensor needs a gradient
    parameter: bool  # of a placeholder: it stands for one
    constant: bool  # of what is no input: a tensor written into the trace
    repeated_template: tuple[int, int]  # of a block that was traced once: which block, and which of its calls
    repeated_block: int  # of a mark: which repetition of blocks stands here
    custom: dict[str, Any]  # what torch hands on to what it writes in a node's place: `copied`, of a block that was
    # traced once: which block, which of its copies, and which call
    block: tuple[str, int]  # of a folded graph, traced or written: the chain of like blocks, and which of them
    times: int  # of the same: how many nodes of the model it stands for, where these are several
    counted: bool  # its size depends on values

    # Of the passes that normalise.
    named: str  # what `key` calls it, where it was written in place of another operator
    written_for: str  # the operator for which it was written, among others
    attention: str  # of the formula of attention that drops weights: for which call it was written out
    tied_to_mode: bool  # it is there in train mode alone, or in eval mode
    inexact: str  # why `rng="exact"` cannot repeat this draw
    inexact_on_gpu: str  # the same, of what runs on a GPU
    loss: bool  # it belongs to the loss, not to the model
    reads_no_value: bool  # it reads the shape and type of its input alone
    counted_flops: int

    # Of what every value is (passes/facts/analyze.py).
    role: str  # INPUT, DATA, PARAMETER, WEIGHT or ACTIVE
    needs_grad: bool  # a gradient flows through it
    whole_grads: bool  # its backward is not linear in the gradients, which must be summed before
    key: str  # its name in plans: `model.layers.3.mlp/mul#1`
    group: str  # the same with block numbers left open
    pattern: Pattern | None  # its sharding rule fitted to its shapes; None without one
    moves: bool  # it moves elements and computes nothing
    atoms: Any  # for every dim what it is made of (`atoms.Atom`); of several outputs a tuple of these
    sections: dict[int, set[Sections]]  # by dim, the ways of cutting it that a later view or split asks for
    offered: dict[int, set[Sections]]  # by dim, those in which an earlier `cat` joined it
    rows: set[int]  # the dims of a tensor made of nothing that are used as rows of the batch
    zigzag: bool  # positions are cut in zigzag, for there is causal attention
    other_positions: frozenset[str]  # the factors of its rule that are of no sequence, where users name some
    for_buffers: bool  # it makes new values of buffers and nothing else
    strategies: dict[Any, Any]  # what `strategies` has found, shared with all nodes of which it reads the same
    place: Any  # where in which repeated block it is (`blocks.Place`)
    band: Band  # of a mask of attention, traced or written: what it is in the call that was traced
    queries: int  # of the same: how many there are in it
    routed: bool  # its rows are those that go to experts: of `to_experts`, and of what is computed from it
    shares: dict[int, float]  # by dim of selected elements, the share of the mask's elements that a plan counts
    on_host: bool  # it makes its value on the CPU in a model that is on a GPU

    # Of a node of a stage graph.
    origin: str  # the traced node whose value it holds
    layout: Layout  # the layout in which it holds it
    region: int  # the nodes that the backward runs again together
    received: bool  # it puts together what was received in parts
    cost: CostNotes  # of its operator, where there are any

    # Of a subgraph that is shown as text.
    recorded: bool  # it stands for a value that is made elsewhere
    hidden: bool  # it is left out of the text
    comment: str


def facts(node: fx.Node) -> Facts:
    """The facts of a node, to read and to write."""
    return node.meta  # as it is: a cast would be a call, and this is asked very often


def times(node: fx.Node) -> int:
    """How many nodes of the model this one stands for (`autopart.ir.blocks.deduplication`)."""
    return facts(node).get("times", 1)


def cost_notes(node: fx.Node) -> CostNotes:
    """The notes on the cost of a node of a stage graph."""
    return facts(node).get("cost", CostNotes())


def is_joined(node: fx.Node) -> bool:
    """Whether a compiler makes a call part of a kernel with others."""
    return bool(cost_notes(node).joins) or torch.Tag.pointwise in getattr(node.target, "tags", ())

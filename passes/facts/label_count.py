"""Number of labels that divides a mean loss, as a program input that a training step can replace.

A step that accumulates gradients over several batches divides by the number of labels in all batches.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopart.ir.facts import DATA, facts
from autopart.ir.graph import operator_name
from autopart.ir.program import LabelCount, Program

_SAME = ("aten::reshape", "aten::view", "aten::clone", "aten::alias", "aten::squeeze", "aten::_to_copy", "aten::to")
_SCALED = ("aten::mul", "aten::div", "aten::neg")
_SUMS = ("aten::sum",)
_COUNTED = (*_SAME, "aten::clamp", "aten::clamp_min", "aten::maximum")


def with_label_count(program: Program, loss: fx.Node) -> Program:
    """Return the program with `label_count` set to the name of the stage input that divides the loss.

    If there is no such input, `label_count` is a text with the reason.
    """
    division = _division(loss)
    if division is None:
        return replace(program, label_count=_why_not(loss))
    count = division.args[1]
    if [user for user in count.users if user is not division]:
        return replace(program, label_count="the number of labels has other uses")
    for stage in program.stages:
        names = {stage_input.name for stage_input in stage.inputs}
        for node in stage.graph.graph.find_nodes(op="placeholder"):
            if node.target in names and facts(node).get("origin") == count.name:
                return replace(program, label_count=LabelCount(stage.index, str(node.target)))
    return replace(program, label_count="its number of labels is not available before the step")


def _division(loss: fx.Node) -> fx.Node | None:
    """Return the node that divides the summed loss by the number of labels, or None.

    Between this node and the loss there may only be views, casts and constant factors.
    """
    node = loss
    while True:
        name = operator_name(node) if node.op == "call_function" else ""
        others = [argument for argument in node.args[1:] if isinstance(argument, fx.Node)]
        if name == "aten::div" and others:
            return node if _is_sum(node.args[0]) and _is_count(others[0]) else None
        if name not in (*_SAME, *_SCALED) or others or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]


def _is_sum(node: fx.Node) -> bool:
    while operator_name(node) in (*_SAME, *_SCALED) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return operator_name(node) in _SUMS


def _is_count(node: fx.Node) -> bool:
    """Return True if a value sums a tensor that depends only on inputs, such as a mask of valid labels."""
    if facts(node)["role"] != DATA:
        return False
    while operator_name(node) in _COUNTED and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return operator_name(node) in _SUMS


def _why_not(loss: fx.Node) -> str:
    if loss.op == "call_function" and operator_name(loss) == "aten::add":
        return "the loss has several terms, and only one of them is divided by the number of labels"
    return "the loss is not a sum over labels divided by their count"

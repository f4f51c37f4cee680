"""Faults of context and expert parallelism that other tools have shipped, planted one by one: `verify` finds each,
and names where it is."""

from __future__ import annotations

import pytest
import torch
import zoo
from context_models import calls, instead
from expert_models import mixture

import autopart
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name
from autopart.ops.operators import autopart_ops


def gradient_of_keys_stays(program, parameters):
    """A rank's queries give gradients to the keys of all, which nobody brings home."""
    for _, node in calls(program, "autopart::all_gather_sum", "self_attn/unsqueeze#2"):
        instead(node, autopart_ops.all_gather.default, *node.args)


def labels_counted_by_rank(program, parameters):
    """The loss is the mean over a rank's labels, as if each had as many."""
    for _, node in calls(program, "aten::div"):
        count = node.args[1]
        if facts(node).get("key") == "/div" and operator_name(count) != "aten::floor_divide":
            with node.graph.inserting_before(node):
                fewer = node.graph.call_function(torch.ops.aten.floor_divide.default, (count, 2))
            node.args = (node.args[0], fewer)


def shard_of_rank_0(what):
    """Every rank takes the first rank's shard of a value of the inputs: of masks, or of positions."""

    def tamper(program, parameters):
        for _, node in calls(program, "autopart::slice"):
            x, _, dim, size, *_ = node.args
            if facts(node).get("origin") == what:
                instead(node, torch.ops.aten.slice.Tensor, x, dim, 0, size // 2)

    return tamper


def gates_keep_their_gradient(program, parameters):
    """What experts give the gates of other ranks' tokens does not go back to the router."""
    for _, node in calls(program, "autopart::all_gather_sum"):
        if any("to_experts" in operator_name(user) for user in node.users) and node.meta["val"].shape[-1] == 1:
            instead(node, autopart_ops.all_gather.default, *node.args)


def experts_summed(program, parameters):
    """The gradients of different experts are summed over the ranks that have them."""
    for name in ("up", "down"):
        object.__setattr__(program.parameters[name], "grad_axes", ("ep",))


def rows_back_in_another_order(program, parameters):
    """Rows are not put back where they came from."""
    for _, node in calls(program, "autopart::from_experts"):
        rows = node.args[0]
        if operator_name(rows) != "aten::flip":
            with node.graph.inserting_before(node):
                turned = node.graph.call_function(torch.ops.aten.flip.default, (rows, [0]))
            node.args = (turned, *node.args[1:])


def folded():
    """A mixture whose experts are also cut over tp."""
    return mixture(), {name: {"tp": "S(0)"} for name in ("up", "up_bias", "down")}


def summed_over(*axes):
    """The gradients of experts are summed over these axes."""

    def tamper(program, parameters):
        for name in ("up", "down"):
            object.__setattr__(program.parameters[name], "grad_axes", axes)

    return tamper


@pytest.mark.few
@pytest.mark.parametrize("axes", [("dp", "tp"), ("dp", "ep"), ()], ids=["one too many", "another", "one too few"])
def test_gradients_of_folded_experts_are_summed_over_data_ranks_alone(axes):
    (model, batch), pins = folded()
    assert autopart.verify(model, "dp2,ep2,tp2", example_kwargs=batch, pins=pins).ok
    report = autopart.verify(model, "dp2,ep2,tp2", example_kwargs=batch, pins=pins, tamper=summed_over(*axes))
    assert not report.ok and report.first_mismatch.kind == "gradient"
    assert report.first_mismatch.name == "down" and "/expert_linear#1" in report.first_mismatch.operator


def rows_of_the_first_experts(program, parameters):
    """Every rank takes the rows of the experts of the first one."""
    for name in ("to_experts", "from_experts"):
        for _, node in calls(program, f"autopart::{name}"):
            node.args = (*node.args[:4], 0, *node.args[5:])


def test_ranks_with_the_rows_of_other_experts_are_found():
    (model, batch), pins = folded()
    report = autopart.verify(model, "ep2,tp2", example_kwargs=batch, pins=pins, tamper=rows_of_the_first_experts)
    assert not report.ok and "/embedding" in report.first_mismatch.operator, "a bias is looked up for each row"


FAULTS = [
    (zoo.llama, "cp2", gradient_of_keys_stays, "gradient", "model.layers.1.self_attn/expand"),
    (zoo.llama, "cp2", labels_counted_by_rank, "value", "/div"),
    (zoo.llama, "cp2", shard_of_rank_0("and_2"), "value", "scaled_dot_product_attention"),
    (zoo.llama, "cp2", shard_of_rank_0("unsqueeze_14"), "value", "model.layers.0.self_attn/unsqueeze"),
    (mixture, "ep2", gates_keep_their_gradient, "gradient", "/to_experts#2"),
    (mixture, "ep2", experts_summed, "gradient", "/expert_linear#1"),
    (mixture, "ep2", rows_back_in_another_order, "value", "/from_experts"),
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize(("made", "mesh", "fault", "kind", "where"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_it_is_found_and_named(made, mesh, fault, kind, where):
    model, batch = made()
    assert autopart.verify(model, mesh, example_kwargs=batch).ok
    report = autopart.verify(model, mesh, example_kwargs=batch, tamper=fault)
    assert not report.ok
    found = report.first_mismatch
    assert found.kind == kind and where in found.operator, found.operator

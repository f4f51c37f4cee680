"""Axes are data: a table with a second axis that cuts rows, and a second that cuts features, is all it takes."""

from __future__ import annotations

import dist
import pytest
import zoo
from fuzz import WIDER
from process_checks import same_everything

import autopart
from autopart.errors import MeshError
from autopart.ir.mesh import Mesh
from autopart.plans.plan import Plan

MODELS = {"gpt2": zoo.gpt2, "llama": zoo.llama}


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2,rows2,tp2", "tp2,feat2", "pp2,rows2,feat2"])
@pytest.mark.parametrize("model", MODELS)
def test_axes_that_only_the_table_knows_are_exact(model, mesh):
    module, batch = MODELS[model]()
    report = autopart.verify(module, Mesh.parse(mesh, WIDER), example_kwargs=batch)
    assert report.ok, report


@pytest.mark.large
def test_they_run_on_processes():
    dist.run_ranks(same_everything, 4, "gpt2", Mesh.parse("rows2,feat2", WIDER), timeout_s=120.0)


def test_parameters_are_stored_in_parts_over_one_of_two_axes_of_rows():
    model, batch = zoo.llama()
    mesh = Mesh.parse("dp2,rows2,tp2", WIDER)
    plan = autopart.plan(model, mesh, example_kwargs=batch, zero=3)
    assert plan.placement_text("model.layers.0.mlp.up_proj.weight", "dp") == "S(1)"
    report = autopart.verify(model, mesh, example_kwargs=batch, zero=3)
    assert report.ok, report


@pytest.mark.large
def test_a_plan_on_them_cuts_weights_in_two_dims_and_is_read_back():
    model, batch = zoo.llama()
    mesh = Mesh.parse("feat2,tp2", WIDER)
    plan = autopart.plan(model, mesh, example_kwargs=batch)
    assert plan.parameters["model.layers.*.mlp.up_proj.weight"] == {"feat": "S(1)", "tp": "S(0)"}
    step_s = autopart.simulate(plan).step_time_s
    assert "feat2,tp2" in plan.explain() and plan.cost.at().step_time_s == pytest.approx(step_s)
    assert {"tp", "feat", "g_feat"} <= set(map(str, plan.cost.free_symbols)) and plan.cost.at(feat=1).step_time_s > 0
    report = autopart.verify(model, mesh, example_kwargs=batch, plan=Plan.from_json(plan.to_json(), axes=WIDER))
    assert report.ok, report


def test_the_table_that_ships_does_not_know_them():
    with pytest.raises(MeshError, match="unknown mesh axis 'rows'\n  why    the axes are pp, dpr, dp, cp, ep, tp"):
        Mesh.parse("dp2,rows2")

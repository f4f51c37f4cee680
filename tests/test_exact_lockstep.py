"""Larger meshes than there are processes for, and sizes that do not divide: all ranks in one process, by `verify`."""

import pytest
import zoo

import autopart

MESHES = ("tp8", "pp8", "dp2,pp2,tp2", "dp2,pp4,tp4")

AWKWARD = {  # sizes that tp does not divide: (model, its sizes, mesh)
    "6 heads on tp4": (zoo.gpt2, {"hidden": 24, "heads": 6}, "tp4"),
    "3 heads on tp2": (zoo.gpt2, {"hidden": 24, "heads": 3}, "tp2"),
    "6 heads of llama on tp4": (zoo.llama, {"hidden": 48, "heads": 6, "kv_heads": 3}, "tp4"),
    "5 heads of bert on tp4": (zoo.bert, {"hidden": 40, "heads": 5}, "tp4"),
    "3 heads of t5 on tp4": (zoo.t5, {"hidden": 24, "heads": 3}, "tp4"),
    "6 heads of torch on tp4": (zoo.transformer_encoder, {"hidden": 24, "heads": 6}, "tp4"),
    "2 kv heads on tp4": (zoo.llama, {"heads": 4, "kv_heads": 2}, "tp4"),
    "2 kv heads on dp2,pp2,tp4": (zoo.llama, {"heads": 8, "kv_heads": 2}, "dp2,pp2,tp4"),
    "2 fused kv heads on tp4": (zoo.phi3, {"heads": 4, "kv_heads": 2}, "tp4"),
    "1 kv head on tp2": (zoo.llama, {"heads": 4, "kv_heads": 1}, "tp2"),
    "hidden 30 on tp4": (zoo.skip_mlp, {"hidden": 30}, "tp4"),
    "classes 10 on tp4": (zoo.conv_net, {"classes": 10}, "tp4"),
    "vocabulary 97 on tp2": (zoo.llama, {"vocab": 97}, "tp2"),
    "vocabulary 97 on tp4": (zoo.gpt2, {"vocab": 97}, "tp4"),
    "vocabulary 97 of bert on tp4": (zoo.bert, {"vocab": 97}, "tp4"),
    "vocabulary 97 of t5 on tp4": (zoo.t5, {"vocab": 97}, "tp4"),
    "vocabulary 97 on pp2,tp4": (zoo.transformer_encoder, {"vocab": 97}, "pp2,tp4"),
    "vocabulary 50257 on tp4": (zoo.gpt2, {"vocab": 50257, "hidden": 8, "heads": 4, "num_layers": 1}, "tp4"),
    "vocabulary 50257 of llama on tp4": (
        zoo.llama,
        {"vocab": 50257, "hidden": 8, "heads": 4, "kv_heads": 4, "num_layers": 1},
        "tp4",
    ),
    "an odd sequence on tp4": (zoo.llama, {"seq": 13}, "tp4"),
    "batch 6 on dp3,tp2": (zoo.gpt2, {"rows": 6}, "dp3,tp2"),
}


def assert_exact(model, batch, mesh, **options):
    """Right, and not because little was compared: every gradient and every output is there."""
    found = autopart.verify(model, mesh, example_kwargs=batch, **options)
    assert found.ok, str(found)
    assert found.max_error < 1e-12 and found.first_mismatch is None
    compared = set(found.errors)
    _, _, grads = zoo.reference(model, batch)
    assert {name for name, grad in grads.items() if grad is not None} | {"loss", "output 0"} <= compared


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_zoo_model_on_mesh(name, mesh):
    assert_exact(*zoo.ZOO[name](), mesh)


@pytest.mark.parametrize("case", AWKWARD)
def test_sizes_that_do_not_divide(case):
    builder, sizes, mesh = AWKWARD[case]
    assert_exact(*builder(**sizes), mesh)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("name", ["gpt2", "bert", "conv_net"])
def test_microbatches_without_stages(name, microbatches):
    assert_exact(*zoo.ZOO[name](), "tp2", microbatches=microbatches)


def test_deep_model_on_many_stages():
    assert_exact(*zoo.gpt2(num_layers=8, hidden=16, heads=2), "dp2,pp8,tp2", microbatches=4)

"""Text generation with a partitioned model: the tokens and logits of one device, on every rank."""

import dist
import pytest
import torch
from generating_models import MODELS

import autopart
from autopart.ir.mesh import Mesh

GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLED = {"max_new_tokens": 6, "do_sample": True, "top_k": 20, "temperature": 0.9}
WITH_LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def results(generate, prompt):
    """Greedy and sampled tokens, and the logits of the greedy ones."""
    torch.manual_seed(3)
    sampled = generate(**prompt, **SAMPLED)
    greedy = generate(**prompt, **GREEDY, **WITH_LOGITS)
    return sampled, greedy["sequences"], torch.stack(greedy["logits"])


def on_ranks(name, mesh, options):
    model, example, prompt = MODELS[name]()
    pm = autopart.parallelize(model, mesh, example_kwargs=example, rng="exact", **options)
    return results(pm.generate, prompt)


def assert_as_on_one_device(name, mesh, **options):
    model, _, prompt = MODELS[name]()
    expected = results(model.eval().generate, prompt)
    num_ranks = Mesh.parse(mesh).num_ranks
    for sampled, greedy, logits in dist.run_ranks(on_ranks, num_ranks, name, mesh, options, timeout_s=300.0):
        torch.testing.assert_close(logits, expected[2], rtol=1e-5, atol=1e-5)
        assert torch.equal(greedy, expected[1]), (greedy, expected[1])
        assert torch.equal(sampled, expected[0]), (sampled, expected[0])


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2", "pp2,tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_device(name, mesh):
    assert_as_on_one_device(name, mesh)

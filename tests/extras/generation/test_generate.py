"""Text generation with a partitioned model: the tokens and logits of one device, on every rank."""

import dist
import pytest
import torch
from generating_models import MODELS, gpt_neo

import autopart
from autopart.errors import InputError, UsageError
from autopart.ir.mesh import Mesh
from autopart.ops.key_value_cache import CacheStore

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


@pytest.mark.few
@pytest.mark.parametrize(("name", "mesh"), [("llama", "cp2"), ("gemma3", "dp2,tp2")])
def test_tokens_on_other_meshes(name, mesh):
    assert_as_on_one_device(name, mesh)


def tokens_of_gpt_neo(mesh):
    model, example, prompt = gpt_neo()
    pm = autopart.parallelize(model, mesh, example_kwargs=example)
    return pm.generate(**prompt, **GREEDY)


def test_model_without_static_cache():
    model, _, prompt = gpt_neo()
    expected = model.eval().generate(**prompt, **GREEDY)
    for tokens in dist.run_ranks(tokens_of_gpt_neo, 2, "tp2", timeout_s=300.0):
        assert torch.equal(tokens, expected)


def during_training(mesh, options):
    """Tokens before and after a step of the optimizer, and after a change of modes; errors; sizes of the caches."""
    model, example, prompt = MODELS["llama"]()
    pm = autopart.parallelize(model, mesh, example_kwargs=example, **options)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.5)
    found, sizes = [], set()
    write = CacheStore.write

    def watched(store, x, positions, name, length):
        cache = write(store, x, positions, name, length)
        sizes.add(tuple(cache.shape))
        return cache

    CacheStore.write = watched
    try:
        for _ in range(2):
            pm.model.layers[0].eval()
            found.append(pm.generate(**prompt, **GREEDY))
            assert pm.training and not pm.model.layers[0].training and pm.model.layers[1].training
            pm.train()
            pm.step(**example)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        CacheStore.write = write
    found.append(pm.generate(**prompt, **GREEDY, use_cache=False))
    torch.manual_seed(torch.distributed.get_rank())
    drawn = [pm.generate(**prompt, **SAMPLED) for _ in range(2)]
    messages = []
    for refused in REFUSED:
        try:
            pm.generate(**prompt, max_new_tokens=2, **refused)
        except UsageError as error:
            messages.append(str(error))
    rank = torch.distributed.get_rank()
    other = {**prompt, "input_ids": prompt["input_ids"] + rank}
    for call in (lambda: pm.generate(**other, **GREEDY), lambda: pm.generate(**prompt, max_new_tokens=2 + rank)):
        try:
            call()
        except InputError as error:
            messages.append(str(error))
    return found, drawn, sizes, messages


REFUSED = [{"num_beams": 2}, {"max_time": 1.0}, {"cache_implementation": "quantized"}, {"prompt_lookup_num_tokens": 2},
           {"past_key_values": ()}]  # fmt: skip
MESSAGES = [
    "generate() does not support beam search on a partitioned model",
    "generate(max_time=1.0) is not supported on a partitioned model",
    "generate(cache_implementation='quantized') is not supported by autopart",
    "generate() does not support assisted generation on a partitioned model",
    "generate(past_key_values=...) is not supported for a partitioned model",
    "the ranks are called with different values of input_ids",
    "the ranks are called with different inputs",
]


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options", "size"), [
    ("tp2", {}, (2, 1, 64, 8)), ("dp2", {"zero": 3}, (1, 2, 64, 8)), ("pp2", {}, (2, 2, 64, 8)),
])  # fmt: skip
def test_generation_between_steps(mesh, options, size):
    model, example, prompt = MODELS["llama"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(2):
        expected.append(model.eval().generate(**prompt, **GREEDY))
        model.train()(**example).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected.append(model.eval().generate(**prompt, **GREEDY))
    assert not torch.equal(expected[0], expected[1])
    ranks = dist.run_ranks(during_training, 2, mesh, options, timeout_s=300.0)
    for found, drawn, sizes, messages in ranks:
        assert all(map(torch.equal, found, expected)), (found, expected)
        assert all(map(torch.equal, drawn, ranks[0][1])) and not torch.equal(*drawn)
        assert sizes == {size}
        assert [message.splitlines()[0] for message in messages] == MESSAGES


def refusals():
    pm = autopart.parallelize(torch.nn.Linear(4, 4), "dp2", example_args=(torch.ones(2, 4),))
    model, example, prompt = MODELS["gpt2"]()
    local = autopart.parallelize(model, "dp2", example_kwargs=example, local_batch=True)
    texts = []
    for call in (lambda: pm.generate(torch.ones(1, 1)), lambda: local.generate(**prompt)):
        with pytest.raises(UsageError) as caught:
            call()
        texts.append(str(caught.value).splitlines()[0])
    return texts


def test_refusals():
    expected = ["Linear cannot generate", "generate() is not supported with local_batch=True"]
    assert dist.run_ranks(refusals, 2, timeout_s=200.0) == [expected] * 2

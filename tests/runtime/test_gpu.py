"""Part of the proof on a GPU: two ranks share one over gloo, which sends what it must through the host.

Skipped without CUDA (see conftest.py). One GPU is enough.
"""

import copy

import dist
import pytest
import torch
import zoo
from random_models import MODELS, trained

import autopart
from autopart.compat.torch_internals import tree_flatten
from autopart.runtime.consistency.checksums import checksum

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TABLE = [
    *((name, mesh) for name in ("gpt2", "llama", "skip_mlp", "conv_net") for mesh in ("tp2", "dp2", "pp2")),
    ("gpt2", "pp2,tp2"),
    ("bert", "dp2,tp2"),
]
TIMEOUT_S = 180.0


def on_device(model, batch):
    return model.to(DEVICE), {name: value.to(DEVICE) for name, value in batch.items()}


def trains_alike(name, mesh):
    """With rng="exact", two AdamW steps with dropout end in the weights of one GPU."""
    model, batch = MODELS[name]()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # fused attention draws its masks inside
    model, batch = on_device(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, rng="exact")
    ends = []
    for module, step in ((pm, pm.step), (model, model)):
        torch.manual_seed(7)
        trained(module, step, batch, weight_decay=0.01)
        ends.append(dict(module.full_state_dict() if module is pm else module.state_dict()))
    zoo.assert_close_outputs(*ends)


def refuses_fused_attention(mesh):
    model, batch = on_device(*MODELS["gpt2"]())
    with pytest.raises(autopart.AutopartError, match="fused attention kernels"):
        autopart.parallelize(model, mesh, example_kwargs=batch, rng="exact").step(**batch)


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
@pytest.mark.parametrize("name", ["gpt2", "conv_net"])
def test_random_numbers_are_those_of_one_gpu(name, mesh):
    dist.run_ranks(trains_alike, 2, name, mesh, timeout_s=TIMEOUT_S)


def test_fused_attention_cannot_be_exact():
    dist.run_ranks(refuses_fused_attention, 2, "tp2", timeout_s=TIMEOUT_S)


def assert_on_device(tree):
    tensors = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    assert tensors and all(t.device.type == DEVICE for t in tensors), {str(t.device) for t in tensors}


def same_everything(name, mesh):
    """As on the CPU: outputs, loss, gradients and two AdamW steps, all on the GPU."""
    model, batch = on_device(*zoo.ZOO[name]())
    outputs, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    assert pm.device.type == DEVICE
    assert_on_device(list(pm.parameters()))

    found = pm(**batch)
    assert_on_device(found)
    zoo.assert_close_outputs(found, outputs)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), grads)

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, model)]
    for _ in range(2):
        pm.zero_grad()
        model.zero_grad()
        pm.step(**batch)
        out = model(**batch, **zoo.no_cache(model))
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    state = pm.full_state_dict()
    for key, value in model.state_dict().items():
        zoo.assert_close_outputs(state[key], value, where=key)


def batch_on_the_host(mesh):
    """A batch may stay on the host, as a data loader leaves it."""
    model, host = zoo.gpt2()
    model, batch = on_device(model, host)
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=host)
    zoo.assert_close_outputs(pm.step(**host), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), grads)


def own_loop(mesh):
    model, batch = on_device(*zoo.llama())
    _, _, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    pm(**batch).loss.backward()
    zoo.assert_same_grads(pm.full_grads(), grads)


@pytest.mark.parametrize(("name", "mesh"), TABLE)
def test_zoo_model_on_gpu(name, mesh):
    dist.run_ranks(same_everything, autopart.Mesh.parse(mesh).num_ranks, name, mesh, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_batch_on_the_host(mesh):
    dist.run_ranks(batch_on_the_host, 2, mesh, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_own_loop(mesh):
    dist.run_ranks(own_loop, 2, mesh, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_is_that_of_the_host(dtype):
    """By which ranks on any device compare their weights and calls; for all sizes of words."""
    for size in (1, 7, 64, 5000, 2**18 + 3):
        values = torch.randint(0, 100, (size,)).to(dtype)
        assert int(checksum(values.to(DEVICE))) == int(checksum(values))


def test_what_is_copied_from_the_host_is_on_the_gpu():
    """A model that draws and makes numbers on the host by name."""
    model, x = zoo.Hosted().to(DEVICE), torch.randn(4, 8, device=DEVICE)
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,), rng="exact")
    torch.manual_seed(5)
    found = pm.step(x)
    torch.manual_seed(5)
    torch.testing.assert_close(found, model(x).detach())


def test_one_rank_needs_no_process_group():
    same_everything("gpt2", "dp1")


@pytest.mark.parametrize("mesh", ["tp4", "dp2,pp2,tp2"])
def test_verify_of_a_model_on_the_gpu(mesh):
    model, batch = on_device(*zoo.gpt2())
    found = autopart.verify(model, mesh, example_kwargs=batch)
    assert found.ok, str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_causal_mask_takes_no_more_than_the_kernel_of_the_module(dtype):
    """With fewer heads of keys too. In bfloat16 that is flash attention; no kernel writes all scores out."""
    model, batch = zoo.llama(hidden=512, heads=8, kv_heads=2, rows=1, seq=4096, exact=False)
    model, batch = on_device(model.to(dtype), batch)
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_kwargs=batch)
    pm.step(**batch)
    pm.zero_grad()
    scores_bytes = 8 * 4096 * 4096 * dtype.itemsize
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pm.step(**batch)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2 * scores_bytes
    kernels = {event.key for event in profile.key_averages()}
    assert dtype == torch.float32 or any("flash" in name for name in kernels), sorted(kernels)


def most_allocated(step):
    """The bytes that a second call takes at most beside what was there, and the names of its kernels."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_that_drops_weights_runs_the_kernel_of_the_module(compiled):
    """GPT-2 with its dropout: flash attention, and no more memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).to(DEVICE, torch.bfloat16).train()
    tokens = torch.randint(0, 50257, (4, 1024), device=DEVICE)
    batch = {"input_ids": tokens, "labels": tokens}
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_kwargs=batch, compile=compiled)

    def step():
        pm.zero_grad()
        pm.step(**batch)

    def of_the_module():
        model.zero_grad()
        model(**batch).loss.backward()

    held, kernels = most_allocated(step)
    assert any("flash" in name for name in kernels), sorted(kernels)
    assert held <= 1.05 * most_allocated(of_the_module)[0]


SEED, P = torch.tensor([3]), 0.3


def kept_weights(dtype, salt=1, function=None):
    """What attention to all keys alike makes of values that are the rows of the identity, and their gradient."""
    query, key = (torch.zeros(2, 3, 128, 64, dtype=dtype, device=DEVICE, requires_grad=True) for _ in "qk")
    value = torch.eye(128, dtype=dtype, device=DEVICE)[:, :64].expand(2, 3, 128, 64).contiguous().requires_grad_()
    arguments = (query, key, value, None, P, SEED, salt, [0], False, None, False)
    output = (function or torch.ops.autopart.attention_dropout)(*arguments)
    grad = torch.eye(128, dtype=dtype, device=DEVICE)[:, :64].expand_as(output)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_draws_by_its_seed(dtype):
    """Forward and backward drop the same weights, so does a compiled call; the generator is left as it was."""
    state = torch.cuda.get_rng_state()
    output, _, _, of_value = kept_weights(dtype)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    share = (output != 0).double().mean().item()
    assert abs(share - (1 - P)) < 4 * (P * (1 - P) / output.numel()) ** 0.5
    # Of weights [query, key]: the output is their first 64 keys, the gradient of values their first 64 queries.
    assert torch.equal(output[..., :64, :] != 0, of_value.transpose(-2, -1)[..., :64] != 0)
    torch.randn(5, device=DEVICE)
    again = kept_weights(dtype)
    assert torch.equal(output, again[0]) and torch.equal(of_value, again[-1])
    opaque = kept_weights(dtype, function=lambda *call: torch.ops.autopart.attention_dropout_forward(*call)[0])
    for one, other in zip(again, opaque, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(output, kept_weights(dtype, salt=2)[0])

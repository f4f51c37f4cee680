"""Properties of a module that training libraries read: signature, config, size, device, copies and wrappers."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Iterable

import dist
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopart
from autopart.errors import MissingAttribute, UsageError

TIMEOUT_S = 180.0
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, use_cache=False,
)  # fmt: skip
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
COPIED = """copy.copy() of a partitioned model is not supported
  why    both would write to the same parameters and gradients, and count steps separately
  try    copy.deepcopy(pm), which has separate parameters"""
ELSEWHERE = """'{}' is not on this rank
  why    each rank holds the parameters of its stages
  try    pm.full_state_dict() has the parameters of all stages, on every rank"""


def check_idioms(mesh):
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(CONFIG), torch.randint(64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    pm = autopart.parallelize(model, mesh, example_kwargs=batch)
    check_conversions(pm)
    check_attributes(pm, model, mesh)
    check_copies(pm, model, batch)
    check_compile(pm, batch)
    return [name for name in ("model.embed_tokens", "lm_head") if hasattr(pm.get_submodule(name), "weight")]


def check_conversions(pm):
    for target in ("cpu", "cpu:1", torch.device("cpu", 3), torch.float32, torch.ones(1)):
        assert pm.to(target) is pm and pm.model.norm.to(target) is pm.model.norm
    assert pm.to("cpu:1", torch.float32) is pm and pm.to(device="cpu:1", non_blocking=True) is pm
    assert pm.float() is pm and pm.cpu() is pm
    with pytest.raises(UsageError, match="traced for float32 on cpu, not bfloat16 on cpu"):
        pm.to("cpu:1", torch.bfloat16)


def check_attributes(pm, model, mesh):
    assert inspect.signature(pm.forward) == inspect.signature(model.forward)
    assert str(inspect.signature(autopart.ParallelModule.forward)).startswith("(self, *args")
    assert pm.config is model.config and pm.generation_config is model.generation_config
    assert (pm.main_input_name, pm.dtype, pm.device) == ("input_ids", torch.float32, torch.device("cpu"))
    assert pm.num_parameters() == model.num_parameters()
    assert pm.num_parameters(exclude_embeddings=True) == model.num_parameters(exclude_embeddings=True)
    assert isinstance(pm.model.layers, Iterable) and not isinstance(pm.model.layers[0], Iterable)
    pm.model.layers.requires_grad_(False)
    if mesh != "pp2":
        trained = sum(p.numel() for name, p in model.named_parameters() if ".layers." not in name)
        assert pm.num_parameters(only_trainable=True) == trained
    pm.model.layers.requires_grad_(True)
    assert pm.num_parameters(only_trainable=True) == model.num_parameters()
    assert pm.get_input_embeddings() is pm.model.embed_tokens and pm.get_output_embeddings() is pm.lm_head
    for layer in ("model.embed_tokens", "lm_head"):
        try:
            assert tuple(pm.get_submodule(layer).weight.shape) == (64, 16)
        except MissingAttribute as error:  # on other stages
            assert str(error) == ELSEWHERE.format(f"{layer}.weight")


def check_copies(pm, model, batch):
    copied = copy.deepcopy(pm)
    assert inspect.signature(copied.forward) == inspect.signature(model.forward)
    torch.testing.assert_close(copied(**batch).loss, pm(**batch).loss)
    with pytest.raises(UsageError) as error:
        copy.copy(pm)
    assert str(error.value) == COPIED
    with pytest.raises(UsageError, match="a partitioned model cannot be pickled"):
        pickle.dumps(pm)
    for wrapper in WRAPPERS:
        with pytest.raises(UsageError, match=f"{wrapper.__name__} cannot wrap a partitioned model"):
            wrapper(pm)


def check_compile(pm, batch):
    expected = pm(**batch).loss.detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(pm)
        torch.compile(nn.Sequential(nn.Linear(2, 2)))
    texts = [(str(one.message), one.filename) for one in caught if "torch.compile()" in str(one.message)]
    assert [text for text, _ in texts] == [
        "torch.compile() of a partitioned model compiles nothing: its stages are graphs that autopart runs itself. "
        "Use parallelize(..., compile=True)."
    ]
    assert texts[0][1] == __file__
    torch.testing.assert_close(compiled(**batch).loss.detach(), expected)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_idioms_of_libraries(mesh):
    first, second = dist.run_ranks(check_idioms, 2, mesh, timeout_s=TIMEOUT_S)
    both = ["model.embed_tokens", "lm_head"]
    assert (first, second) == ((both, both) if mesh == "tp2" else (both[:1], both[1:]))


def check_forwarded(model):
    """PEFT reads attributes of the inner model through `__getattr__`."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    ids = torch.randint(64, (4, 8))
    pm = autopart.parallelize(model, {"tp": 1}, example_kwargs={"input_ids": ids, "labels": ids})
    assert pm.config is model.config and pm.main_input_name == "input_ids"
    assert pm.num_parameters(only_trainable=True) == model.num_parameters(only_trainable=True) < 200
    assert inspect.signature(pm.forward) == inspect.signature(model.forward)
    with pytest.raises(MissingAttribute, match="merge_adapter"):
        pm.merge_adapter()


@pytest.mark.large
def test_attributes_that_peft_forwards():
    check_forwarded(LlamaForCausalLM(CONFIG))

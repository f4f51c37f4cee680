"""Outputs that are containers: subclasses of dict, nested ones, and key/value caches of transformers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError


class Output(OrderedDict):
    """A dict with attributes, as in pythae."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Table(dict):
    """A plain subclass of dict."""


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Output:
        h = self.first(x)
        y = self.second(h.relu())
        return Output(loss=y.square().mean(), inner=Table(hidden=h, none=None), name="vae", last=[y])


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_subclasses_of_dict_are_returned(mesh):
    model, x = Returns().double(), torch.randn(4, 8, dtype=torch.double)
    result = autopart.verify(model, mesh, example_args=(x,))
    assert result.ok, result


def test_a_returned_dict_keeps_its_class():
    model, x = Returns().double(), torch.randn(4, 8, dtype=torch.double)
    returned = autopart.parallelize(model, "dp1", example_args=(x,))(x)
    assert type(returned) is Output and type(returned.inner) is Table and returned.name == "vae"
    assert torch.equal(returned.inner["hidden"], model(x).inner["hidden"]) and returned.inner["none"] is None


def llava() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    text = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=5, vision_feature_layer=-1
    )
    ids = torch.randint(10, 96, (4, 12))
    ids[:, 2:6] = 5
    batch = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16), "labels": ids}
    return transformers.LlavaForConditionalGeneration(config).train(), batch


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_use_cache_of_a_nested_config_is_switched_off(mesh):
    model, batch = llava()
    result = autopart.verify(model, mesh, example_kwargs=batch)
    assert result.ok, result
    assert "traced with use_cache=False" in autopart.plan(model, mesh, example_kwargs=batch).notes


class Prompted(nn.Module):
    """Returns a cache although `use_cache` is off, as prefix tuning does."""

    def __init__(self, cache: type) -> None:
        super().__init__()
        self.linear, self.out, self.cache = nn.Linear(8, 8), nn.Linear(8, 8), cache

    def forward(self, x: Tensor, use_cache: bool | None = None) -> dict[str, Any]:
        cache = self.cache()
        key, _ = cache.update(self.linear(x)[:, None], x[:, None], 0)
        return {"y": self.out(key[:, 0]), "past_key_values": cache}


def loss_of_cache(outputs: dict[str, Any], target: Tensor) -> Tensor:
    return (outputs["y"] - target).square().mean() + outputs["past_key_values"].layers[0].keys.square().mean()


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_a_returned_cache_is_dropped_with_a_note(mesh):
    transformers = pytest.importorskip("transformers")
    model, x = Prompted(transformers.DynamicCache).double(), torch.randn(4, 6, 8, dtype=torch.double)
    result = autopart.verify(model, mesh, example_args=(x,))
    assert result.ok, result
    assert "the key/value cache among the outputs is dropped" in autopart.plan(model, mesh, example_args=(x,)).notes
    found = autopart.parallelize(model, "dp1", example_args=(x,))(x)
    assert found["past_key_values"] is None and torch.equal(found["y"], model(x)["y"])


def test_a_loss_function_reads_the_cache():
    transformers = pytest.importorskip("transformers")
    model, x = Prompted(transformers.DynamicCache).double(), torch.randn(4, 6, 8, dtype=torch.double)
    result = autopart.verify(model, "tp2", example_args=(x,), loss_fn=loss_of_cache, target=torch.zeros_like(x))
    assert result.ok, result


def test_a_cache_that_the_call_asks_for_is_refused():
    transformers = pytest.importorskip("transformers")
    model, x = Prompted(transformers.DynamicCache).double(), torch.randn(4, 6, 8, dtype=torch.double)
    with pytest.raises(TraceError, match=r"returns a .*DynamicCache"):
        autopart.plan(model, "tp2", example_args=(x,), example_kwargs={"use_cache": True})

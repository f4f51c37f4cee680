"""Models in float32 for tests of mixed precision, each with a batch, and what one device computes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from zoo import ZOO

Batch = dict[str, Tensor]
EPS = torch.finfo(torch.bfloat16).eps


class Regions(nn.Module):
    """An autocast region inside, a buffer in float32, and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.up(x).relu()
        return ((self.norm(self.down(hidden.to(x.dtype))) * self.scale - y).float() ** 2).mean()


class Tied(nn.Module):
    """Tied, frozen and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight
        self.up.weight.requires_grad_(False)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(torch.tanh(self.up(x))) * self.phase.real.sum()
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def mixtral() -> tuple[nn.Module, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                           use_cache=False, num_key_value_heads=2, vocab_size=96, max_position_embeddings=32,
                           num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm")  # fmt: skip
    ids = torch.randint(0, 96, (8, 12))
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def llama() -> tuple[nn.Module, Batch]:
    """With transformers' own norms and loss, which work in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         use_cache=False, num_key_value_heads=2, vocab_size=96, max_position_embeddings=32)  # fmt: skip
    ids = torch.randint(0, 96, (8, 12))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def vit() -> tuple[nn.Module, Batch]:
    from held import small

    return small("vit")


def regions() -> tuple[nn.Module, Batch]:
    return Regions(), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}


def tied() -> tuple[nn.Module, Batch]:
    return Tied(), {"ids": torch.randint(0, 40, (8, 6)), "labels": torch.randint(0, 40, (8, 6))}


def in_bfloat16() -> tuple[nn.Module, Batch]:
    model, batch = llama()
    return model.bfloat16(), batch


def in_float64() -> tuple[nn.Module, Batch]:
    model, batch = llama()
    return model.double(), batch


OWN: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    builder.__name__: builder for builder in (mixtral, llama, vit, regions, tied, in_bfloat16, in_float64)
}


def build(name: str) -> tuple[nn.Module, Batch]:
    """A model without dropout and its batch, always the same; float32 but where its name says otherwise."""
    torch.manual_seed(0)
    model, batch = OWN[name]() if name in OWN else ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if not name.startswith("in_"):
        model = model.float() if name != "tied" else model
        batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    return model, batch


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def on_one_device(
    model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16, share: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and gradients as the parameters are stored: parameters and inputs cast, outputs cast back. `share`: of
    the loss that is differentiated."""
    leaves = dict(model.named_parameters())
    computed = {name: cast(parameter, dtype) for name, parameter in leaves.items()}
    inputs = {name: cast(value, dtype) for name, value in batch.items()}
    outputs = torch.func.functional_call(model, computed, (), inputs, tie_weights=True)
    loss = cast(loss_of(tree_map(lambda value: cast(value, torch.float32), outputs)), torch.float32)
    trained = {name: parameter for name, parameter in leaves.items() if parameter.requires_grad}
    grads = torch.autograd.grad(loss * share, list(trained.values()), allow_unused=True)
    return loss.detach(), {name: grad for name, grad in zip(trained, grads, strict=True) if grad is not None}


def loss_of(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs["loss"] if "loss" in outputs else outputs[0]


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of gradients, relative to the largest gradient."""
    assert found.keys() == expected.keys()
    scale = max(grad.abs().max().item() for grad in expected.values())
    return max((found[name] - grad).abs().max().item() for name, grad in expected.items()) / scale

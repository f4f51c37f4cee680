"""Eight tiny models with a batch each, the gradients they should have, and assertions that compare.

All are float64, in training mode, without dropout, and have no parameter at a special value: a bias of zero added
twice, or a scale of one left out, would not be noticed. A builder is called again for another copy, or with other
sizes: `gpt2(num_layers=8, heads=4)`.

transformers computes a few things in float32 whatever the model's type: the causal loss and the RMS norms. There,
1e-16 can become 1e-7 (dividing a loss by its token count before or after the backward is enough), so these are
replaced by the same formulas in the model's own type. `exact=False` leaves them as they are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

BOS, EOS, PAD, IGNORED = 0, 1, 2, -100
TOKENS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


# --- transformers --------------------------------------------------------------------------------------------------


def gpt2(num_layers=2, hidden=64, heads=8, vocab=64, rows=8, seq=12, exact=True):
    """Fused q|k|v projection, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": num_layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab, "n_positions": seq}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    return _finish(model, exact), causal_batch(rows, seq, vocab)


def llama(num_layers=2, hidden=32, heads=4, kv_heads=2, vocab=64, rows=8, seq=12, exact=True):
    """Grouped-query attention, rotary positions, RMS norm, gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = _sizes(num_layers, hidden, heads, vocab, seq)
    config = LlamaConfig(**sizes, num_key_value_heads=kv_heads, attention_dropout=0.0, **TOKENS)
    return _finish(LlamaForCausalLM(config), exact), causal_batch(rows, seq, vocab)


def bert(num_layers=2, hidden=32, heads=4, vocab=64, rows=8, seq=12):
    """Attention mask with rows of uneven length, tied decoder weight, a masked loss."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = _sizes(num_layers, hidden, heads, vocab, seq)
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PAD)
    model = _finish(BertForMaskedLM(config))
    mask = _mask(rows, seq)
    ids = _ids(rows, seq, vocab)
    chosen = torch.rand(rows, seq) < 0.4
    chosen[:, 0] = True
    labels = ids.masked_fill(~(mask & chosen), IGNORED)
    return model, {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long(), "labels": labels}


def t5(num_layers=2, hidden=64, heads=8, vocab=64, rows=8, seq=12, exact=True):
    """Encoder and decoder, a position bias computed once and used by every layer, tied embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"num_layers": num_layers, "num_decoder_layers": num_layers, "num_heads": heads, "vocab_size": vocab}
    widths = {"d_model": hidden, "d_kv": hidden // heads, "d_ff": 2 * hidden}
    tokens = {"decoder_start_token_id": PAD, "eos_token_id": EOS, "pad_token_id": PAD}
    config = T5Config(**sizes, **widths, dropout_rate=0.0, **tokens)
    model = _finish(T5ForConditionalGeneration(config), exact)
    labels = _ids(rows, seq, vocab).masked_fill(~_mask(rows, seq), IGNORED)
    return model, {"input_ids": _ids(rows, seq, vocab), "labels": labels}


def phi3(num_layers=2, hidden=32, heads=4, kv_heads=2, vocab=64, rows=8, seq=12, exact=True):
    """Fused q|k|v of unequal parts, fused gate|up."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    sizes = _sizes(num_layers, hidden, heads, vocab, seq) | {"original_max_position_embeddings": seq}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    config = Phi3Config(**sizes, num_key_value_heads=kv_heads, **no_dropout, **TOKENS)
    return _finish(Phi3ForCausalLM(config), exact), causal_batch(rows, seq, vocab)


def _sizes(num_layers, hidden, heads, vocab, seq):
    """The sizes as most configs name them."""
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": seq,
    }


def causal_batch(rows: int, seq: int, vocab: int) -> Batch:
    """Tokens of a causal model; the labels are the tokens, with the tail of each row ignored."""
    ids = _ids(rows, seq, vocab)
    return {"input_ids": ids, "labels": ids.masked_fill(~_mask(rows, seq), IGNORED)}


# --- plain modules -------------------------------------------------------------------------------------------------


class Hosted(nn.Module):
    """Draws and makes numbers on the host by name, whatever it is on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        places = torch.arange(8, device=x.device) + torch.arange(8, device="cpu").to(x.device)
        return (self.inner(x) * torch.rand(8, device="cpu").to(x.device) * torch.rand_like(x) + places).mean()


class SkipMLP(nn.Module):
    """Every layer also gets what came out three layers earlier, and the last gets the first's: cuts cross skips."""

    def __init__(self, num_layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_layers))
        self.head = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            skipped = seen[-3] if len(seen) >= 3 else 0.0
            seen.append(torch.tanh(layer(seen[-1])) + skipped)
        return F.mse_loss(self.head(torch.cat([seen[-1], seen[1]], dim=-1)), y)


class TransformerEncoder(nn.Module):
    """torch's own encoder layers, and a loss over flattened tokens."""

    def __init__(self, num_layers: int, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.encoder(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class ConvNet(nn.Module):
    """Two convolutions with group norm and pooling, then a linear classifier."""

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, 2 * channels)
        self.head = nn.Linear(2 * channels * (size // 4) ** 2, classes)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(image))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return F.cross_entropy(self.head(torch.flatten(x, 1)), target)


def skip_mlp(num_layers=8, hidden=32, rows=8):
    torch.manual_seed(0)
    model = _finish(SkipMLP(num_layers, hidden))
    x, y = torch.randn(2, rows, hidden, dtype=torch.float64)
    return model, {"x": x.clone(), "y": y.clone()}


def transformer_encoder(num_layers=2, hidden=32, heads=4, vocab=64, rows=8, seq=12):
    torch.manual_seed(0)
    model = _finish(TransformerEncoder(num_layers, hidden, heads, vocab))
    targets = _ids(rows, seq, vocab).masked_fill(~_mask(rows, seq), IGNORED)
    return model, {"tokens": _ids(rows, seq, vocab), "targets": targets}


def conv_net(channels=8, classes=16, rows=8, size=8):
    torch.manual_seed(0)
    model = _finish(ConvNet(channels, classes, size))
    image = torch.randn(rows, 3, size, size, dtype=torch.float64)
    return model, {"image": image, "target": torch.randint(classes, (rows,))}


ZOO: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    builder.__name__: builder for builder in (gpt2, llama, bert, t5, phi3, skip_mlp, transformer_encoder, conv_net)
}


# --- what the builders share ----------------------------------------------------------------------------------------


def _finish(model: nn.Module, exact: bool = True) -> nn.Module:
    """Give every parameter values of its own, make all float64, and replace what would compute in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for name, module in list(model.named_modules()):
        if exact and hasattr(module, "variance_epsilon"):
            model.set_submodule(name, RMSNorm(module.weight, module.variance_epsilon))
    if exact and getattr(model, "loss_type", "") == "ForCausalLM":
        model.loss_function = causal_loss
    return model.double().train()


class RMSNorm(nn.Module):
    """As in transformers, but without the detour over float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """As in transformers, but without the detour over float32."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.view(-1), ignore_index=IGNORED)


def _ids(rows: int, seq: int, vocab: int) -> Tensor:
    return torch.randint(3, vocab, (rows, seq))  # no special token by chance


def _mask(rows: int, seq: int) -> Tensor:
    """True for the first tokens of each row; how many differs from row to row, and is at least 2."""
    lengths = torch.tensor([seq - (5 * row) % (seq - 1) for row in range(rows)])
    return torch.arange(seq) < lengths[:, None]


# --- the truth, and comparing with it ------------------------------------------------------------------------------


def reference(model: nn.Module, batch: Batch) -> tuple[Any, Tensor, dict[str, Tensor | None]]:
    """The outputs, loss and gradients by parameter name of a copy of the model, run eagerly on one device."""
    model = copy.deepcopy(model)
    outputs = model(**batch, **no_cache(model))
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
    loss.backward()
    return outputs, loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def no_cache(model: nn.Module) -> dict[str, bool]:
    """`use_cache=False` for a forward that has the argument: its output then holds tensors only."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def assert_same_grads(actual: Mapping, expected: Mapping, tol: float = 1e-10) -> None:
    """Same names, shapes and values; errors are relative to the largest entry of any expected gradient.

    A parameter that has no gradient (None) may be missing, None or zero in `actual`.
    """
    required = {name for name, grad in expected.items() if grad is not None}
    assert required, "no gradient to compare with"
    missing, extra = sorted(required - set(actual)), sorted(set(actual) - set(expected))
    assert not missing and not extra, f"gradients differ in name: missing {missing}, unexpected {extra}"
    scale = max(_largest(expected[name]) for name in required)
    errors = {}
    for name, grad in actual.items():
        want = expected[name]
        if grad is None or want is None:
            assert name not in required, f"gradient of {name} is None"
            errors[name] = 0.0 if grad is None else _largest(grad)
            continue
        assert grad.shape == want.shape, f"gradient of {name} has shape {list(grad.shape)}, not {list(want.shape)}"
        errors[name] = _largest(grad.double() - want.double())
    wrong = [name for name, error in errors.items() if not error <= tol * scale]  # NaN is wrong
    if wrong:
        worst = max(wrong, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        raise AssertionError(
            f"gradient of {worst} is off by {errors[worst]:.3g}, where the largest gradient entry is {scale:.3g} "
            f"and {tol * scale:.3g} is allowed; {len(wrong)} of {len(errors)} parameters are off: {wrong[:8]}"
        )


def assert_close_outputs(actual: Any, expected: Any, tol: float = 1e-10, where: str = "output") -> None:
    """Same types, keys, shapes, dtypes and values; errors are relative to the largest entry of each tensor."""
    assert type(actual) is type(expected), f"{where} is a {type(actual).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where} has keys {list(actual)}, not {list(expected)}"
        for key in expected:
            assert_close_outputs(actual[key], expected[key], tol, f"{where}[{key!r}]")
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), f"{where} has {len(actual)} entries, not {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close_outputs(a, e, tol, f"{where}[{i}]")
    elif isinstance(expected, Tensor):
        got, want = f"{actual.dtype}{list(actual.shape)}", f"{expected.dtype}{list(expected.shape)}"
        assert got == want, f"{where} is {got}, not {want}"
        error, scale = _largest(actual.double() - expected.double()), _largest(expected)
        assert error <= tol * scale, f"{where} is off by {error:.3g}, where its largest entry is {scale:.3g}"
    else:
        assert actual == expected, f"{where} is {actual!r}, not {expected!r}"


def _largest(value: Tensor) -> float:
    return value.detach().abs().max().item() if value.numel() else 0.0


def assert_steps_alike(pm: Any, model: nn.Module, *given: Any) -> None:
    """A step of a partitioned model, which returns its loss: loss and every gradient are the model's own."""
    loss, expected = pm.step(*given), model(*given)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    found = pm.full_grads()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10)

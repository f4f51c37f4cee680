"""Blocks traced once: the graph is that of a full trace, to the last name, and what differs is not shared."""

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from torch import Tensor, nn

from autopart.ir.facts import facts
from autopart.ir.graph import operators
from autopart.ir.trace import Trace
from autopart.passes.facts.analyze import annotate
from autopart.passes.normalize import AS_TRACED, NORMALIZE
from autopart.passes.pass_pipeline import run_passes
from autopart.tracing import trace_model as tracing
from autopart.tracing.blocks import repeated_blocks
from autopart.tracing.trace_model import bind_call, trace

LAYERS = 4
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
                         "num_attention_heads": 4, "vocab_size": 64}  # fmt: skip
ROWS, SEQ = 8, 12


def full_trace(model: nn.Module, batch: dict[str, Any]) -> Trace:
    """A trace in which every block is traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_blocks, "_alike", lambda model: iter(()))
        return trace(model, bind_call(model, (), batch))


def trace_with_repeats(model: nn.Module, batch: dict[str, Any]) -> tuple[Trace, "repeated_blocks.Repeats | None"]:
    """A trace, and what was found to repeat in it (None where it had to be made again in full)."""
    found: list[Any] = []

    class Noted(repeated_blocks.RepeatedBlocks):
        def expand(self, graph):
            super().expand(graph)
            found.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "RepeatedBlocks", Noted)
        traced = trace(model, bind_call(model, (), batch))
    return traced, found[0] if found else None


def told(traced: Trace) -> list[str]:
    """All that anything later reads of a trace: node by node, and the graph as text."""
    lines = []
    for node in traced.graph.nodes:
        values = node.meta.get("val")
        values = values if isinstance(values, (tuple, list)) else [values]
        metadata = [
            (v.dtype, tuple(v.shape), v.stride(), v.device, v.requires_grad) if isinstance(v, Tensor) else v
            for v in values
        ]
        modules = list((facts(node).get("nn_module_stack") or {}).values())
        keys = [facts(node).get(name) for name in ("stack_trace", "named", "written_for", "key", "group", "role")]
        keys += [facts(node).get(name) for name in ("input_name", "parameter", "loss", "atoms", "needs_grad")]
        lines.append(f"{node.format_node()} {node.kwargs} {metadata} {modules} {keys}")
    return lines


def prepared(traced: Trace) -> Trace:
    run_passes(traced.graph, AS_TRACED)
    run_passes(traced.graph, NORMALIZE)
    annotate(traced)
    return traced


def assert_same_trace(one: Trace, other: Trace) -> None:
    """Raises AssertionError where two traces differ: names, operators, arguments, values, modules, lines, keys."""
    for _ in range(2):
        left, right = told(one), told(other)
        for a, b in zip(left, right, strict=False):
            assert a == b
        assert len(left) == len(right)
        assert one.output_spec == other.output_spec
        assert one.notes == other.notes
        prepared(one), prepared(other)


class Case(NamedTuple):
    """`shared`: how many blocks repeat one that was traced."""

    model: nn.Module
    batch: dict[str, Any]
    shared: int


def _ids(rows: int = ROWS) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 64, (rows, SEQ))}


def _causal(name: str, shared: int = LAYERS - 1, **more: Any) -> Case:
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return Case(getattr(transformers, f"{name}ForCausalLM")(config), zoo.causal_batch(ROWS, SEQ, 64), shared)


def _gpt2(train: bool = False, **more: Any) -> Case:
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=64, **more)
    return Case(transformers.GPT2LMHeadModel(config).train(train), zoo.causal_batch(ROWS, SEQ, 64), LAYERS - 1)


def _checkpointed() -> Case:
    case = _causal("Llama")
    case.model.gradient_checkpointing_enable()
    return case._replace(model=case.model.train())


def _bart() -> Case:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    return Case(model, {**_ids(), "labels": torch.randint(3, 64, (ROWS, SEQ))}, 2 * 3 - 2)


def _vit() -> Case:
    config = transformers.ViTConfig(**{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=8, patch_size=4)
    return Case(transformers.ViTModel(config), {"pixel_values": torch.randn(ROWS, 3, 8, 8)}, LAYERS - 1)


def _mixtral() -> Case:
    return _causal("Mixtral", num_key_value_heads=2, num_local_experts=4, experts_implementation="batched_mm")


def _mamba() -> Case:
    config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=LAYERS, vocab_size=64)
    return Case(transformers.MambaForCausalLM(config), zoo.causal_batch(ROWS, 4, 64), LAYERS - 1)


def _modernbert() -> Case:
    more = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**SIZES, **more)
    return Case(transformers.ModernBertForMaskedLM(config).eval(), _ids(), 1)  # attention: whole, local, local, whole


def _t5() -> Case:
    model, batch = zoo.t5(num_layers=3)
    return Case(model, batch, 2 * (3 - 2))  # the first of each stack computes the position bias


def _of_zoo(name: str, shared: int = LAYERS - 1) -> Case:
    return Case(*getattr(zoo, name)(num_layers=LAYERS), shared)


CASES = {
    "llama": lambda: _of_zoo("llama"),
    "gpt2": _gpt2,
    "gpt2 with dropout": lambda: _gpt2(train=True),
    "bert": lambda: _of_zoo("bert"),
    "t5": _t5,
    "phi3": lambda: _of_zoo("phi3"),
    "torch encoder": lambda: _of_zoo("transformer_encoder"),
    "mixtral": _mixtral,
    "falcon": lambda: _causal("Falcon", shared=0),  # it makes a constant tensor in every block
    "gemma2": lambda: _causal("Gemma2", head_dim=8, num_key_value_heads=2, sliding_window=4,
                              layer_types=["sliding_attention", "full_attention"] * 2),
    "vit": _vit,
    "bart": _bart,
    "mamba": _mamba,
    "modernbert": _modernbert,
    "checkpointed": _checkpointed,
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("name", CASES)
def test_same_graph_as_a_full_trace(name):
    torch.manual_seed(0)
    case = CASES[name]()
    traced, found = trace_with_repeats(case.model, case.batch)
    assert found is not None and len(found.repeats) == case.shared
    assert_same_trace(traced, full_trace(case.model, case.batch))


# Blocks of which each has one thing that a repeat could get wrong


class Block(nn.Module):
    """x + linear(gelu(linear(x)) * scale), and one peculiarity: `what(self, x, **kwargs)` before."""

    def __init__(self, number: int, what: Any):
        super().__init__()
        self.number, self.what = number, what
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.register_buffer("scale", torch.ones(8))
        self.kept: Any = None

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        x = self.what(self, x, **kwargs)
        return x + self.second(F.gelu(self.first(x))) * self.scale


class Stack(nn.Module):
    def __init__(self, what: Any, number: int = 5):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block(i, what) for i in range(number))

    def forward(self, x: Tensor) -> Any:
        KEPT.clear()
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x, *KEPT.values()


KEPT: dict[Any, Tensor] = {}
OUTSIDE = torch.arange(8.0)


def _keep_all(block, x):
    KEPT[block.number] = x * 2
    return x


def _keep_last(block, x):
    KEPT["last"] = x * 2
    return x


def _read_kept(block, x):
    before = KEPT.get("last", x)
    KEPT["last"] = x * 2
    return x + before


def _write_attribute(block, x):
    block.kept = x.exp()
    return x


def _write_buffer(block, x):
    block.scale.add_(1.0)
    return x


def _assign_buffer(block, x):
    block.scale = block.scale * 2
    return x


def _without_grad(block, x):
    with torch.no_grad():
        mean = x.mean()
    return x - mean


def _under_autocast(block, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x + block.first(x)


def _in_regions_of_its_own(block, x):
    """Blocks 0 and 3 are alike, and 1 and 4; each of the others leaves what was recorded inside of a region."""
    kind = block.number % 3
    with torch.no_grad() if kind < 2 else torch.autocast("cpu", torch.bfloat16):
        x = x.sin() if kind else x.cos()
        x = x.exp()
    return x


def _known(block, x):
    return x[:, : int(torch.arange(4).max()) + 5]


def _twice_in_two_places(block, x):
    parts = (lambda: block.first(x), lambda: block.first(x))
    return parts[block.number % 2]()


def _a_view(block, x):
    return x.view(x.shape).to(x.dtype).contiguous()


PECULIAR: dict[str, tuple[Any, int | None]] = {
    "nothing": (lambda block, x: x, 4),
    "a constant of each": (lambda block, x: x * (1.0 + block.number), 0),
    "an integer or a float of the same value": (lambda block, x: x * (2 if block.number % 2 else 2.0), 3),
    "a constant with the sign of zero": (lambda block, x: x + (0.0 if block.number % 2 else -0.0), 3),
    "an operator of each": (lambda block, x: x.sin() if block.number % 2 else x.cos(), 3),
    "one more operator at the end": (lambda block, x: x if block.number < 2 else x.sin(), 3),
    "weights swapped": (lambda block, x: (block.first if block.number % 2 else block.second[0])(x), 3),
    "another place in the same line": (_twice_in_two_places, 3),
    "values kept outside": (_keep_all, None),
    "the last value kept outside": (_keep_last, None),
    "what the block before kept": (_read_kept, None),
    "an attribute": (_write_attribute, 0),
    "a buffer written in place": (_write_buffer, 0),
    "a buffer assigned": (_assign_buffer, 0),
    "a write in place": (lambda block, x: x.clone().mul_(2), 4),
    "a write in place to the input": (lambda block, x: x[:, :].relu_(), 0),
    "a write in place to a view": (lambda block, x: (x + 1)[:, :4].relu_().repeat(1, 2), 4),
    "random numbers of Python": (lambda block, x: x if random.random() < 2 else -x, 0),
    "a tensor from outside": (lambda block, x: x * OUTSIDE, 0),
    "a constant tensor": (lambda block, x: x * torch.tensor(2.0), 0),
    "a region without gradients": (_without_grad, 4),
    "a region of autocast": (_under_autocast, 0),
    "regions that only some have": (_in_regions_of_its_own, 2),
    "values of a known tensor": (_known, 4),
    "a view and casts that are nothing": (_a_view, 4),
    "dropout": (lambda block, x: F.dropout(x, 0.5, block.training), 4),
    "an input left alone": (lambda block, x: x.detach(), 4),
}


@pytest.mark.parametrize("name", PECULIAR)
def test_a_peculiar_block_is_traced_as_it_is(name):
    what, shared = PECULIAR[name]
    model, batch = Stack(what), {"x": torch.randn(ROWS, 8)}
    traced, found = trace_with_repeats(model, batch)
    assert (None if found is None else len(found.repeats)) == shared
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert_same_trace(traced, full_trace(model, batch))


class Calling(nn.Module):
    """Calls its blocks in a way of its own: `how(blocks, x)`."""

    def __init__(self, how: Any):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block(i, how.what) for i in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.layers, self.enter(x))


def _calls(what: Any):
    def decorate(how: Any) -> Any:
        how.what = what
        return how

    return decorate


@_calls(lambda block, x, by=1.0: x * by)
def _each_with_another_number(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x, by=float(i // 2))
    return x


@_calls(lambda block, x: x)
def _each_twice(layers, x):
    for layer in (*layers, *layers):
        x = layer(x)
    return x


@_calls(lambda block, x: x)
def _on_lines_of_their_own(layers, x):
    x = layers[0](x)
    x = layers[1](x)
    return layers[3](layers[2](x))


@_calls(lambda block, x, other: x + other)
def _with_the_same_tensor_twice(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x, other=x if i % 2 else x.sin())
    return x


@_calls(lambda block, x, scores: (scores.append(x.sum()), x)[1])
def _with_a_list_to_fill(layers, x):
    scores: list[Tensor] = []
    for layer in layers:
        x = layer(x, scores=scores)
    return x, sum(scores)


@_calls(lambda block, x, mask: x.masked_fill(mask.to(torch.bool), 0.0))
def _with_a_cast_that_is_nothing(layers, x):
    mask = x > 0
    for layer in layers:
        x = layer(x, mask=mask)
    return x, mask


@_calls(lambda block, x: x)
def _one_without_grad(layers, x):
    for i, layer in enumerate(layers):
        with torch.set_grad_enabled(i != 2):
            x = layer(x)
    return x


@_calls(lambda block, x: x)
def _of_other_shapes(layers, x):
    return [layer(part.clone()) for layer, part in zip(layers, x.split([1, 1, 3, 3]), strict=True)]


CALLS = {
    _each_with_another_number: 2, _each_twice: 7, _on_lines_of_their_own: 0, _with_the_same_tensor_twice: 2,
    _with_a_list_to_fill: 0, _with_a_cast_that_is_nothing: 3, _one_without_grad: 1, _of_other_shapes: 2,
}  # fmt: skip


@pytest.mark.parametrize("how", CALLS, ids=lambda how: how.__name__.strip("_"))
def test_a_peculiar_call_is_traced_as_it_is(how):
    model, batch = Calling(how), {"x": torch.randn(ROWS, 8)}
    traced, found = trace_with_repeats(model, batch)
    assert (None if found is None else len(found.repeats)) == CALLS[how]
    assert_same_trace(traced, full_trace(model, batch))


class Pair(nn.Module):
    """Returns two values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x.exp().sum()


class LastOfPairs(nn.Module):
    def __init__(self, used: int):
        super().__init__()
        self.enter, self.layers, self.used = nn.Linear(8, 8), nn.ModuleList(Pair() for _ in range(3)), used

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = self.enter(x), []
        for layer in self.layers:
            x, other = layer(x)
            kept.append(other)
        return x, kept[self.used]


@pytest.mark.parametrize(("used", "shared"), [(0, 2), (1, 2), (2, 2)])
def test_an_output_that_only_one_block_needs(used, shared):
    model, batch = LastOfPairs(used), {"x": torch.randn(ROWS, 8)}
    traced, found = trace_with_repeats(model, batch)
    assert (None if found is None else len(found.repeats)) == shared
    assert_same_trace(traced, full_trace(model, batch))


def test_hooks_tied_weights_and_other_sizes():
    model, batch = Stack(lambda block, x: x), {"x": torch.randn(ROWS, 8)}
    model.layers[1].second.register_forward_hook(lambda module, args, output: output * 3)
    model.layers[2].first.weight = model.layers[3].first.weight
    model.layers[4].first = nn.Linear(8, 8, bias=False)
    traced, found = trace_with_repeats(model, batch)
    assert found is not None and len(found.repeats) == 2  # blocks 2 and 3
    assert_same_trace(traced, full_trace(model, batch))


@pytest.mark.large
def test_the_comparison_sees_a_difference():
    """`assert_same_trace` fails for a constant, a name, a line, a module, and one operator more."""
    batch = {"x": torch.randn(ROWS, 8)}
    same = Stack(lambda block, x: x * 2)
    for change in (
        lambda node: node.update_arg(1, 3),
        lambda node: setattr(node, "name", "other"),
        lambda node: node.meta.update(stack_trace="elsewhere"),
        lambda node: node.meta.update(nn_module_stack={}),
        lambda node: node.graph.call_function(torch.ops.aten.sin.default, (node,)),
    ):
        one, other = full_trace(same, batch), full_trace(same, batch)
        change(next(node for node in operators(other.graph) if node.target is torch.ops.aten.mul.Tensor))
        with pytest.raises(AssertionError):
            assert_same_trace(one, other)


def test_a_fault_in_the_repeats_is_told_and_costs_only_time(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("planted")

    model, batch = zoo.gpt2(num_layers=LAYERS)
    whole = full_trace(model, batch)
    monkeypatch.setattr(repeated_blocks.RepeatedBlocks, "_expand", broken)
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel that are equal .* longer: ZeroDivisionError: planted"):
        traced = trace(model, bind_call(model, (), batch))
    assert [str(node) for node in traced.graph.nodes] == [str(node) for node in whole.graph.nodes]

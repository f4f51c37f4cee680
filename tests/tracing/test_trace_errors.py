"""Models that cannot be traced: the text names the line, the module, the value, and what to do.

`{file}` stands for this file, `{line}` for the number of the line that has the case's mark, `# here`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

import autopart
from autopart.errors import TraceError
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call
from autopart.tracing.with_loss import WithLoss

ROWS, SIZE = 8, 4
DECIDES = "this line decides what to run by the values in a tensor, which a graph cannot hold; they come from "
LOOP = "; a graph cannot compute both sides of the branch either: the number of branches depends on the outcome of "
LOOP += "another one, as in a loop"
SIDES = "parallelize the modules on either side of it, e.g. parallelize(model.gate, mesh)"
BRANCH = f"torch.where(condition, a, b); or the decision outside of forward(); or {SIDES}"
SELECT = f"a mask in place of a selection: torch.where(mask, x, 0); or {SIDES}"
OWN = "call the model itself with this example; if that works, use plain operations on this line"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)


class IfOutput(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.gate(x)
        while (2 * y).abs().max() > 1:  # here
            y = y / 2
        return self.out(y)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(SIZE, SIZE)), IfOutput()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x), mask)


class Item(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(x[: int(self.gate(x).sum().item())])  # here


class Bins(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(x) * self.gate(x).long().bincount().sum()  # here


class WrongShape(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.gate(x).reshape(3, -1))  # here


class WrongKey(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out({"x": x}["y"])  # here


class WritesWeight(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.gate.weight.clamp_(-1, 1)  # here
        return self.out(self.gate(x))


class WritesWeightWithoutGrad(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            self.gate.weight.div_(self.gate.weight.norm())  # here
        return self.out(self.gate(x))


class WritesInput(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask.mul_(2)  # here
        return self.out(self.gate(x) * mask)


class WritesWithoutGrad(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.gate(x)
        with torch.no_grad():
            y.mul_(2)  # here
        return self.out(y)


class GrowsBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, SIZE))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x[:1]])
        return self.out(self.gate(x))


class KeepsTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.memory = self.memory + x.mean(0)
        return self.out(self.gate(x)) + self.memory


class WritesTensor(KeepsTensor):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.memory.add_(1)
        return self.out(self.gate(x)) + self.memory


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls = [*self.calls, 1]
        return self.out(self.gate(x)) / len(self.calls)


class DrawsInPython(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        order = [0, 1]
        random.shuffle(order)
        return self.out(self.gate(x)) if order[0] else x


class DrawsInNumpy(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        order = np.arange(len(x))
        np.random.shuffle(order)
        return self.out(self.gate(x[torch.from_numpy(order)]))


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.jit.script(nn.Linear(SIZE, SIZE))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.gate(x))


class NamedCode(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.randn(SIZE))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(x * self.code)


class Lazy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.LazyLinear(SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(x)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.GRU(SIZE, SIZE, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        lengths = self.gate(x[None])[0][:, 0, 0].long()
        rows = nn.utils.rnn.pack_padded_sequence(x[None], lengths, batch_first=True)  # here
        return self.gate(rows)[1]


class Transcribes(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        probabilities = self.out(self.gate(x))[:, None].log_softmax(-1)
        lengths = torch.full((1,), ROWS), torch.full((1,), 2)
        return torch.ctc_loss(probabilities, mask[:1, :2].long(), *lengths, 0, 1, False)  # here


class Casts(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out.to(torch.bfloat16)(self.gate(x).bfloat16())  # here


class Ignores(Base):
    """Draws from both as layerdrop in eval mode does: nothing depends on it."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        drawn = random.uniform(0, 1), np.random.rand()
        return self.out(self.gate(x)) if self.training or min(drawn) >= 0 else x


class DrawsByItself(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.gate(x) * torch.randn(4, generator=torch.Generator().manual_seed(0))  # here


class TensorHook(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.gate(x)
        y.register_hook(lambda grad: grad if grad.sum() > 0 else -grad)  # here
        return self.out(y)


class ModuleHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate.register_full_backward_hook(lambda module, inputs, outputs: None)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.gate(x))


class While(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return while_loop(lambda h: h.sum() > 1, lambda h: self.gate(h) / 2, (self.out(x),))  # here


class Differentiates(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(torch.func.linearize(lambda x: self.gate(x).square(), x)[1](x))


class Cache:
    pass


class ReturnsCache(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.out(self.gate(x)), Cache()


def cannot(why: str, hint: str, where: str = "{file}:{line}: {text}") -> str:
    middle = f"\n  where  {where}" if where else ""
    return f"TraceError: {{name}} cannot be traced\n  why    {why}{middle}\n  try    {hint}"


def other(what: str, why: str, hint: str, where: str = "{file}:{line}: {text}") -> str:
    middle = f"\n  where  {where}" if where else ""
    return f"TraceError: {what}\n  why    {why}{middle}\n  try    {hint}"


ON_HOST = "autopart.host_function around the function that draws them and returns tensors; or torch.rand"
BUFFERS_ONLY = "only buffers and parameters can be written"
CASES: dict[Callable[[], nn.Module], str] = {
    IfOutput: cannot(DECIDES + "the output of gate" + LOOP, BRANCH),
    Item: cannot(DECIDES + "the output of gate", BRANCH),
    Bins: cannot("the size of the result of bincount depends on tensor values", SELECT),
    WrongShape: other("{name} fails in its own forward, or in its trace",
                      "RuntimeError: shape '[3, -1]' is invalid for input of size 32", OWN),
    WrongKey: other("{name} fails in its own forward, or in its trace", "KeyError: 'y'", OWN),
    WritesWeight: cannot("a weight is written in place", "w = w + ..., or the change after optimizer.step()"),
    WritesWeightWithoutGrad: other(
        "{name} writes to its trained parameter 'gate.weight' in its forward",
        "the new value of an element depends on more than its old value",
        "change it outside forward(), after optimizer.step(); in forward(), only by clamp_, mul_ and other elementwise "
        "operations before its first use",
        "div at test_trace_errors.py:{line}"),
    WritesInput: other("{name} writes to its input 'mask' in its forward", BUFFERS_ONLY, "do it outside forward()",
                       "mul at test_trace_errors.py:{line}"),
    WritesWithoutGrad: other("mul_ writes in place to a value that has a gradient, without grad mode",
                             "its gradient would be that of the value before the write",
                             "mul in grad mode, or on value.detach().clone()"),
    GrowsBuffer: other("GrowsBuffer changes the shape of its buffer 'seen' in its forward",
                       "it was of shape [1, 4], and is of shape [2, 4]",
                       "create the buffer with its largest shape, and write parts of it", ""),
    KeepsTensor: other("{name} keeps a tensor from one call to the next in 'memory'",
                       "every call of the program would use the value from the trace",
                       "register_buffer('memory', ...)", ""),
    WritesTensor: cannot("the tensor 'memory' is written and is not a buffer", "register_buffer('memory', ...)", ""),
    Counts: other("{name} computes something different in every call",
                  "forward() stores calls = [1], and the next call reads it",
                  "keep it as a tensor in a buffer (register_buffer), changed by tensor operations", ""),
    DrawsInPython: other("{name} draws random numbers from random in its forward",
                         "forward() runs once, for the trace: every step would use the numbers drawn there",
                         ON_HOST, ""),
    DrawsInNumpy: other("{name} draws random numbers from numpy.random in its forward",
                        "forward() runs once, for the trace: every step would use the numbers drawn there",
                        ON_HOST, ""),
    DrawsByItself: other("randn draws from a torch.Generator of the model's own",
                         "its state is no tensor that a graph could hold, and ranks that draw the same number would "
                         "have to share it",
                         "the same without generator=, after torch.manual_seed; or draw outside of forward()"),
    TensorHook: other("a tensor has a hook on its gradient",
                      "it cannot be run on a gradient alone (DataDependentOutputException: "
                      "aten._local_scalar_dense.default)",
                      "the same change of the gradient by operations in forward()"),
    ModuleHook: other("'gate' has a backward hook",
                      "only the forward is traced; its gradients are computed without hooks of modules",
                      "remove it, or use tensor.register_hook inside forward()", ""),
    Scripted: other("'gate' is a TorchScript module", "it has no Python code to trace",
                    "the nn.Module that it was scripted or traced from; compile=True compiles it", ""),
    NamedCode: other("{name} has a parameter, buffer or module called 'code'",
                     "the modules of torch.fx that run its program have an attribute 'code' of their own",
                     "another name, such as self.code_", ""),
    Lazy: other("'gate' is a LazyLinear that has no weights yet",
                "their shapes come with its first call, and this one does not call it",
                "call the model once before: with torch.no_grad(): model(...)", ""),
    Packs: other("the size of pack_padded_sequence's result depends on the values of the lengths",
                 "sizes in a graph cannot depend on tensor values",
                 "padded sequences as input of the recurrent layer, and a mask of the positions after each end"),
    Transcribes: other("torch.ctc_loss allocates tables whose sizes depend on the values of the target lengths",
                       "sizes in a graph cannot depend on tensor values",
                       "torch.nn.functional.ctc_loss, or nn.CTCLoss"),
    Casts: other("forward() moves or casts a Linear",
                 "it has weights on cpu in f32, and a trace cannot replace them",
                 "module.to(torch.bfloat16) before the model is parallelized"),
    While: cannot("while_loop, scan and the like contain parts of the model, which cannot be sharded",
                 "torch.where and plain operations, or parallelize the modules inside"),
    Differentiates: cannot("the forward differentiates inside (autograd.grad, backward, torch.func), or reads a "
                           "tensor that it made before, or that an earlier torch.export of the model left in a cache",
                           "the gradient outside of the model, or written as operations; after torch.export: a new "
                           "process", ""),
    ReturnsCache: cannot("it returns a test_trace_errors.Cache, in which autopart cannot look for tensors",
                         "return its tensors (of a cache: use_cache=False), or "
                         "torch.utils._pytree.register_pytree_node", ""),
}  # fmt: skip


def told(model: nn.Module, **call: Any) -> str:
    """`Class: text` of what planning raises."""
    try:
        autopart.plan(
            model, "dp2", example_kwargs=call or {"x": torch.ones(ROWS, SIZE), "mask": torch.ones(ROWS, SIZE)}
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def filled(text: str, cls: Any, suffix: str = "") -> str:
    lines, first = inspect.getsourcelines(cls)
    number = next((i for i, line in enumerate(lines) if line.rstrip().endswith("# here")), 0)
    values = {
        "{name}": cls.__name__,
        "{file}": __file__,
        "{line}": str(first + number),
        "{text}": lines[number].strip(),
    }
    for name, value in values.items():
        text = text.replace(name, value + suffix if name == "{text}" else value)
    return text


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_the_text_names_line_value_and_remedy(cls):
    model = cls()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert told(model) == filled(CASES[cls], cls)
    for name, module in model.named_modules():
        assert vars(module) == before[name], f"the failed trace has left something in {name or 'the model'}"


@pytest.mark.parametrize("cls", [cls for cls in CASES if cls is not ReturnsCache], ids=lambda cls: cls.__name__)
def test_the_text_is_the_same_with_a_loss_function(cls):
    """The user knows nothing of how a loss function is put behind a model."""
    model, call = cls(), {"x": torch.ones(ROWS, SIZE), "mask": torch.ones(ROWS, SIZE)}
    with pytest.raises(TraceError) as error:
        around = WithLoss(model, lambda output, target: (output - target).square().mean())
        prepare(around, {"target": torch.zeros(()), "call": bind_call(model, (), call)})
    assert f"TraceError: {error.value}" == filled(CASES[cls], cls)


class LossDecides(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.gate(x))


def deciding_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.dropout(output, 0.5, True).mean() if output.sum() > target.sum() else -output.mean()


def test_a_loss_function_that_decides_is_told_what_by():
    with pytest.raises(TraceError) as error:
        batch = {"x": torch.ones(ROWS, SIZE), "mask": torch.ones(ROWS, SIZE)}
        autopart.verify(LossDecides(), "dp2", example_kwargs=batch, loss_fn=deciding_loss, target=torch.ones(ROWS))
    assert str(error.value).startswith("LossDecides cannot be traced")
    assert "they come from the output of the model and the input target" in str(error.value)


def test_draws_that_decide_nothing_are_no_fault():
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert told(Ignores()) == "nothing was raised"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_module_inside_is_named():
    expected = cannot(
        DECIDES + "the output of blocks.1.gate" + LOOP, BRANCH.replace("model.gate", "model.blocks[1].gate")
    )
    assert told(Inside()) == filled(expected, IfOutput, " (blocks.1)").replace("IfOutput", "Inside")


def test_a_library_is_named_with_the_users_module_and_its_own_option():
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=16, experts_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(3, 16, (2, 4))
    text = told(transformers.MixtralForCausalLM(config), input_ids=ids, labels=ids)
    assert "they come from the output of model.layers.0.mlp" in text
    assert "/transformers/models/mixtral/modeling_mixtral.py:" in text and "(model.layers.0.mlp" in text
    assert text.endswith('try    experts_implementation="batched_mm" or "grouped_mm" when the model is made')


def test_nothing_is_printed_beside_the_error(capfd):
    told(WrongShape())
    told(While())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")

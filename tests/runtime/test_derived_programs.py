"""Programs for new sequence lengths and batch sizes, derived from traced calls with other sizes."""

import copy
import json
import math
from contextlib import nullcontext
from fractions import Fraction
from unittest import mock

import dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import autopart
from autopart.common.flags import environment
from autopart.common.scoped import attributes
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.recipe import compiler as compiling
from autopart.recipe.compiler import Compiler
from autopart.recipe.sizes.call_family import _Conditions
from autopart.recipe.sizes.fitted_values import evaluated, fit
from autopart.recipe.sizes.program_template import check_derived
from autopart.recipe.sizes.size_formula import NotDerivable, SizeFormula, fit_integer
from autopart.recipe.sizes.size_relations import SizeRelations
from autopart.tracing.python.size_conditions import (
    SizeConditions,
    TracedFloat,
    TracedSize,
    plain_sizes,
    recorded_functions,
    traced_sizes,
)


@pytest.mark.parametrize(("sizes", "values", "formula"), [
    ([(64,), (96,)], (64, 96), ((0,), 1, 0)),
    ([(64,), (96,)], (512, 768), ((0,), 8, 0)),
    ([(64,), (96,)], (32, 48), ((0,), 1, 0, 2)),
    ([(64,), (96,)], (64**2, 96**2), ((0, 0), 1, 0)),
    ([(64,), (96,), (80,)], (65, 97, 81), ((0,), 1, 1)),
    ([(8, 64), (8, 96), (4, 80)], (512, 768, 320), ((0, 1), 1, 0)),
    ([(16,), (56,), (36,)], (544, 6384, 2664), ((0,), 2, 2, 1, (0,))),  # strides of [heads, n, n + 1]
    ([(16,), (56,), (36,)], (100, 900, 400), ((0,), 1, 4, 400, (), 2, 100)),  # pairs of n / 2 + 2 chunks
])  # fmt: skip
def test_a_formula_of_an_integer(sizes, values, formula):
    assert fit_integer(values, sizes) == SizeFormula(*formula)


@pytest.mark.parametrize(("sizes", "values"), [
    ([(16,), (56,)], (544, 6384)),  # two traces do not confirm 2 * n * (n + 1)
    ([(16,), (56,)], (100, 900)),  # nor (n / 2 + 2)**2
    ([(16,), (56,), (36,)], (100, 900, 441)),
    ([(64,), (96,)], (65, 97)),  # no third trace confirms the offset
    ([(24,), (64,), (48,)], (24, 40, 40)),  # min(size, 40)
    ([(64,), (97,), (130,)], (32, 48, 65)),  # a rounded half
])  # fmt: skip
def test_integers_without_a_formula(sizes, values):
    with pytest.raises(NotDerivable):
        fit_integer(values, sizes)


def test_a_formula_gives_integers_only():
    half = fit_integer((32, 48), [(64,), (96,)])
    assert half.at((80,)) == 40
    with pytest.raises(NotDerivable):
        half.at((77,))


def test_a_traced_size_is_an_int_that_records_decisions():
    conditions = SizeConditions()
    shape = traced_sizes(torch.Size([8, 24]), conditions)
    length = shape[1]
    assert type(shape) is torch.Size and isinstance(length, TracedSize) and shape == torch.Size([8, 24])
    conditions.clear()
    half = (2 * length + 2) // 4
    assert half == 12 and half > 3 and not length % 2 and max(length, 30) == 30 and length in {24: 1} and [0] * length
    assert {c.name for c in conditions} >= {"floordiv", "eq", "gt", "mod", "ne"} and all(c.holds for c in conditions)
    assert length / 5 == 4.8 and length * 0.5 == 12.0 and -length == -24 and divmod(length, 7) == (3, 3)
    assert isinstance(length + (length > 3), TracedSize) and isinstance(length * 2.5 / 5, TracedFloat)
    assert length + torch.ones(()) == 25 and torch.zeros(length, 2).shape == (24, 2) and f"{length}" == "24"


class KeepsSizes(nn.Module):
    """It stores sizes in attributes, and returns them."""

    def __init__(self):
        super().__init__()
        self.linear, self.longest, self.rows = nn.Linear(4, 4), 0, 0

    def forward(self, x):
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
        self.rows = x.size(0)
        return self.linear(x).square().mean() * self.longest, x.shape[1], x.shape


def test_sizes_leave_a_trace_as_ints():
    model = KeepsSizes().double()
    compiler = Compiler(model, Mesh.parse("dp2"), Options())
    program, _ = compiler.program((), {"x": torch.randn(8, 12, 4).double()}, purpose="forward", training=True)
    assert [type(output.constant) for output in program.outputs[1:]] == [int] * 4
    assert (type(model.longest), model.longest, type(model.rows), model.rows) == (int, 12, int, 8)
    shape = traced_sizes(torch.Size([8, 12]), SizeConditions())
    kept = plain_sizes({"shapes": [shape], "rows": (shape[0], "rows")})
    assert kept == {"shapes": [torch.Size([8, 12])], "rows": (8, "rows")}
    assert {type(size) for size in (*kept["shapes"][0], kept["rows"][0])} == {int}


def derived_and_traced(model, mesh, batches, **options):
    """Which of these calls were derived. Each one is traced too, and must equal the derived one node by node."""
    compiler = Compiler(model, Mesh.parse(mesh), Options(**options))
    derived = []
    with (
        environment(check=True),
        mock.patch.object(compiling, "check_derived", wraps=check_derived) as checks,
    ):
        for batch in batches:
            before = checks.call_count
            program, _ = compiler.program((), batch, purpose="step", training=True)
            derived.append(checks.call_count > before)
            assert not any(
                isinstance(argument, TracedSize)
                for stage in program.stages for node in stage.graph.graph.nodes for argument in node.args
            )  # fmt: skip
    return derived


def test_programs_of_all_lengths_share_their_graphs():
    model = zoo.llama(num_layers=1)[0]
    compiler = Compiler(model, Mesh.parse("pp2,tp2"), Options(microbatches=2))
    programs = {}
    for seq in (12, 48, 24, 20, 36, 21):
        batch = zoo.llama(num_layers=1, seq=seq)[1]
        programs[seq], _ = compiler.program((), batch, purpose="step", training=True)
    assert [bool(program.sizes) for program in programs.values()] == [False] * 3 + [True] * 3
    assert 21 in programs[21].sizes.values() and programs[20].sizes.keys() == programs[36].sizes.keys()
    for stages in zip(*(programs[seq].stages for seq in (20, 36, 21)), strict=True):
        assert len({stage.graph for stage in stages}) == len({stage.prologue for stage in stages}) == 1
        assert {boundary.shape[1] for stage in stages for boundary in stage.receives} in (set(), {20, 36, 21})


SHAPES = [(8, 12), (8, 48), (8, 24), (8, 20), (8, 36), (16, 16), (16, 20), (8, 28), (8, 52)]


def windows(num_layers=2, rows=8, seq=12):
    """Attention to the last eight tokens, and a mask of padding."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=8, attn_implementation="sdpa",
                           attention_dropout=0.0)  # fmt: skip
    batch = zoo.causal_batch(rows, seq, 64)
    return zoo._finish(MistralForCausalLM(config)), batch


BUILDERS = {"gpt2": zoo.gpt2, "llama": zoo.llama, "bert": zoo.bert, "t5": zoo.t5, "windows": windows}


@pytest.mark.parametrize(("name", "mesh"), [
    ("llama", "tp2"), ("gpt2", "pp2"), ("t5", "dp2"), ("llama", "cp2"), ("bert", "tp2"), ("gpt2", "dp2,tp2"),
])  # fmt: skip
@pytest.mark.few
def test_a_derived_program_equals_the_traced_one(name, mesh):
    model = BUILDERS[name](num_layers=2, seq=64)[0]
    batches = [BUILDERS[name](num_layers=2, rows=rows, seq=seq)[1] for rows, seq in SHAPES]
    derived = derived_and_traced(model, mesh, batches)
    assert derived[:2] == [False] * 2 and derived[3:6] == [True, True, False] and derived[7]


@pytest.mark.large
def test_uneven_shards_are_derived_from_lengths_with_the_same_remainder():
    lengths = (13, 53, 33, 21, 45, 18, 50, 34, 26)  # over two ranks in zigzag, there are four chunks
    batches = [zoo.llama(num_layers=1, rows=4, seq=length)[1] for length in lengths]
    derived = derived_and_traced(zoo.llama(num_layers=1, seq=64)[0], "cp2", batches)
    assert derived[3:5] == [True, True] and derived[-1]


PADDING = {
    "ceil": lambda length: math.ceil(length / 8) * 8 - length,
    "floats": lambda length: int((length / 8 - length // 8) * 8),
    "rounded": lambda length: round(length * 0.125) * 8 % length,
    "int": lambda length: -int(length) % 8,
    "float": lambda length: round(-float(length) % 8),
    "log": lambda length: 2 ** math.ceil(math.log2(length)) - length,
    "bits": lambda length: (1 << (length - 1).bit_length()) - length,
    "numpy": lambda length: int(np.ceil(length / 8)) * 8 - length,
    "gcd": lambda length: math.gcd(length, 8),
    "root": lambda length: math.isqrt(length - 1) ** 2 + 15 - length,
    "even": lambda length: 8 if (length / 16).is_integer() else 4,
}  # fmt: skip
"""Numbers that are no multiples of a length, though they can be for all traced lengths."""


class ByLength(nn.Module):
    """Python decisions by the length, of several kinds."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x):
        length, h = x.shape[1], self.linear(x)
        if self.kind == "limit" and length > 40:
            h = h * 2
        if self.kind == "odd" and length % 2:
            h = h[:, :-1] * 2
        if self.kind == "equal" and length == 33:
            h = h * 3
        if self.kind == "padded":
            h = F.pad(h, (0, 0, 0, -length % 8)).unflatten(1, (-1, 8)).relu().flatten(1, 2)
        if self.kind == "minimum":
            h = h[:, : min(length, 40)]
        if self.kind == "chunks":
            h = sum(chunk.tanh().sum() for chunk in h.split(16, dim=1))
        if self.kind == "power" and length & (length - 1) == 0:
            h = h.sin()
        if self.kind == "mean":
            h = h.sum() / length
        if self.kind in PADDING:
            h = F.pad(h, (0, 0, 0, PADDING[self.kind](length))).exp()
        if self.kind == "len":
            h = F.pad(h, (0, 0, 0, -len(x[0]) % 8)).exp()
        return h.square().mean()


@pytest.mark.few
@pytest.mark.parametrize("kind", ["limit", "odd", "equal", "padded", "minimum", "chunks", "power", "mean"])
def test_decisions_by_a_size_are_guards(kind):
    lengths = (24, 56, 40, 48, 33, 34, 41, 39, 32, 36, 25, 55, 47)
    batches = [{"x": torch.randn(8, length, 4).double()} for length in lengths]
    derived_and_traced(ByLength(kind).double(), "dp2", batches)


@pytest.mark.parametrize("kind", PADDING)
def test_integers_computed_from_a_length_are_guards(kind):
    traced, conditions, values = (16, 64, 32), [], []
    for length in traced:
        conditions.append(SizeConditions())
        with attributes(recorded_functions()):
            values.append(plain_sizes(PADDING[kind](traced_sizes(length, conditions[-1]))))
    for length in range(17, 64):
        try:
            sizes = [(one,) for one in traced]
            _Conditions(conditions, sizes).check((length,))
            fitted = fit(values, sizes, [])
            derived = values[0] if fitted is None else evaluated(fitted, (length,))
        except NotDerivable:
            continue
        assert derived == PADDING[kind](length)


@pytest.mark.few
@pytest.mark.parametrize("kind", ["int", "len", "ceil"])
def test_numbers_that_leave_the_record_are_guards(kind):
    batches = [{"x": torch.randn(8, length, 4).double()} for length in (16, 64, 40, 25)]
    derived = derived_and_traced(ByLength(kind).double(), "dp2", batches)
    assert derived == [False, False, kind != "len", False]


def half_of(length, share=0.5):
    return share * (length - 1)


class CustomFloat(float):
    pass


class Halves:
    def __init__(self):
        self.table = {"half": 0.5}

    def method(self):
        return 0.5

    @property
    def computed(self):
        return 0.5


def one_half():
    return 0.5


HALVES = Halves()
UNRECORDED = {
    "float times size": lambda x, n: 0.5 * n > 15,
    "attribute times size": lambda x, n: np.pi * x.shape[1] > 100,
    "float less than size": lambda x, n: n > 30.5,
    "assigned back": lambda x, n: (n := 0.25 * n) > 7.5,
    "in a function": lambda x, n: half_of(n) > 15,
    "a call of float": lambda x, n: float("0.5") * n > 15,
    "a function times size": lambda x, n: int(one_half() * n) % 2 == 0,
    "a method times size": lambda x, n: int(HALVES.method() * n) % 2 == 0,
    "a property times size": lambda x, n: int(HALVES.computed * n) % 2 == 0,
    "element times size": lambda x, n: int(HALVES.table["half"] * n) % 2 == 0,
    "a choice times size": lambda x, n: int((n and 0.5) * n) % 2 == 0,
    "a maximum times size": lambda x, n: int(max(0.5, 0.25) * n) % 2 == 0,
    "float times element": lambda x, n: int(0.5 * list(x.shape)[1]) % 2 == 0,
    "a fraction times size": lambda x, n: int(Fraction(1, 2) * n) % 2 == 0,
    "size times a fraction": lambda x, n: int(n * Fraction(1, 2)) % 2 == 0,
    "size times a custom float": lambda x, n: int(n * CustomFloat(0.5)) % 2 == 0,
    "a comparison times size": lambda x, n: (n > 1) * n // 2 % 2 == 0,
    "numbers as text": lambda x, n: int(f"{n}") // 2 % 2 == 0,
    "numbers as text by %": lambda x, n: int("%d" % n) // 2 % 2 == 0,  # noqa: UP031
    "a function written in C": lambda x, n: range(n + 1)[-1] // 2 % 2 == 0,
    "a function of numpy": lambda x, n: len(np.zeros(n)) // 2 % 2 == 0,
    "a function of the standard library": lambda x, n: int(json.dumps(n)) // 2 % 2 == 0,
    "attribute of a size": lambda x, n: n.real // 2 % 2 == 0,
    "number of shards": lambda x, n: len(x.split(1, 1)) // 2 % 2 == 0,
    "numel of a part of the shape": lambda x, n: x.shape[1:].numel() // 4 % 2 == 0,
    "numel of the shape": lambda x, n: x.shape.numel() > 8 * 30 * 4,
    "numel of the size": lambda x, n: x.size().numel() > 8 * 30 * 4,
    "key of a dict": lambda x, n: not {25: True}.get(n, False),
    "element of a set": lambda x, n: n not in {25, 1000},
    "values of a constant": lambda x, n: torch.arange(n).max().item() > 28,
    "a constant": lambda x, n: torch.tensor(n).item() > 28,
    "a list of a constant": lambda x, n: torch.arange(n).tolist()[-1] > 28,
}  # fmt: skip
"""Decisions by a length for which Python calls no method of the length."""


class ByUnrecorded(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return (h.sin() if UNRECORDED[self.kind](x, x.shape[1]) else h.exp()).square().mean()


@pytest.mark.whole
@pytest.mark.parametrize("kind", UNRECORDED)
def test_unrecorded_operations_on_sizes_are_guards(kind):
    batches = [{"x": torch.randn(8, length, 4).double()} for length in (40, 64, 48, 25)]
    derived = derived_and_traced(ByUnrecorded(kind).double(), "dp2", batches)
    assert not derived[-1]


@pytest.mark.parametrize(("calls", "new", "is_fulfilled"), [
    ([(4, 32), (8, 16), (2, 64)], (4, 20), False),  # the number of tokens is constant
    ([(4, 8), (8, 16), (6, 12)], (5, 12), False),  # the length is twice the number of samples
    ([(4, 8), (8, 16), (6, 12)], (5, 10), True),
    ([(8, 24), (16, 16)], (10, 16), False), ([(8, 24), (16, 16)], (12, 20), True),  # the sum is constant
    ([(4, 9), (8, 17), (6, 13)], (5, 12), False),  # the length is 2 * samples + 1
    ([(8, 12), (8, 48), (16, 16)], (12, 20), True),
    ([(8, 10, 14), (10, 12, 10), (12, 8, 12)], (9, 9, 12), False), ([(16,), (64,)], (33,), True),
])  # fmt: skip
def test_relations_between_the_sizes_of_traced_calls(calls, new, is_fulfilled):
    relations = SizeRelations(calls)
    with nullcontext() if is_fulfilled else pytest.raises(NotDerivable):
        relations.check(new)


class MeanOfTokens(nn.Module):
    """Its loss is divided by the number of tokens, a Python number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).square().sum() / (x.shape[0] * x.shape[1])


@pytest.mark.large
def test_a_number_of_tokens_that_traced_calls_share_is_a_guard():
    batches = [{"x": torch.randn(rows, n, 4).double()} for rows, n in ((4, 32), (8, 16), (2, 64), (4, 20), (6, 40))]
    derived_and_traced(MeanOfTokens().double(), "tp2", batches)


@pytest.mark.large
def test_growing_lengths_are_derived_from_longer_traces():
    batches = [{"x": torch.randn(8, length, 4).double()} for length in (16, 20, 24, 30, 44, 56, 12, 9)]
    derived = derived_and_traced(ByLength("none").double(), "dp2", batches)
    assert derived == [False, False, True, True, True, True, True, True]  # 24 is traced as 48, 56 as 112, 12 as 6
    derived = derived_and_traced(ByLength("limit").double(), "dp2", batches[:4])
    assert not any(derived)  # the trace of 48 serves no length below 40


@pytest.mark.large
def test_two_lengths_that_were_equal_need_a_trace_when_they_differ():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, y):
            return (self.linear(x).sum(1) + self.linear(y).sum(1)).square().mean()

    sizes = [(6, 6), (16, 16), (12, 12), (10, 10), (10, 14), (14, 10), (14, 12), (12, 14), (9, 13)]
    batches = [{"x": torch.randn(4, n, 4).double(), "y": torch.randn(4, m, 4).double()} for n, m in sizes]
    derived = derived_and_traced(Pair().double(), "dp2", batches)
    assert derived[:2] == [False] * 2 and derived[2:5] == [True, True, False] and derived[-1]


class Doubled(torch.autograd.Function):
    """A pointwise function with its own backward, as BLOOM's GELU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.tanh() + x * (1 - x.tanh() ** 2))


class WithFunction(nn.Module):
    """A layer and an autograd.Function."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Doubled.apply(self.linear(x)).square().mean()


@pytest.mark.large
def test_a_function_of_the_users_is_one_operator_for_all_lengths():
    batches = [{"x": torch.randn(8, length, 4).double()} for length in (16, 56, 36, 24)]
    assert derived_and_traced(WithFunction().double(), "dp2", batches)[-1]


class ByRows(nn.Module):
    """Its Python decides by the number of samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x).reshape(x.shape[0] * x.shape[1], 4)
        return (h.sin() if x.shape[0] > 5 else h).square().mean()


@pytest.mark.large
def test_a_size_that_calls_with_equal_decisions_share_is_a_guard():
    sizes = [(8, 24), (8, 64), (8, 48), (4, 32), (6, 40)]  # the calls with more than 5 samples have 8
    batches = [{"x": torch.randn(rows, length, 4).double()} for rows, length in sizes]
    assert not derived_and_traced(ByRows().double(), "tp2", batches)[-1]


class Widened(nn.Module):
    """Its Python number `extra` becomes an integer of the graph, as a size would."""

    def __init__(self):
        super().__init__()
        self.linear, self.extra = nn.Linear(4, 4), 24

    def forward(self, x):
        return F.pad(self.linear(x), (0, 0, 0, self.extra)).exp().mean()


@pytest.mark.large
def test_calls_traced_under_other_python_values_are_not_used():
    model = Widened().double()
    compiler = Compiler(model, Mesh.parse("dp2"), Options())

    def call(length, extra):
        model.extra = extra
        compiler.program((), {"x": torch.randn(8, length, 4).double()}, purpose="step", training=True)

    for length in (24, 48, 36):
        call(length, length)  # as if `extra` were the length
    with environment(check=True):
        for length in (30, 40, 44):
            call(length, 36)


@pytest.mark.large
def test_the_plan_names_the_largest_batch_of_a_training_step():
    model = zoo.llama(num_layers=1, seq=64)[0]
    compiler = Compiler(model, Mesh.parse("tp2"), Options(memory="1GB"))
    for seq, purpose in ((12, "step"), (48, "forward"), (24, "step"), (8, "step")):
        batch = zoo.llama(num_layers=1, seq=seq)[1]
        compiler.program((), batch, purpose=purpose, training=True)
        note = compiler.plan.notes[-1:]
        assert (seq in (24, 8)) == ("largest batch of a training step so far was 8 samples x 24" in "".join(note))
    assert "predicted memory of" in note[0] and "on the fullest rank: it fits, memory= says 1 GB" in note[0]
    assert "in a training step of 8 samples x 12 tokens\n" in compiler.plan.explain()


LOOP = [(6, 4), (6, 28), (6, 16), (6, 8), (6, 24), (6, 12), (6, 20)]


def train_on(name, mesh, options):
    """Training steps with another length each, beside the plain model, with at most three traces."""
    model, _ = BUILDERS[name](num_layers=1, seq=32)
    _, batch = BUILDERS[name](num_layers=1, rows=LOOP[0][0], seq=LOOP[0][1])
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, **options)
    optimizers = torch.optim.SGD(pm.parameters(), lr=1e-2), torch.optim.SGD(model.parameters(), lr=1e-2)
    with mock.patch("autopart.recipe.make_plan.trace", wraps=autopart.recipe.make_plan.trace) as traces:
        for rows, seq in LOOP:
            batch = BUILDERS[name](num_layers=1, rows=rows, seq=seq)[1]
            loss = model(**batch, **zoo.no_cache(model))
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            loss.backward()
            zoo.assert_close_outputs(pm.step(**batch), loss.detach(), where=f"loss of {rows} x {seq}")
            zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert traces.call_count <= 2  # beside the example
    assert len(pm._executables) <= 4  # three traced lengths, and one for all others
    for key, value in model.state_dict().items():
        zoo.assert_close_outputs(pm.full_state_dict()[key], value, where=key)


@pytest.mark.parametrize(("name", "mesh", "options"), [
    ("llama", "tp2", {}), ("gpt2", "pp2", {"microbatches": 2}), ("bert", "dp2", {"zero": 3}), ("t5", "tp2", {}),
    ("llama", "cp2", {"recompute": "full"}), ("windows", "tp2", {}),
])  # fmt: skip
@pytest.mark.few
def test_processes_train_on_another_length_in_every_step(name, mesh, options):
    dist.run_ranks(train_on, 2, name, mesh, options, timeout_s=120.0)


class WeightedSquares(nn.Module):
    """A loss module with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 8, dtype=torch.float64))

    def forward(self, output, target):
        return (self.weight * (output - target).square()).sum()


def train_without_sizes_in_graphs():
    """Train on a pipeline whose graphs contain no size, with a loss whose weight changes between batch sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    criterion, x = WeightedSquares(), torch.randn(4, 8).double()
    pm = autopart.parallelize(copy.deepcopy(model), "pp2", example_kwargs={"input": x}, microbatches=2)
    for number, rows in enumerate((4, 32, 16, 8, 24, 8, 12)):
        criterion.weight.mul_(1.5 + number)
        x, target = torch.randn(rows, 8).double(), torch.randn(rows, 8).double()
        loss = criterion(model(x), target)
        loss.backward()
        zoo.assert_close_outputs(pm.step(input=x, loss_fn=criterion, target=target), loss.detach(), where=f"{rows}")
        zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})
        model.zero_grad()
        pm.zero_grad()
    return [one.program.sizes for one in pm._executables.values() if one.program.shared_graphs]


def test_graphs_without_sizes_serve_all_batch_sizes():
    for sizes in dist.run_ranks(train_without_sizes_in_graphs, 2, timeout_s=120.0):
        assert sizes == [{}]

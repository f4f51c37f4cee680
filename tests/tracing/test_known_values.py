"""Values that depend on nothing are known in a trace: Python may decide by them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError
from autopart.ir.graph import operator_name
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call


class Deciding(nn.Module):
    """A linear layer scaled by what `number` reads from constants."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(16, 16), number

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.number()


def listed() -> float:
    rates = [1, 2, 3]
    made = torch.tensor(rates)
    rates[2] = 100
    return float(made.max())


NUMBERS = {
    "linspace": lambda: sum(rate.item() for rate in torch.linspace(0, 0.3, 4)),
    "mask": lambda: 2 if bool((torch.ones(3, 3).triu(1) == torch.ones(3, 3).triu(diagonal=1)).all()) else 3,
    "equal": lambda: 2 if torch.equal(torch.arange(3), torch.arange(4)) else 3,
    "list that changes": listed,
    "list": lambda: sum(torch.arange(5).flip(0).tolist()[:2]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_python_reads_constants(name):
    found = autopart.verify(Deciding(NUMBERS[name]), "tp2", example_args=(torch.randn(4, 16),))
    assert found.ok, found.first_mismatch


LIKE = {
    "to": lambda x: torch.linspace(0, 1, 3).to(x),
    "type_as": lambda x: torch.linspace(0, 1, 3).type_as(x),
    "new_tensor": lambda x: x.new_tensor([0.0, 1.0, 2.0]),
    "new_zeros": lambda x: x.new_zeros(3) + torch.arange(3).to(x),
    "new_ones": lambda x: x.new_ones(3).cumsum(0),
    "new_full": lambda x: torch.cat([x.new_full((1,), 2.0), x.new_full((2,), 3.0).cumsum(0)]),
    "ones_like": lambda x: torch.ones_like(x[0]).cumsum(0),
    "zeros_like": lambda x: torch.zeros_like(x[0]) + torch.arange(16).to(x),
    "full_like": lambda x: torch.full_like(input=x[0], fill_value=2.0).cumsum(0),
}


class Rising(nn.Module):
    """Decides by whether some steps rise."""

    def __init__(self, steps):
        super().__init__()
        self.linear, self.steps = nn.Linear(16, 16), steps

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps(x)
        return self.linear(x) if (steps[1:] > steps[:-1]).all() else x


@pytest.mark.parametrize("name", LIKE)
def test_of_a_tensor_that_gives_the_form_nothing_is_asked(name):
    result = autopart.verify(Rising(LIKE[name]), "tp2", example_args=(torch.randn(4, 16),))
    assert result.ok and result.max_error < 1e-10, result
    assert not [note for note in result.notes if "not compared" in note]


def test_what_is_made_of_values_of_an_input_on_meta_is_not_known():
    for steps in (lambda x: x.to(torch.arange(3.0)), lambda x: torch.ones_like(x) * x, lambda x: x.new_tensor(x[0])):
        plan = autopart.plan(Rising(steps).to("meta"), "tp2", example_args=(torch.randn(4, 16, device="meta"),))
        assert any("both sides of a branch on values" in note for note in plan.notes)


REPEATS = {
    "counts": lambda x, n: x[torch.repeat_interleave(torch.arange(3), n)],
    "counts alone": lambda x, n: x[torch.repeat_interleave(n)],
    "rows": lambda x, n: x[:3].repeat_interleave(n, 0),
    "by keyword": lambda x, n: torch.repeat_interleave(x[:3], repeats=n, dim=0),
    "one count": lambda x, n: x.repeat_interleave(n[:1], dim=1)[:, :16],
    "flat": lambda x, n: x.repeat_interleave(n[:1])[:16],
}


class Repeated(nn.Module):
    def __init__(self, repeat):
        super().__init__()
        self.linear, self.repeat = nn.Linear(16, 16), repeat

    def forward(self, x: Tensor) -> Tensor:
        return self.repeat(self.linear(x), torch.tensor([2, 1, 3], device=x.device))


@pytest.mark.parametrize("name", REPEATS)
def test_repeats_by_known_counts(name):
    model, x = Repeated(REPEATS[name]), torch.randn(4, 16)
    result = autopart.verify(model, "tp2", example_args=(x,))
    assert result.ok and result.max_error < 1e-10, result


class Columns(nn.Module):
    """Decides by a tensor that is neither a parameter nor a buffer. `after`: what forward does with it then."""

    def __init__(self, after=lambda model, x: None):
        super().__init__()
        self.linear, self.embed = nn.Linear(19, 16), nn.Embedding(4, 16)
        self.is_number, self.after = torch.tensor([True, False, True, True]), after

    def forward(self, x: Tensor) -> Tensor:
        columns = [
            x[:, i : i + 1] if is_number else self.embed(x[:, i].long())
            for i, is_number in enumerate(self.is_number)
        ]  # fmt: skip
        output = self.linear(torch.cat(columns, 1)) * (2 if self.is_number[1] else 3)
        self.after(self, x)
        return output


def test_python_reads_a_tensor_that_the_model_holds():
    result = autopart.verify(model := Columns(), "tp2", example_args=(torch.rand(4, 4),))
    assert result.ok and result.max_error < 1e-10, result
    assert model.is_number.tolist() == [True, False, True, True]


def assign(model: Columns, x: Tensor) -> None:
    model.is_number = x.sum(0) > 0


def write(model: Columns, x: Tensor) -> None:
    model.is_number[1:].logical_not_()


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (assign, "Columns keeps a tensor from one call to the next in 'is_number'"),
        (write, "the tensor 'is_number' is written and is not a buffer"),
    ],
)
def test_a_tensor_that_the_forward_changes_is_refused(after, text):
    with pytest.raises(TraceError, match=text):
        autopart.plan(Columns(after), "tp2", example_args=(torch.rand(4, 4),))


@pytest.mark.parametrize("kind", ["buffer", "view of a buffer", "parameter"])
def test_what_changes_between_calls_is_not_known(kind):
    model, x = Columns(), torch.rand(4, 4)
    flags = model.is_number.float()
    del model.is_number
    if kind == "parameter":
        model.is_number = nn.Parameter(flags)
    else:
        model.register_buffer("flags" if kind == "view of a buffer" else "is_number", flags)
        model.is_number = flags[:]
    with pytest.raises(TraceError, match="decides what to run by the values in a tensor"):
        autopart.plan(model, "tp2", example_args=(x,))


def written() -> int:
    made = torch.arange(4)
    made[0] = 9
    return 2 if made.max() > 5 else 3


def written_through_a_view() -> int:
    made = torch.arange(4)
    made[1:].mul_(2)
    return 2 if made.max() > 5 else 3


def random_choice() -> int:
    return 2 if torch.zeros(8).bernoulli(0.5).sum() > 4 else 3


@pytest.mark.parametrize("number", [written, written_through_a_view])
def test_writes_of_known_values_are_known(number):
    result = autopart.verify(Deciding(number), "tp2", example_args=(torch.randn(4, 16),))
    assert result.ok, result


def test_both_sides_of_a_random_choice_are_computed():
    result = autopart.verify(Deciding(random_choice), "tp2", example_args=(torch.randn(4, 16),))
    assert result.ok and result.max_error < 1e-10, result


def written_elsewhere() -> float:
    times, states = torch.linspace(0, 1, 3), torch.zeros(3, 4)
    states[0] = 1.0
    return 2.0 if times[1] > times[0] else 3.0


def computed_before() -> float:
    times = torch.arange(4)
    largest = times.max()
    times[0] = 9
    return float(largest)


@pytest.mark.parametrize(("number", "value"), [(written_elsewhere, 2.0), (computed_before, 3.0)])
def test_a_write_makes_only_that_memory_unknown(number, value):
    result = autopart.verify(model := Deciding(number), "tp2", example_args=(torch.randn(4, 16),))
    assert result.ok and model.number() == value, result


class Translator(nn.Module):
    """torch's own transformer with a causal mask, by which its layers decide."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        made = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_transformer_of_torch(mesh):
    batch = {name: torch.randint(32, (4, 8)) for name in ("source", "target", "labels")}
    found = autopart.verify(Translator(), mesh, example_kwargs=batch)
    assert found.ok, found.first_mismatch


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(32, 16, **options), nn.Linear(16, 4)

    def forward(self, rows: Tensor, labels: Tensor, offsets: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.head(self.bags(rows, offsets)), labels)


BAGS = [{}, {"mode": "sum"}, {"mode": "max"}, {"padding_idx": 3}, {"mode": "sum", "padding_idx": -1}]


@pytest.mark.parametrize("options", BAGS, ids=str)
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_embedding_bags(options, mesh):
    rows = torch.randint(32, (4, 6))
    rows[0, :3], rows[1] = 3, 31
    found = autopart.verify(Bags(**options), mesh, example_args=(rows, torch.randint(4, (4,))))
    assert found.ok, found.first_mismatch


def test_the_table_of_bags_is_sharded():
    traced = prepare(model := Bags(), bind_call(model, (torch.randint(32, (4, 6)), torch.randint(4, (4,))), {}))
    assert "aten::embedding" in {operator_name(n) for n in traced.graph.nodes if n.op == "call_function"}


class Chosen(nn.Module):
    """Bytes as a condition."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, self.linear(x), x) + self.linear(x).where(mask, x)


def test_bytes_as_a_condition():
    mask = torch.randint(2, (4, 16), dtype=torch.uint8)
    result = autopart.verify(Chosen(), "tp2", example_args=(torch.randn(4, 16), mask))
    assert result.ok and result.max_error < 1e-10, result

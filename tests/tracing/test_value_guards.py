"""Value guards: Python reads values of the batch, and each value that it reads is another trace."""

from __future__ import annotations

import warnings
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import InputError, TraceError
from autopart.tracing import trace_model

ROWS, LENGTH, SIZE = 8, 8, 8
LENGTHS = torch.tensor([5, 3, 7, 2, 7, 4, 1, 6])


class Net(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.a, self.b, self.compute = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), compute

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return self.compute(self, x, values)


def trimmed(m, x, lengths):
    n = int(lengths.max())
    return m.a(x[:, :n]).square().mean()


def item_of_lengths(m, x, lengths):
    return m.a(x[:, : lengths.max().item()]).square().mean()


def sliced_by_a_tensor(m, x, lengths):
    return m.a(x[:, : lengths.max()]).square().mean()


def sliced_by_a_tensor_with_one_element(m, x, lengths):
    first = (lengths > 6).nonzero()[0]
    return m.a(x)[0, first:].square().mean()


def written_at_an_index(m, x, lengths):
    order = torch.zeros(9, dtype=torch.long)
    for j in range(3):
        order[lengths[j]] = j
    return m.a(x)[:, order[lengths] + 1].square().mean()


def rows_of_a_list(m, x, lengths):
    y = m.a(x)
    return torch.stack([y[i, :n].mean(0) for i, n in enumerate(lengths.tolist())]).square().mean()


def entries_one_by_one(m, x, lengths):
    y = m.a(x)
    return sum(y[i, :n].square().sum() for i, n in enumerate(lengths))


def branch_of_a_mask(m, x, lengths):
    y = m.a(x)
    if (lengths > 2).all():
        y = m.b(y)
    return y.square().mean()


def branch_of_a_count(m, x, lengths):
    long = lengths > 2
    count = long.sum().item()
    return m.a(x)[long].square().sum() / count if count > 2 else m.b(x).square().mean()


def mean_of_positives(m, x, lengths):
    loss = m.a(x).square().mean((1, 2))
    return loss[lengths > 2].mean() if (lengths > 2).any() else loss.sum() * 0


def missing_labels(m, x, lengths):
    target = torch.where(lengths > 2, lengths / 8, torch.nan).to(x.dtype)
    y = m.a(x).mean((1, 2))
    if torch.isnan(target).any():
        known = ~torch.isnan(target)
        return F.mse_loss(y[known], target[known])
    return F.mse_loss(y, target)


def groups_of_a_batch_vector(m, x, lengths):
    return x.new_zeros(int(lengths.max()) + 1, SIZE).index_add(0, lengths, m.a(x).mean(1)).square().mean()


def zeros_of_a_tensors_size(m, x, lengths):
    return torch.zeros(lengths.max() + 1, SIZE, dtype=x.dtype).index_add(0, lengths, m.a(x).mean(1)).square().mean()


def bins(m, x, lengths):
    counts = torch.bincount(lengths)
    return (m.a(x).mean((0, 1)).sum() * counts / counts.sum()).square().sum()


def one_hot_of_unknown_classes(m, x, lengths):
    return (m.a(x)[:, :, 0] * F.one_hot(lengths)).square().mean()


def repeated_rows(m, x, lengths):
    return torch.repeat_interleave(m.a(x), lengths, dim=0).softmax(0).square().mean()


def different_values(m, x, lengths):
    distinct, place = torch.unique(lengths, return_inverse=True)
    return x.new_zeros(len(distinct), SIZE).index_add(0, place, m.a(x).mean(1)).square().mean()


def pairs_of_selected(m, x, lengths):
    chosen = (lengths > 3).nonzero().squeeze(1)
    return m.a(x)[chosen].view(len(chosen), -1).softmax(0).square().mean()


def hard_negatives(m, x, lengths):
    loss, positive = m.a(x).square().mean((1, 2)), lengths > 6
    negative = loss[~positive]
    count = min(2 * int(positive.sum()), negative.numel())
    return loss[positive].sum() + negative.topk(count).values.sum()


def written_mask(m, x, lengths):
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    mask[:, 0] = True
    mask[2:4].logical_not_()
    row = mask[0]
    row[3] = False
    n = int(mask.sum(1).max()) + int(mask[0].sum())
    return m.a(x[:, : n % LENGTH]).square().mean()


def numpy_lengths(m, x, lengths):
    y = m.a(x)
    return sum(y[i, : int(n)].square().sum() for i, n in enumerate(lengths.cpu().numpy()))


def tensor_of_entries(m, x, lengths):
    return (m.a(x).mean((1, 2)) * torch.tensor([n + 1 for n in lengths])).square().sum()


def no_row_selected(m, x, lengths):
    rows = m.a(x)[lengths > 7]
    return m.b(x).sum() if rows.shape[0] == 0 else rows.square().mean()


CASES = (
    trimmed, item_of_lengths, sliced_by_a_tensor, sliced_by_a_tensor_with_one_element, written_at_an_index,
    rows_of_a_list, entries_one_by_one, branch_of_a_mask,
    branch_of_a_count, mean_of_positives, missing_labels, groups_of_a_batch_vector, zeros_of_a_tensors_size, bins,
    one_hot_of_unknown_classes, repeated_rows, different_values, pairs_of_selected, hard_negatives, written_mask,
    numpy_lengths, tensor_of_entries, no_row_selected,
)  # fmt: skip


@pytest.mark.parametrize("compute", CASES, ids=lambda compute: compute.__name__)
def test_values_of_the_batch_decide(compute):
    torch.manual_seed(0)
    result = autopart.verify(Net(compute), "dp2", example_args=(torch.randn(ROWS, LENGTH, SIZE), LENGTHS))
    assert result.ok and result.max_error < 1e-10, result
    assert not [note for note in result.notes if "not compared" in note]


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2,tp2"])
@pytest.mark.parametrize("compute", [trimmed, branch_of_a_mask, rows_of_a_list])
def test_other_meshes(mesh, compute):
    torch.manual_seed(0)
    result = autopart.verify(Net(compute), mesh, example_args=(torch.randn(ROWS, LENGTH, SIZE), LENGTHS))
    assert result.ok and result.max_error < 1e-10, result


def test_microbatches_use_the_value_of_the_global_batch():
    torch.manual_seed(0)
    lengths = torch.tensor([1, 1, 1, 1, 7, 1, 1, 1])
    example = torch.randn(ROWS, LENGTH, SIZE), lengths
    result = autopart.verify(Net(trimmed), "dp2", example_args=example, microbatches=2)
    assert result.ok and result.max_error < 1e-10, result


class Packed(nn.Module):
    """Recurrent layers on packed sequences; the loss reads all results."""

    def __init__(self, kind: type, use: Any, **options: Any) -> None:
        super().__init__()
        self.r, self.use, self.first = kind(SIZE, SIZE, **options), use, options.get("batch_first", False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=self.first, enforce_sorted=False)
        return self.use(self, *self.r(packed))


def padded_and_final(m, packed, final):
    y, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=m.first)
    states = final if isinstance(final, tuple) else (final,)
    return (y.sum(int(m.first)) / lengths[:, None]).square().mean() + sum(state.square().mean() for state in states)


def data_of_steps(m, packed, final):
    changed = nn.utils.rnn.PackedSequence(packed.data.tanh(), *packed[1:])
    y, _ = nn.utils.rnn.pad_packed_sequence(changed, batch_first=m.first, padding_value=-1.0, total_length=LENGTH)
    return packed.data.softmax(0).square().sum() + y.mean()


class ReshapedSelection(nn.Module):
    """Views a flat selection as rows: their number is the size of the selection divided by 8."""

    def __init__(self, of_input: bool, expanded: bool = False) -> None:
        super().__init__()
        self.a, self.of_input, self.expanded = nn.Linear(SIZE, SIZE), of_input, expanded

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.a(x)
        rows = mask if self.of_input else y.sum(1) > 0
        if self.expanded:
            return y[rows[:, None].expand_as(y)].view(-1, SIZE).square().sum()
        return torch.masked_select(y, rows[:, None]).view(-1, SIZE).square().sum()


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_a_view_of_a_selection_has_its_size(mesh):
    example = torch.randn(ROWS, SIZE), LENGTHS > 3
    for expanded in (False, True):
        result = autopart.verify(ReshapedSelection(True, expanded), mesh, example_args=example)
        assert result.ok and result.max_error < 1e-10, result
    with pytest.raises(TraceError, match=r"autopart has no formula for it: \(u0//8\)"):
        autopart.plan(ReshapedSelection(False), mesh, example_args=example)


PACKED = {
    "lstm": (nn.LSTM, padded_and_final, {"batch_first": True}),
    "two layers both ways": (nn.LSTM, padded_and_final, {"num_layers": 2, "bidirectional": True}),
    "projected": (nn.LSTM, padded_and_final, {"proj_size": 4, "bias": False}),
    "gru": (nn.GRU, padded_and_final, {"bidirectional": True}),
    "rnn": (nn.RNN, data_of_steps, {"nonlinearity": "relu"}),
    "data": (nn.GRU, data_of_steps, {"batch_first": True, "num_layers": 2}),
}


@pytest.mark.few
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name):
    kind, use, options = PACKED[name]
    torch.manual_seed(0)
    example = torch.randn(ROWS, LENGTH, SIZE), LENGTHS
    result = autopart.verify(Packed(kind, use, **options), "dp2", example_args=example)
    assert result.ok and result.max_error < 1e-10, result
    assert not [note for note in result.notes if "not compared" in note]


@pytest.mark.large
def test_packed_sequences_of_one_largest_length_share_a_trace():
    torch.manual_seed(0)
    model = Packed(nn.LSTM, padded_and_final, batch_first=True).double()
    pm = autopart.parallelize(model, "dp1", example_args=batch(1))
    for lengths in (LENGTHS, LENGTHS.flip(0), LENGTHS.clamp(min=4)):
        x, _ = batch(1)
        assert torch.allclose(pm(x, lengths), model(x, lengths), atol=1e-12)
    assert pm._compiler._num_traces == 2


def batch(last: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(last)
    x = torch.randn(ROWS, LENGTH, SIZE, generator=generator, dtype=torch.float64)
    return x, torch.arange(ROWS) % 3 + last


def compared(mesh: str, compute: Any, order: tuple[int, ...]) -> tuple[float, list[int]]:
    """Return the largest difference of losses and gradients from the model's, and how many traces each call made."""
    torch.manual_seed(0)
    model = Net(compute).double()
    pm = autopart.parallelize(model, mesh, example_args=batch(order[0]))
    worst, counts = 0.0, []
    for last in order:
        loss = model(*batch(last))
        expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for parameter in pm.parameters():
            parameter.grad = None
        differences = [pm.step(*batch(last)) - loss.detach()]
        gradients = pm.full_grads()
        for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
            if gradient is not None:
                differences.append(gradients[name] - gradient)
        worst = max(worst, *(float(difference.abs().max()) for difference in differences))
        counts.append(pm._compiler._num_traces)
    return worst, counts


def test_each_value_is_traced_once():
    worst, counts = compared("dp1", trimmed, (3, 1, 3, 5, 1, 3))
    assert worst < 1e-10
    assert counts == [1, 2, 2, 3, 3, 3]


def test_code_that_needs_values_is_found_once(monkeypatch):
    """A second batch needs one export, because the first has found that `.item()` must return a real value."""
    exports, export = [], trace_model._exported_once
    monkeypatch.setattr(trace_model, "_exported_once", lambda *args: exports.append(args) or export(*args))
    model, x = Net(item_of_lengths), torch.randn(ROWS, LENGTH, SIZE)
    pm = autopart.parallelize(model, "dp1", example_args=(x, LENGTHS))
    assert len(exports) > 1
    exports.clear()
    lengths = LENGTHS.clamp(max=5)
    assert float(pm(x, lengths)) == pytest.approx(float(model(x, lengths)))
    assert len(exports) == 1


def test_a_branch_has_two_traces():
    worst, counts = compared("dp1", branch_of_a_count, (3, 2, 1, 0, 2, 0))
    assert worst < 1e-10
    assert counts[-1] == 2


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_processes(mesh):
    for worst, counts in dist.run_ranks(compared, 2, mesh, trimmed, (3, 1, 3), timeout_s=150):
        assert worst < 1e-10
        assert counts == [1, 2, 2]


def test_a_number_in_arithmetic_is_no_guard():
    def divided(m, x, lengths):
        return m.a(x).square().sum() / lengths.sum().item()

    worst, counts = compared("dp1", divided, (3, 1, 2))
    assert worst < 1e-10
    assert counts[-1] == 1


def test_the_plan_names_each_guard():
    plan = autopart.plan(Net(trimmed), "dp2", example_args=(torch.randn(ROWS, LENGTH, SIZE), LENGTHS))
    (note,) = [note for note in plan.notes if note.startswith("traced for")]
    line = trimmed.__code__.co_firstlineno + 1
    assert note == f"traced for int(lengths.max()) = 7 (test_value_guards.py:{line}); each other value is traced again"


@pytest.mark.large
def test_many_values_are_named_in_the_warning():
    pm = autopart.parallelize(Net(trimmed), "dp1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for last in range(1, 9):
            pm(torch.randn(ROWS, 16, SIZE), torch.arange(ROWS) % 2 + last)
    (text,) = [str(one.message) for one in caught if "has traced" in str(one.message)]
    assert "`int(lengths.max())` at test_value_guards.py:" in text and "had 8 values" in text


def test_a_decision_by_activations_is_refused():
    def decides(m, x, lengths):
        n = int((m.a(x).sum() * 0).long() + lengths.max())
        return m.a(x[:, :n]).square().mean()

    with pytest.raises(TraceError, match="decides what to run by the values in a tensor"):
        autopart.plan(Net(decides), "dp2", example_args=(torch.randn(ROWS, LENGTH, SIZE), LENGTHS))


def test_a_decision_by_random_numbers_of_the_inputs_shape_is_no_guard():
    def decides(m, x, lengths):
        n = int((torch.rand_like(x) > 0.5).sum())
        return m.a(x[:, :n]).square().mean()

    with pytest.raises(TraceError, match="decides what to run by the values in a tensor"):
        autopart.plan(Net(decides), "dp2", example_args=(torch.randn(ROWS, LENGTH, SIZE), LENGTHS))


def test_an_input_that_is_written_is_not_changed():
    def writes(m, x, lengths):
        mine = lengths.clone()
        mine[:] = 4
        return m.a(x[:, : int(mine.max())]).square().mean()

    lengths = LENGTHS.clone()
    autopart.plan(Net(writes), "dp2", example_args=(torch.randn(ROWS, LENGTH, SIZE), lengths))
    assert torch.equal(lengths, LENGTHS)


def test_local_batches_are_refused():
    with pytest.raises(InputError, match="local_batch=True gives every data rank other samples"):
        example = torch.randn(ROWS, LENGTH, SIZE), LENGTHS
        autopart.parallelize(Net(trimmed), "dp2", example_args=example, local_batch=True)


def test_steps_of_batches_with_other_values():
    torch.manual_seed(0)
    x, _ = batch(1)
    batches = [{"x": x, "values": torch.arange(ROWS) % 3 + last} for last in (1, 4, 1)]
    result = autopart.verify(Net(trimmed).double(), "dp2", example_kwargs=batches[0], batches=batches, steps=3)
    assert result.ok, result

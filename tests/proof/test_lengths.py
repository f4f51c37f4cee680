"""`verify(lengths=...)` and `plan(lengths=...)`: programs of several sequence lengths, traced and derived."""

from unittest import mock

import pytest
import torch
import zoo
from torch import nn

import autopart
from autopart.errors import InputError, OptionError
from autopart.recipe import compiler
from autopart.recipe.sizes.example_lengths import ExampleLengths


class Scorer(nn.Module):
    """A model with a mask of shape [batch, length, length], and a loss if it gets labels."""

    def __init__(self, doubles_above=None):
        super().__init__()
        self.doubles_above, self.embedding = doubles_above, nn.Embedding(32, 8)
        self.up, self.head = nn.Linear(8, 32), nn.Linear(32, 32)

    def forward(self, input_ids, mask, labels=None):
        x = self.embedding(input_ids)
        x = x + mask.softmax(-1) @ x
        h = self.up(x).relu()
        if self.doubles_above is not None and input_ids.shape[1] > self.doubles_above:
            h = h * 2
        logits = self.head(h)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def example(rows=4, length=12, labels=True):
    torch.manual_seed(0)
    ids = torch.randint(32, (rows, length))
    batch = {"input_ids": ids, "mask": torch.randn(rows, length, length).double()}
    return {**batch, "labels": ids} if labels else batch


DIMS = {"input_ids": 1, "labels": 1}


def without_mask(model=None):
    return (model or Plain()).double(), {name: t for name, t in example().items() if name != "mask"}


class Plain(Scorer):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids, torch.zeros(*input_ids.shape, input_ids.shape[1]).double(), labels)


@pytest.mark.large
def test_each_length_is_verified_and_named():
    model, batch = without_mask(Plain(20))
    result = autopart.verify(model, "tp2", example_kwargs=batch, lengths=[32, 24, 28, 16])
    assert result.ok, result
    text = str(result)
    assert [(one.length, one.origin.partition(":")[0]) for one in result.lengths] == [
        (32, "traced"), (24, "traced"), (28, "derived"), (16, "traced"),
    ]  # fmt: skip
    assert "length 28: exact, largest error" in text and text.count("length ") == 4
    assert "length 28 loss" in result.errors


def test_a_wrong_derived_program_is_reported():
    model, batch = without_mask()
    wrong = mock.patch.object(compiler, "check_derived", side_effect=AssertionError("the derived program differs"))
    with wrong:
        result = autopart.verify(model, "dp2", example_kwargs=batch, lengths=(24, 16, 20))
    assert not result.ok and "length 20: WRONG" in str(result) and "the derived program differs" in str(result)


@pytest.mark.large
def test_a_target_and_a_call_without_labels_have_lengths_too():
    model, batch = without_mask()
    ids = batch["input_ids"]
    loss = lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())  # noqa: E731
    result = autopart.verify(
        model, "tp2", example_kwargs={"input_ids": ids}, loss_fn=loss, target=ids, lengths="24,16,20"
    )
    assert result.ok and [one.origin.partition(":")[0] for one in result.lengths] == ["traced", "derived", "derived"]
    assert autopart.verify(model.eval(), "tp2", example_kwargs={"input_ids": ids}, lengths=range(8, 13, 4)).ok


def test_dims_of_other_lengths():
    batch = example()
    with pytest.raises(InputError, match=r"dims 1 and 2 of 'mask' both have size 12"):
        ExampleLengths(batch)
    longer = ExampleLengths({**batch, "mask": batch["mask"][:, None]}).at({**batch}, 20)
    assert longer["input_ids"].shape == (4, 20) and longer["input_ids"][0, 12] == batch["input_ids"][0, 0]
    four = {**batch, "mask": batch["mask"][:, None]}
    assert ExampleLengths(four).at(four, 5)["mask"].shape == (4, 1, 5, 5)
    only = ExampleLengths(batch, DIMS).at(batch, 5)
    assert only["mask"].shape == (4, 12, 12) and only["labels"].shape == (4, 5)
    two = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"][:, :7]}
    with pytest.raises(InputError) as error:
        ExampleLengths(two)
    assert str(error.value) == (
        "lengths= is ambiguous: the example has several sequence lengths\n"
        "  why    its inputs are input_ids i64[4,12], decoder_input_ids i64[4,7]\n"
        "  try    sequence_dims={'input_ids': 1}, which names the dims that change"
    )
    assert ExampleLengths(two, {"input_ids": -1}).length == 12
    with pytest.raises(InputError, match="names no dims of this call"):
        ExampleLengths(two, {"ids": 1})


@pytest.mark.parametrize("lengths", [[], [0], "16,x", 12, [4.5]])
def test_lengths_that_are_none(lengths):
    model, batch = without_mask()
    with pytest.raises(OptionError, match="names no sequence lengths"):
        autopart.verify(model, "tp2", example_kwargs=batch, lengths=lengths)


def test_a_plan_of_several_lengths_is_that_of_the_longest():
    model, batch = without_mask()
    plan = autopart.plan(model, "tp2", example_kwargs=batch, lengths=range(8, 65, 8))
    assert plan.inputs["input_ids"]["shape"] == [4, 64]
    assert plan.cost.at(s=8).memory_bytes < plan.cost.at().memory_bytes


def test_llama_at_other_lengths():
    model, batch = zoo.llama(num_layers=1, seq=12)
    result = autopart.verify(model, "tp2", example_kwargs={**batch}, lengths=[24, 18, 20])
    assert result.ok and [one.origin.partition(":")[0] for one in result.lengths][-1] == "derived", result

"""The zoo's models are what they claim to be, and every helper that asserts can fail."""

import copy
import re

import pytest
import torch
from torch import nn
from zoo import (
    ZOO,
    assert_close_outputs,
    assert_same_grads,
    assert_steps_alike,
    bert,
    gpt2,
    llama,
    no_cache,
    phi3,
    reference,
    t5,
)

EVERY_MODEL = pytest.mark.parametrize("name", ZOO)


@EVERY_MODEL
def test_a_builder_gives_the_same_each_time(name):
    (model, batch), (again, batch_again) = ZOO[name](), ZOO[name]()
    assert_close_outputs(batch, batch_again, tol=0.0)
    assert_close_outputs(dict(model.state_dict()), dict(again.state_dict()), tol=0.0)
    assert len({value.data_ptr() for value in batch.values()}) == len(batch), "inputs must be distinct tensors"
    assert {value.shape[0] for value in batch.values()} == {8}


@EVERY_MODEL
def test_a_model_is_float64_without_dropout_or_noise(name, capfd, recwarn):
    model, batch = ZOO[name]()
    assert model.training
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    assert all(parameter.std() > 0.01 for parameter in model.parameters()), "no parameter is all zeros or all ones"
    outputs, loss, grads = reference(model, batch)
    again, loss_again, grads_again = reference(model, batch)
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    assert_close_outputs(again, outputs, tol=0.0)
    assert_close_outputs(loss_again, loss, tol=0.0)
    assert_same_grads(grads_again, grads, tol=0.0)
    assert all(grad is not None for grad in grads.values())
    out, err = capfd.readouterr()
    assert (out, err, [str(w.message) for w in recwarn]) == ("", "", [])


@EVERY_MODEL
def test_reference_leaves_the_model_alone(name):
    model, batch = ZOO[name]()
    before = copy.deepcopy(model.state_dict())
    reference(model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_close_outputs(dict(model.state_dict()), dict(before), tol=0.0)


def scaled_grads(model, batch, factor):
    """The gradients of the loss times a factor, divided by it again: equal up to rounding."""
    model = copy.deepcopy(model)
    outputs = model(**batch, **no_cache(model))
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    (loss * factor).backward()
    return {name: parameter.grad / factor for name, parameter in model.named_parameters()}


@EVERY_MODEL
def test_nothing_differentiable_is_computed_in_float32(name):
    model, batch = ZOO[name]()
    assert_same_grads(scaled_grads(model, batch, 3.7), reference(model, batch)[2], tol=1e-13)


@pytest.mark.parametrize("builder", [gpt2, llama, phi3, t5])
def test_without_exact_transformers_is_left_as_it_is(builder, capfd):
    model, batch = builder(exact=False)
    expected = reference(model, batch)[2]
    with pytest.raises(AssertionError, match="is off by"):
        assert_same_grads(scaled_grads(model, batch, 3.7), expected, tol=1e-13)
    assert_same_grads(reference(builder()[0], batch)[2], expected, tol=1e-6)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "phi3", "transformer_encoder"])
def test_labels_are_ignored_in_uneven_numbers(name):
    _, batch = ZOO[name]()
    labels = batch["targets" if name == "transformer_encoder" else "labels"]
    used = (labels != -100).sum(dim=1)
    assert used.min() > 0
    assert len(set(used.view(4, 2).sum(dim=1).tolist())) > 1, "the microbatches must differ"
    assert used[:4].sum() != used[4:].sum(), "the halves must differ"


def test_other_sizes():
    model, batch = gpt2(num_layers=3, hidden=32, heads=4, vocab=32, rows=4, seq=6)
    assert len(model.transformer.h) == 3
    outputs, _, _ = reference(model, batch)
    assert outputs.logits.shape == (4, 6, 32)
    assert llama(kv_heads=4)[0].model.layers[0].self_attn.k_proj.weight.shape == (32, 32)


def test_tied_embeddings():
    for model, left, right in [
        (gpt2()[0], "lm_head.weight", "transformer.wte.weight"),
        (t5()[0], "lm_head.weight", "shared.weight"),
        (bert()[0], "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ]:
        assert model.get_parameter(left) is model.get_parameter(right)


def test_outputs_hold_no_cache():
    for builder in (gpt2, llama, phi3, t5):
        assert "past_key_values" not in reference(*builder())[0]


# --- each helper fails on a planted difference ---------------------------------------------------------------------


def grads():
    return {"a": torch.tensor([[1.0, -4.0]]), "b": torch.tensor([0.5, 0.25, 0.0]), "unused": None}


PLANTED_GRADS = {
    "missing": (lambda g: g.pop("b"), r"missing \['b'\]"),
    "unexpected": (lambda g: g.update(c=torch.ones(1)), r"unexpected \['c'\]"),
    "none": (lambda g: g.update(b=None), "gradient of b is None"),
    "shape": (lambda g: g.update(b=torch.zeros(1)), r"gradient of b has shape \[1\], not \[3\]"),
    "broadcastable": (lambda g: g.update(a=g["a"].expand(2, 2)), r"shape \[2, 2\], not \[1, 2\]"),
    "value": (lambda g: g["b"].add_(torch.tensor([0.0, 1e-3, 0.0])), r"gradient of b is off by 0.001.*entry is 4 "),
    "small": (lambda g: g["b"].mul_(1 + 1e-6), "gradient of b is off by"),
    "sign": (lambda g: g["a"].neg_(), "gradient of a is off by 8"),
    "nan": (lambda g: g["b"].fill_(float("nan")), "gradient of b is off by nan"),
    "inf": (lambda g: g["b"].fill_(float("inf")), "gradient of b is off by inf"),
    "zero": (lambda g: [g["a"].zero_(), g["b"].zero_()], r"gradient of a .*2 of 3 parameters are off: \['a', 'b'\]"),
    "not none": (lambda g: g.update(unused=torch.ones(2)), "gradient of unused is off by 1"),
    "worst": (lambda g: [g["a"].add_(0.1), g["b"].add_(0.2)], "gradient of b is off by 0.2"),
}


@pytest.mark.parametrize("plant", PLANTED_GRADS)
def test_assert_same_grads_fails(plant):
    change, message = PLANTED_GRADS[plant]
    actual = grads()
    change(actual)
    with pytest.raises(AssertionError, match=message):
        assert_same_grads(actual, grads())


def test_assert_same_grads_fails_on_nothing_or_nan_expected():
    with pytest.raises(AssertionError, match="no gradient"):
        assert_same_grads({}, {"unused": None})
    nan = {"a": torch.tensor([float("nan")])}
    with pytest.raises(AssertionError, match="gradient of a is off by nan"):
        assert_same_grads(nan, nan)


def test_assert_same_grads_passes():
    assert_same_grads(grads(), grads())
    without = grads()
    del without["unused"]
    assert_same_grads(without, grads())
    assert_same_grads({**grads(), "unused": torch.zeros(3)}, grads())
    near = grads()
    near["b"] = near["b"].double() + 1e-11
    assert_same_grads(near, grads())


@EVERY_MODEL
def test_assert_same_grads_finds_one_wrong_parameter_in_a_model(name):
    _, _, expected = reference(*ZOO[name]())
    largest = max(grad.abs().max().item() for grad in expected.values())
    for wrong in list(expected)[:3] + list(expected)[-3:]:
        actual = {key: grad.clone() for key, grad in expected.items()}
        actual[wrong].view(-1)[-1] += 1e-8 * largest
        with pytest.raises(AssertionError, match=f"gradient of {re.escape(wrong)} is off"):
            assert_same_grads(actual, expected)


class Output(dict):
    """A model's output class."""


def output():
    return Output(loss=torch.tensor(2.0), states=(torch.arange(4.0), torch.ones(2, 2)), note="x", none=None)


PLANTED_OUTPUTS = {
    "type": (lambda o: dict(o), "output is a dict, not a Output"),
    "key": (lambda o: Output({k: v for k, v in o.items() if k != "note"}), "output has keys"),
    "tuple": (lambda o: Output(o, states=list(o["states"])), r"output\['states'\] is a list, not a tuple"),
    "length": (lambda o: Output(o, states=o["states"][:1]), r"output\['states'\] has 1 entries, not 2"),
    "shape": (lambda o: Output(o, loss=torch.tensor([2.0])), r"torch.float32\[1\], not torch.float32\[\]"),
    "dtype": (lambda o: Output(o, loss=o["loss"].double()), r"torch.float64\[\], not torch.float32\[\]"),
    "value": (lambda o: Output(o, loss=o["loss"] + 1e-3), r"output\['loss'\] is off by 0.001"),
    "nested": (
        lambda o: Output(o, states=(o["states"][0] + 1, o["states"][1])),
        r"output\['states'\]\[0\] is off by 1,",
    ),
    "nan": (lambda o: Output(o, loss=o["loss"] * float("nan")), r"output\['loss'\] is off by nan"),
    "other": (lambda o: Output(o, note="y"), r"output\['note'\] is 'y', not 'x'"),
    "none": (lambda o: Output(o, loss=None), r"output\['loss'\] is a NoneType, not a Tensor"),
}


@pytest.mark.parametrize("plant", PLANTED_OUTPUTS)
def test_assert_close_outputs_fails(plant):
    change, message = PLANTED_OUTPUTS[plant]
    with pytest.raises(AssertionError, match=message):
        assert_close_outputs(change(output()), output())


def test_assert_close_outputs_passes():
    assert_close_outputs(output(), output())
    near = Output(output(), loss=output()["loss"] * (1 + 1e-6))
    assert_close_outputs(near, output(), tol=1e-5)


def test_reference_runs_the_given_model():
    """A changed weight changes loss and gradients: nothing is cached."""
    model, batch = ZOO["skip_mlp"]()
    _, loss, expected = reference(model, batch)
    with torch.no_grad():
        model.head.bias += 1e-3
    _, other_loss, actual = reference(model, batch)
    assert loss != other_loss
    with pytest.raises(AssertionError, match="is off by"):
        assert_same_grads(actual, expected)


def test_reference_gives_none_for_an_unused_parameter():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return {"loss": (self.used * x).sum()}

    _, loss, found = reference(Unused(), {"x": torch.tensor([1.0, 2.0])})
    assert loss.item() == 3.0
    assert found["unused"] is None
    assert found["used"].tolist() == [1.0, 2.0]


# --- golden files --------------------------------------------------------------------------------------------------


def test_golden(golden, tmp_path):
    at = type(golden)
    with pytest.raises(pytest.fail.Exception, match=r"plan.txt does not exist; run with --golden-update"):
        at(tmp_path, update=False)("plan", "one\ntwo")
    at(tmp_path, update=True)("plan", "one\ntwo")
    assert (tmp_path / "plan.txt").read_text() == "one\ntwo\n"
    at(tmp_path, update=False)("plan", "one\ntwo\n")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)--golden-update\n.*\n one\n-two\n\+three"):
        at(tmp_path, update=False)("plan", "one\nthree")
    assert (tmp_path / "plan.txt").read_text() == "one\ntwo\n", "comparing never writes"
    at(tmp_path, update=True)("plan", "one\nthree")
    at(tmp_path, update=False)("plan", "one\nthree")


def test_seed_is_set_per_test():
    first = torch.rand(1).item()
    torch.manual_seed(0)
    assert torch.rand(1).item() == first
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_steps_that_differ_are_found(wrong):
    class Summed(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    class Stepped:
        """Stands for a partitioned model that is wrong."""

        def step(self, x):
            return model(x).detach() + (wrong == "loss")

        def full_grads(self):
            return {name: p.grad + (wrong == "gradient") for name, p in model.named_parameters()}

    model = Summed(2, 1)
    with pytest.raises(AssertionError):
        assert_steps_alike(Stepped(), model, torch.ones(1, 2))

"""Inputs that need gradients: a parallelized module inside a larger model that stays as it is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import autopart
from autopart.ir.facts import facts

ROWS, SEQ, SIZE, VOCAB = 4, 3, 8, 11


class Encoder(nn.Module):
    """Several outputs, of which a caller may use some; `shift` is a value without rows that may need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor | None = None) -> dict[str, Any]:
        h = self.down(F.gelu(self.up(2 * x))) * mask[..., None]
        h = h if shift is None else h + shift
        return {"hidden": self.norm(h + x), "mean": h.mean(1), "positive": x > 0, "input": x}


class Whole(nn.Module):
    """An embedding and a shift before the encoder, a head and a loss after it."""

    use = "once"

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.shift = nn.Embedding(VOCAB, SIZE), nn.Parameter(torch.randn(SIZE))
        self.encoder = Encoder()
        self.head = nn.Linear(SIZE, VOCAB)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        out = self.encoder(x, mask, self.shift)
        if self.use == "twice":  # a siamese network, and the encoder over its own output
            other = self.encoder(self.encoder(x.flip(1), mask, self.shift)["hidden"], mask, self.shift)
            return F.cosine_embedding_loss(out["mean"], other["mean"], torch.ones(ROWS)) + other["input"].pow(2).mean()
        if self.use == "one output":
            return self.head(out["mean"]).pow(2).mean()
        if self.use == "without gradient":
            with torch.no_grad():
                out = self.encoder(x, mask, self.shift)
            return self.head(out["hidden"]).logsumexp(-1).mean()
        return F.cross_entropy(self.head(out["hidden"]).flatten(0, 1), ids.flatten()) + out["input"].pow(2).mean()


USES = ("once", "twice", "one output", "without gradient")


def whole(use: str = "once") -> tuple[Whole, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Whole().double()
    model.use = use
    mask = torch.ones(ROWS, SEQ, dtype=torch.float64).tril(1)
    return model, {"ids": torch.randint(VOCAB, (ROWS, SEQ)), "mask": mask}


def encoder_call() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, SEQ, SIZE, generator=generator, requires_grad=True)
    shift = torch.randn(SIZE, generator=generator, requires_grad=True)
    return {"x": x, "mask": torch.ones(ROWS, SEQ).tril(1), "shift": shift}


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "dp2,tp2"])
def test_gradients_of_inputs_are_exact(mesh):
    found = autopart.verify(Encoder(), mesh, example_kwargs=encoder_call())
    assert found.ok and found.max_error < 1e-12, str(found)
    assert {"input x", "input shift"} <= set(found.errors) and "input mask" not in found.errors


def test_a_wrong_gradient_of_an_input_is_found():
    """The all-reduce that completes the gradient of `shift` over data parallelism is left out."""

    def leave_out(program, parameters):
        for stage in program.stages:
            for node in list(stage.graph.graph.nodes):
                if str(node.target) == "autopart.sum_grad.default" and facts(node)["origin"] == "shift":
                    node.replace_all_uses_with(node.args[0])
                    stage.graph.graph.erase_node(node)
                    stage.graph.recompile()

    found = autopart.verify(Encoder(), "dp2", example_kwargs=encoder_call(), tamper=leave_out)
    assert not found.ok and found.errors["input shift"] > 0.1 and found.errors["input x"] < 1e-12


# --- over processes ------------------------------------------------------------------------------------------------


def adopted(use, mesh):
    """Every gradient inside, before and after; two AdamW steps of the whole."""
    model, call = whole(use)
    plain = copy.deepcopy(model)
    model.encoder = autopart.parallelize(model.encoder, mesh)
    with pytest.raises(autopart.AutopartError, match="parameters\\(\\) is not available yet"):
        list(model.parameters())
    model(**call)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for _ in range(2):
        losses = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(m(**call))
            losses[-1].backward()
        zoo.assert_close_outputs(losses[0].detach(), losses[1].detach())
        same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()


def same_gradients(model, plain):
    found = {name: p.grad for name, p in model.named_parameters() if not name.startswith("encoder.")}
    found |= {f"encoder.{name}": grad for name, grad in model.encoder.full_grads().items()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    zoo.assert_same_grads({name: grad for name, grad in found.items() if grad is not None}, expected)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
@pytest.mark.parametrize("use", USES)
def test_a_module_inside_a_plain_model(use, mesh):
    dist.run_ranks(adopted, 2, use, mesh)


class Halves(nn.Module):
    """An encoder and a decoder that share their embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(VOCAB, SIZE), nn.Linear(SIZE, SIZE))
        self.decoder = nn.Sequential(nn.Embedding(VOCAB, SIZE), nn.Linear(SIZE, SIZE), nn.Tanh())
        self.decoder[0].weight = self.encoder[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        return (self.encoder(ids) * self.decoder(ids.flip(1))).pow(2).mean()


def halves(mesh, other_mesh):
    """Two parallelized modules stay tied where they are laid out alike."""
    torch.manual_seed(0)
    model, ids = Halves().double(), torch.arange(ROWS * SEQ).reshape(ROWS, SEQ) % VOCAB
    plain = copy.deepcopy(model)
    model.encoder = autopart.parallelize(model.encoder, mesh, example_args=(ids,))
    model.decoder = autopart.parallelize(model.decoder, other_mesh, example_args=(ids,))
    assert model.encoder.get_parameter("0.weight") is model.decoder.get_parameter("0.weight")
    for m in (model, plain):
        m(ids).backward()
    found = {f"encoder.{n}": g for n, g in model.encoder.full_grads().items()}
    found |= {f"decoder.{n}": g for n, g in model.decoder.full_grads().items() if n != "0.weight"}
    zoo.assert_same_grads(found, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_two_parts_that_share_a_parameter_stay_tied(mesh):
    dist.run_ranks(halves, 2, mesh, mesh)


def test_two_parts_that_cannot_share_a_parameter_are_refused():
    with pytest.raises(dist.RankError, match=r"'0.weight' of Sequential is shared with a Sequential that was parallel"):
        dist.run_ranks(halves, 2, "tp2", "dp2")


def test_the_same_model_parallelized_twice_is_two_models():
    model, call = whole()
    first, second = (autopart.parallelize(model, "tp1", example_kwargs=call) for _ in range(2))
    part = autopart.parallelize(model.encoder, "tp1", example_kwargs=encoder_call())
    weights = [first.get_parameter("encoder.up.weight"), second.get_parameter("encoder.up.weight")]
    weights += [part.get_parameter("up.weight"), model.encoder.up.weight]
    assert len({id(weight) for weight in weights}) == 4


# --- what is refused, and what is warned of ------------------------------------------------------------------------


def through_a_pipeline():
    call = encoder_call()
    pm = autopart.parallelize(Encoder(), "pp2", example_kwargs={n: v.detach() for n, v in call.items()})
    with torch.no_grad():
        pm(**call)
    try:
        pm(**call)
    except autopart.AutopartError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_no_gradient_comes_through_a_pipeline():
    assert set(dist.run_ranks(through_a_pipeline, 2)) == {
        "InputError: the input x needs a gradient\n  why    no gradient is returned through a pipeline\n"
        "  try    x.detach(); or microbatches=1 and a mesh without pp"
    }


def test_changes_of_the_original_are_warned_of_once():
    model, call = whole()
    pm = autopart.parallelize(model, "tp1", example_kwargs=call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm(**call)
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.warns(UserWarning, match="the model's own 'head.weight' was changed after autopart had copied it"):
        pm(**call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.step(**call)

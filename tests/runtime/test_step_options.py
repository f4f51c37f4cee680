"""What `step` is asked for beside gradients, on every kind of mesh, against one process, in double precision."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import zoo
from step_models import IGNORED, Small, batch, grads_of, run, same_grads, small
from torch import nn

import autopart

MESHES = ("tp2", "dp2", "pp2")


# --- target --------------------------------------------------------------------------------------------------------


class Guided(nn.Module):
    """A model with an input that has the name of the loss's input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x, target):
        return self.layer(x) * target


def test_a_target_of_the_model_and_one_of_the_loss():
    model, x, target = Guided(), torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    call = {"loss_fn": F.mse_loss, "target": torch.randn(6, 4, dtype=torch.float64)}
    assert autopart.verify(model, "dp2", example_args=(x, target), **call).ok
    pm = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x, target))
    loss = F.mse_loss(model(x, target), call["target"])
    loss.backward()
    assert torch.allclose(pm.step(x, target, **call), loss.detach(), atol=1e-12)
    same_grads(pm, grads_of(model))


# --- loss_scale ----------------------------------------------------------------------------------------------------


def scaled_step(mesh, **options):
    model, data = small(), batch()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=data, **options)
    loss = model(**data)["loss"]
    (loss * 1024.0).backward()
    expected = grads_of(model)
    for scale in (1024.0, torch.tensor(1024.0), torch.tensor([1024], dtype=torch.int64)):
        pm.zero_grad()
        zoo.assert_close_outputs(pm.step(**data, loss_scale=scale), loss.detach(), where="loss")
        same_grads(pm, expected)
    zoo.assert_close_outputs(pm.step(**data), loss.detach())  # the scale is not kept, nor is it of what was there
    same_grads(pm, {name: grad * (1 + 1 / 1024) for name, grad in expected.items()})
    pm.step(**data, loss_scale=-1.0)
    same_grads(pm, expected)


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp2", {}),
        ("dp2", {"microbatches": 2}),
        ("dp2,tp2", {}),
        ("pp2", {"microbatches": 4}),
        ("pp2", {"schedule": "zbv", "microbatches": 4, "recompute": "full"}),
        ("pp2", {"schedule": "interleaved_zero_bubble", "microbatches": 4}),
        ("dp2", {"zero": 3, "recompute": "full"}),
    ],
)
def test_loss_scale(mesh, options):
    run(scaled_step, mesh, **options)


def other_scales(mesh):
    model, data = small(), batch()
    pm = autopart.parallelize(model, mesh, example_kwargs=data)
    rank = torch.distributed.get_rank()
    with pytest.raises(autopart.AutopartError) as error:
        pm.step(**data, loss_scale=2.0 ** (1 + rank))
    return str(error.value)


def test_ranks_with_other_scales_are_refused():
    texts = run(other_scales, "tp2")
    assert texts[0] == texts[1] and "loss_scale=2.0" in texts[0] and "loss_scale=4.0" in texts[0]


class NamedAlike(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x, loss_scale=1.0):
        return (self.up(x) * loss_scale).sum()


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        ("1024", "loss_scale='1024' is not a number"),
        (True, "loss_scale=True is not a number"),
        (torch.ones(2), "loss_scale=a tensor of shape [2] is not a number"),
        (float("inf"), "loss_scale=inf is not finite"),
        (torch.tensor(float("nan")), "loss_scale=nan is not finite"),
    ],
)
def test_scales_that_are_none(scale, text):
    pm = autopart.parallelize(small(), "tp1", example_kwargs=batch())
    with pytest.raises(autopart.AutopartError, match=re.escape(text)):
        pm.step(**batch(), loss_scale=scale)


def test_an_input_of_the_same_name():
    x = torch.randn(2, 4)
    pm = autopart.parallelize(NamedAlike(), "tp1", example_kwargs={"x": x})
    with pytest.raises(autopart.AutopartError, match="has an input of that name"):
        pm.step(x=x, loss_scale=2.0)
    pm.step(x, 2.0)


# --- outputs=True --------------------------------------------------------------------------------------------------


def same_outputs(found, expected):
    assert type(found) is type(expected)
    zoo.assert_close_outputs(found, expected)
    leaves = found.values() if isinstance(found, dict) else [found]
    assert not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def step_with_outputs(mesh, norm=False, **options):
    """One forward: batch-norm statistics are updated once, and a mask of dropout is drawn once."""
    model, data = small(norm=norm), batch()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=data, **options)
    for times in (1, 2):
        expected = model(**data)
        expected["loss"].backward()
        loss, outputs = pm.step(**data, outputs=True)
        zoo.assert_close_outputs(loss, expected["loss"].detach())
        same_outputs(outputs, expected)
        same_grads(pm, grads_of(model))
        if norm:
            assert pm.full_state_dict()["norm.num_batches_tracked"] == times
        state = model.state_dict()
        found = pm.full_state_dict()
        assert all(torch.allclose(found[name], state[name], atol=1e-10, rtol=0) for name in state)
    zoo.assert_close_outputs(pm.step(**data), loss)


@pytest.mark.few
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp2", {"microbatches": 2}),
        ("dp2", {"norm": True}),
        ("dp2", {"microbatches": 2, "zero": 3, "recompute": "full"}),
        ("dp2,tp2", {"microbatches": 2}),
        ("pp2", {"microbatches": 4}),
        ("dp2,pp2", {"microbatches": 2}),
        ("pp2", {"norm": True, "microbatches": 1}),
        ("pp2", {"schedule": "zbv", "microbatches": 4}),
    ],
)
def test_outputs_of_a_step(mesh, options):
    run(step_with_outputs, mesh, **options)


def mean_loss(outputs, target):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def outputs_beside_loss_fn(mesh):
    model, data = small(), batch()
    tokens, target = data["tokens"], data["labels"]
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs={"tokens": tokens})
    expected = model(tokens)
    mean_loss(expected, target).backward()
    loss, outputs = pm.step(tokens=tokens, loss_fn=mean_loss, target=target, outputs=True)
    zoo.assert_close_outputs(loss, mean_loss(expected, target).detach())
    same_outputs(outputs, expected)
    same_grads(pm, grads_of(model))


def outputs_of_a_transformer(mesh):
    model, data = zoo.gpt2()
    expected = model(**data, **zoo.no_cache(model))
    expected.loss.backward()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=data)
    loss, outputs = pm.step(**data, outputs=True)
    zoo.assert_close_outputs(loss, expected.loss.detach())
    same_outputs(outputs, expected)
    same_grads(pm, grads_of(model))


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
@pytest.mark.parametrize("check", [outputs_beside_loss_fn, outputs_of_a_transformer])
def test_outputs_beside(check, mesh):
    run(check, mesh)


class Noisy(Small):
    """Its mask of dropout can be read off its outputs."""

    def forward(self, tokens, labels):
        dropped = F.dropout(self.embedding(tokens), 0.5)
        logits = self.head(dropped)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits, dropped


def mask_of_the_step(mesh):
    torch.manual_seed(0)
    model, data = Noisy().double(), batch()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=data)
    loss, outputs = pm.step(**data, outputs=True)
    dropped = outputs[2]
    assert (dropped == 0).double().mean() > 0.2
    mask = torch.where(dropped == 0, 0.0, 2.0)
    logits = model.head(model.embedding(data["tokens"]) * mask)
    expected = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), ignore_index=IGNORED)
    expected.backward()
    zoo.assert_close_outputs(list(outputs), [expected, logits, dropped])
    zoo.assert_close_outputs(loss, expected.detach())
    same_grads(pm, grads_of(model))


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2"])
def test_outputs_are_of_the_forward_that_is_differentiated(mesh):
    run(mask_of_the_step, mesh)


def test_outputs_is_yes_or_no():
    pm = autopart.parallelize(small(), "tp1", example_kwargs=batch())
    with pytest.raises(autopart.AutopartError, match="neither True nor False"):
        pm.step(**batch(), outputs="logits")


# --- num_tokens= ---------------------------------------------------------------------------------------------------


def unequal_batches():
    """Batches of which another number of labels counts, in one of them none."""
    batches = [batch(seed=seed, share=share) for seed, share in ((1, 0.9), (2, 0.2), (3, 0.0), (4, 0.6))]
    counts = [int((data["labels"] != IGNORED).sum()) for data in batches]
    assert len(set(counts)) == len(counts) and counts[2] == 0
    return batches, sum(counts)


def all_reduced_loss(model, data):
    logits = model(data["tokens"])["logits"]
    return F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def accumulated(mesh, loss_fn=None, **options):
    """The gradients of several steps are those of the mean over all labels, and the losses are its parts."""
    model = small()
    batches, total = unequal_batches()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0], **options)
    for number, scale in ((total, 1.0), (torch.tensor(total), 8.0)):
        model.zero_grad()
        pm.zero_grad()
        for data in batches:
            expected = all_reduced_loss(model, data) / total
            (scale * expected).backward()
            if loss_fn is None:
                loss, outputs = pm.step(**data, num_tokens=number, loss_scale=scale, outputs=True)
                zoo.assert_close_outputs(outputs["loss"], loss)
            else:
                call = {"loss_fn": loss_fn, "target": data["labels"]}
                loss = pm.step(tokens=data["tokens"], **call, num_tokens=number, loss_scale=scale)
            zoo.assert_close_outputs(loss, expected.detach())
        same_grads(pm, grads_of(model))
    if loss_fn is None:
        plain = model(**batches[0])["loss"].detach()
        zoo.assert_close_outputs(pm.step(**batches[0]), plain)  # the number is not kept


def masked_mean(outputs, target):
    """A mean over labels as many write it."""
    counts = (target != IGNORED).to(outputs["logits"].dtype)
    each = F.cross_entropy(outputs["logits"].flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
    return (each * counts.flatten()).sum() / counts.sum().clamp(min=1)


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp2", {"microbatches": 2}),
        ("dp2", {"microbatches": 2, "recompute": "full"}),
        ("dp2,tp2", {"loss_fn": mean_loss}),
        ("pp2", {"schedule": "zbv", "microbatches": 4}),
        ("pp2,tp2", {"loss_fn": masked_mean}),
        ("dp2,pp2", {"microbatches": 2}),
    ],
)
def test_the_mean_over_all_labels_of_several_steps(mesh, options):
    run(accumulated, mesh, **options)


def causal_loss(logits, labels, num_items_in_batch=None, **_):
    """As in transformers, without its detour over float32."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), shifted, ignore_index=IGNORED, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def transformers_have_their_own_way(mesh):
    model, data = zoo.gpt2()
    model.loss_function = causal_loss
    total = 100
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=data)
    for number in (total, torch.tensor(total)):
        model.zero_grad()
        pm.zero_grad()
        expected = model(**data, **zoo.no_cache(model), num_items_in_batch=number).loss
        expected.backward()
        zoo.assert_close_outputs(pm.step(**data, num_items_in_batch=number), expected.detach())
        same_grads(pm, grads_of(model))
        zoo.assert_close_outputs(pm.step(**data, num_tokens=number), expected.detach())
        same_grads(pm, {name: 2 * grad for name, grad in grads_of(model).items()})
    with pytest.raises(autopart.AutopartError, match="are both given"):
        pm.step(**data, num_items_in_batch=total, num_tokens=total)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_num_items_in_batch_of_transformers(mesh):
    run(transformers_have_their_own_way, mesh)


def too_few_tokens(mesh):
    data = batch()
    pm = autopart.parallelize(small(), mesh, example_kwargs=data)
    with pytest.raises(autopart.AutopartError) as error:
        pm.step(**data, num_tokens=3)
    assert all(p.grad is None for p in pm.parameters())
    return str(error.value)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["pp2", "dp2"])
def test_fewer_tokens_than_the_batch_has(mesh):
    texts = run(too_few_tokens, mesh)
    count = int((batch()["labels"] != IGNORED).sum())
    assert texts[0] == texts[1] and f"num_tokens=3 is fewer than the {count} labels" in texts[0]


def loss_of_two_terms(outputs, target):
    return mean_loss(outputs, target) + 0.1 * outputs["logits"].square().mean()


def mean_of_squares(outputs, target):
    return outputs["logits"].square().mean()


def rooted_mean(outputs, target):
    return mean_loss(outputs, target).sqrt()


def two_counts(outputs, target):
    return mean_loss(outputs, target) / (target != IGNORED).sum()


@pytest.mark.few
@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (loss_of_two_terms, "the loss has several terms"),
        (mean_of_squares, "not a sum over labels"),
        (rooted_mean, "not a sum over labels"),
        (two_counts, "not a sum over labels"),
    ],
)
def test_losses_without_a_number_of_labels(loss_fn, text):
    data = batch()
    pm = autopart.parallelize(small(), "tp1", example_kwargs={"tokens": data["tokens"]})
    with pytest.raises(autopart.AutopartError, match=text):
        pm.step(tokens=data["tokens"], loss_fn=loss_fn, target=data["labels"], num_tokens=100)


@pytest.mark.parametrize("number", [0, -3, 20.5, "12", True, float("inf")])
def test_numbers_of_tokens_that_are_none(number):
    pm = autopart.parallelize(small(), "tp1", example_kwargs=batch())
    with pytest.raises(autopart.AutopartError, match="num_tokens="):
        pm.step(**batch(), num_tokens=number)

"""`verify_loop`: right loops are exact, planted faults are found and named by line, and nothing hangs."""

import os
import re
import time

import pytest
import torch
import torch.nn.functional as F
from public_loops import CASES, MESHES
from torch import nn

import autopart
from autopart.errors import AutopartError, InputError, UsageError

pytestmark = pytest.mark.whole

BACKWARD = "UsageError: backward() does not go through a pipeline"
INPUT = "InputError: the input input needs a gradient"
EITHER = "exact, or an error"
EXPECTED = {
    "nanogpt": {"tp2": "exact", "pp2": BACKWARD, "dp2": "exact", "dp2 zero": "exact"},
    "gan_r1": {"tp2": EITHER, "pp2": INPUT, "dp2": EITHER, "dp2 zero": EITHER},
    "pinn": {"tp2": EITHER, "pp2": INPUT, "dp2": EITHER, "dp2 zero": EITHER},
    "open_clip": {"tp2": "exact", "pp2": BACKWARD, "dp2": "exact", "dp2 zero": "exact"},
    "sam": {"tp2": EITHER, "pp2": EITHER, "dp2": "exact", "dp2 zero": EITHER},
    "prodigy": {"tp2": EITHER, "pp2": EITHER, "dp2": "exact", "dp2 zero": EITHER},
    "mup": {"tp2": EITHER, "pp2": "exact", "dp2": "exact", "dp2 zero": EITHER},
    "ngpt": {"tp2": EITHER, "pp2": "exact", "dp2": "exact", "dp2 zero": EITHER},
    "maml": dict.fromkeys(MESHES, EITHER),
    "trainer": dict.fromkeys(MESHES, EITHER),
}
"""What each script does on each mesh. Never allowed: another result without a word."""

ONE_MESH = {"nanogpt": "dp2 zero", "gan_r1": "dp2", "pinn": "tp2", "open_clip": "tp2", "sam": "dp2", "prodigy": "tp2",
            "mup": "tp2", "ngpt": "tp2", "maml": "dp2", "trainer": "pp2"}  # fmt: skip


def outcome(name, mesh):
    fn, model, batches, example = CASES[name]()
    try:
        result = autopart.verify_loop(fn, mesh.split()[0], model, batches, time_limit_s=120, **example, **MESHES[mesh])
    except AutopartError as error:
        return f"{type(error).__name__}: {error}"
    return "exact" if result.ok else str(result)


def check(name, mesh):
    expected, found = EXPECTED[name][mesh], outcome(name, mesh)
    if expected == EITHER:
        assert found == "exact" or re.match(r"\w+(Error|Attribute): ", found), found
    else:
        assert found.startswith(expected), found


@pytest.mark.large
@pytest.mark.parametrize("name", ONE_MESH)
def test_a_public_script_on_one_mesh(name):
    check(name, ONE_MESH[name])


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_public_script_is_exact_or_refused(name, mesh):
    check(name, mesh)


def data(count=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(count)]


def verified(fn, mesh="tp2", **options):
    model, batches = data()
    return autopart.verify_loop(fn, mesh, model, batches, example_args=(batches[0][0],), time_limit_s=60, **options)


def scales_by_the_shard(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        model.step(x, loss_fn=F.cross_entropy, target=y)
        for p in model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            p.grad.mul_(local.numel() / 100)
        optimizer.step()  # the gradients differ here
        optimizer.zero_grad()


def doubles_the_gradients_of_two_ranks(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(int(os.environ.get("WORLD_SIZE", 1)))  # as a loop does that takes sums for means
        optimizer.step()
        optimizer.zero_grad()


def logs_the_loss_of_a_rank(model, batches):
    for x, y in batches:
        loss = model.step(x, loss_fn=F.cross_entropy, target=y)
    return {"loss": loss * (1 + int(os.environ.get("RANK", 0)))}


def changes_weights_by_hand(model, batches):
    for x, y in batches:
        model.step(x, loss_fn=F.cross_entropy, target=y)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad * int(os.environ.get("WORLD_SIZE", 1)))


PLANTED = {
    scales_by_the_shard: ("gradient", 1, "optimizer.step()  # the gradients differ here"),
    doubles_the_gradients_of_two_ranks: ("gradient", 1, "optimizer.step()"),
    logs_the_loss_of_a_rank: ("returned", 1, "the end of the function"),
    changes_weights_by_hand: ("weight", 1, "the end of the function"),
}


@pytest.mark.few
@pytest.mark.parametrize("fn", PLANTED, ids=lambda fn: fn.__name__)
def test_a_planted_fault_is_named(fn):
    kind, step, line = PLANTED[fn]
    result = verified(fn)
    assert not result.ok and result.max_error > 1e-3
    first = result.first_mismatch
    assert (first.kind, first.step) == (kind, step), result
    assert first.where.endswith(line), result
    assert f"WRONG on tp2: largest error {result.max_error:.3g} over" in str(result)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_a_right_loop_is_exact_and_every_method_serves_one_process(mesh):
    seen = []  # a closure: functions need no name

    def train(model, batches):
        seen.append(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.attach(optimizer)
        for x, y in batches:
            loss, outputs = model.step(x, loss_fn=F.cross_entropy, target=y, outputs=True, loss_scale=2.0)
            norm = model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        with model.no_sync():
            model.step(x, loss_fn=F.cross_entropy, target=y, num_tokens=16)
        model.step(x, loss_fn=F.cross_entropy, target=y, num_tokens=16)
        moments = model.full_optimizer_state_dict(optimizer)["state"]
        return loss, outputs, norm, model.grad_norm(), model.full_grads(), model.full_state_dict(), moments

    result = verified(train, mesh)
    assert result.ok and result.max_error < 1e-10, result
    assert {"loss", "gradient 0.weight", "weight 2.bias", "returned 0"} <= set(result.errors)
    assert result.steps == 2 and not seen


@pytest.mark.large
def test_another_order_of_calls_is_named():
    def skips(model, batches):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches:
            model.step(x, loss_fn=F.cross_entropy, target=y)
            if "RANK" not in os.environ:
                optimizer.step()

    first = verified(skips).first_mismatch
    assert first.kind == "order" and "this rank is at a loss, and one process is at a gradient" in first.detail


@pytest.mark.large
def test_an_error_of_autopart_is_raised_once_with_rank_and_line():
    def applies(model, batches):
        if "RANK" in os.environ:
            model.apply(print)

    with pytest.raises(InputError, match="the training function trains nothing"):
        verified(applies)

    def trains(model, batches):
        model.step(batches[0][0], loss_fn=F.cross_entropy, target=batches[0][1])
        model.share_memory()

    with pytest.raises(UsageError, match="has no share_memory") as caught:
        verified(trains)
    assert re.fullmatch(r"on rank \d, at line \d+ of .*, in trains: model.share_memory\(\)", caught.value.__notes__[0])


@pytest.mark.large
def test_what_one_rank_alone_raises_is_named_and_nothing_waits():
    def raises(model, batches):
        model.step(batches[0][0], loss_fn=F.cross_entropy, target=batches[0][1])
        if os.environ.get("RANK") == "1":
            raise KeyError("lost")
        model.step(batches[0][0], loss_fn=F.cross_entropy, target=batches[0][1])

    began = time.monotonic()
    first = verified(raises).first_mismatch
    assert (first.kind, first.rank) == ("error", 1) and "KeyError: 'lost'" in first.detail
    assert 'raise KeyError("lost")' in first.where
    assert time.monotonic() - began < 60


def test_what_cannot_be_run_is_refused():
    model, batches = data()
    with pytest.raises(InputError, match="cannot be called with the first batch"):
        autopart.verify_loop(logs_the_loss_of_a_rank, "tp2", model, batches)
    with pytest.raises(InputError, match="fails with the unpartitioned model\n  why    ZeroDivisionError"):
        verified(lambda model, batches: 1 / 0)
    with pytest.raises(AutopartError, match="precision='bf16'\n  why    the proof is in float64"):
        verified(scales_by_the_shard, precision="bf16")

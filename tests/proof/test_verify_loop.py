"""`verify(steps=...)` proves the training loop: norm, clipping, optimizer and scaler of all ranks against one device.

Planted faults are what goes wrong in practice: replicas counted once a rank in a norm, clipping by a rank's own norm, a
rank that skips a step, a tied weight counted twice, a scaler that keeps an infinity to itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from traced import run_of

import autopart
from autopart.errors import InputError, OptionError
from autopart.options import Options
from autopart.proof.steps import lockstep_steps
from autopart.proof.steps.training_options import read_training
from autopart.proof.verify import Verification, VerificationRun
from autopart.runtime.training import gradient_norms

TOLERANCE = 1e-10


def trained(run: VerificationRun, mesh: str, options: dict[str, Any] | None = None, **asked: Any) -> Verification:
    """What `autopart.verify(steps=3, max_norm=0.1)` finds of a model that is traced already."""
    wanted = {"steps": 3, "optimizer": None, "max_norm": 0.1, "scaler": None, "batches": None, **asked}
    training = read_training(run.model, run.arguments, **wanted)
    return run.check(run.arrange(mesh, None, Options(rng="exact", **(options or {}))), training=training)


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def adam_in_groups(named):
    """As most training scripts have it: weights decay, biases and norms do not."""
    decayed = [p for name, p in named if p.dim() > 1]
    rest = [p for name, p in named if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


class Normed(nn.Module):
    """Batch norms, whose statistics carry over from step to step."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h))) + h
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


class Dropping(nn.Module):
    """Dropout in training mode, and an embedding that is tied to the head."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        h = h + F.dropout(self.down(F.gelu(self.up(h))), 0.3, self.training)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def normed():
    torch.manual_seed(0)
    return Normed().double(), {"x": torch.randn(8, 3, 6, 6, dtype=torch.float64), "y": torch.randint(4, (8,))}


def dropping():
    torch.manual_seed(0)
    return Dropping().double(), {"ids": torch.randint(16, (8, 6))}


MATRIX = [
    (zoo.gpt2, "tp2", {}, {}),
    (zoo.gpt2, "pp2", {}, {"optimizer": adam_in_groups}),
    (zoo.gpt2, "dp2,tp2", {"zero": 3}, {"scaler": True}),
    (zoo.llama, "dp2,pp2,tp2", {"microbatches": 2}, {"optimizer": adam_in_groups, "scaler": True}),
    (zoo.llama, "tp2", {"recompute": "full", "sequence_parallel": True}, {}),
    (zoo.bert, "dp2", {"zero": 3}, {"optimizer": sgd}),
    (zoo.bert, "pp2", {"microbatches": 4}, {}),
    (zoo.skip_mlp, "pp2", {"schedule": "interleaved_zero_bubble"}, {"optimizer": sgd}),
    (zoo.skip_mlp, "pp2,tp2", {"schedule": "zbv"}, {"scaler": {"init_scale": 8.0, "growth_interval": 1}}),
    (normed, "dp2", {"microbatches": 1}, {"optimizer": sgd}),
    (normed, "pp2", {"microbatches": 1}, {}),
    (dropping, "dp2,tp2", {}, {}),
    (dropping, "pp2", {"microbatches": 2}, {"scaler": True}),
]


@pytest.mark.few
@pytest.mark.parametrize(("build", "mesh", "options", "asked"), MATRIX)
def test_training_steps_equal_one_device(build, mesh, options, asked):
    found = trained(run_of(build), mesh, options, **asked)
    assert found.ok and found.max_error < TOLERANCE, str(found)
    assert [report.step for report in found.steps] == [1, 2, 3]
    assert len({report.loss for report in found.steps}) == 3, "nothing was trained"
    kinds = {name.split()[2] for name in found.errors if name.startswith("step 3 ")}
    buffers = {"buffer"} if build is normed else set()
    assert kinds == {"loss", "scale", "norm", "gradient", "weight", "state"} | buffers
    assert "step 3: loss" in str(found) and "(clipped to 0.1)" in str(found)


@pytest.mark.large
def test_the_model_is_as_before():
    run = run_of(normed)
    before = {name: value.clone() for name, value in run.base.state_dict().items()}
    assert trained(run, "dp2", {"microbatches": 1}).ok
    assert all(torch.equal(value, before[name]) for name, value in run.base.state_dict().items())
    assert all(p.grad is None for p in run.base.parameters())


def test_without_a_limit_the_norm_is_compared_too():
    found = trained(run_of(zoo.gpt2), "tp2", max_norm=None, steps=1)
    assert found.ok and found.errors["step 1 norm"] < TOLERANCE and "clipped" not in str(found)


@pytest.mark.large
def test_every_step_has_its_batch():
    model, batch = zoo.llama()
    batches = [batch, *(zoo.causal_batch(8, 12, 64) for _ in "12")]
    found = autopart.verify(model, "dp2,tp2", example_kwargs=batch, batches=batches, max_norm=1.0)
    assert found.ok and len(found.steps) == 3, str(found)
    again = autopart.verify(model, "tp2", example_kwargs=batch, batches=batches[:1], steps=2)
    assert again.ok and again.steps[0].loss == pytest.approx(found.steps[0].loss)
    assert again.steps[1].loss != pytest.approx(found.steps[1].loss)


def test_a_loss_function_has_the_target_of_its_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    inputs = [torch.randn(8, 8, dtype=torch.float64) for _ in range(2)]
    targets = [torch.randint(4, (8,)) for _ in range(2)]
    asked = {"loss_fn": F.cross_entropy, "target": targets[0], "steps": 2, "optimizer": sgd}
    same = autopart.verify(model, "dp2", example_args=(inputs[0],), batches=[{"input": x} for x in inputs], **asked)
    batches = [{"input": x, "target": y} for x, y in zip(inputs, targets, strict=True)]
    own = autopart.verify(model, "dp2,tp2", example_args=(inputs[0],), batches=batches, **asked)
    assert same.ok and own.ok, f"{same}{own}"
    assert same.steps[0].loss == pytest.approx(own.steps[0].loss)
    assert same.steps[1].loss != pytest.approx(own.steps[1].loss)
    with pytest.raises(InputError, match="1 of 2 batches have the entry 'target'"):
        autopart.verify(model, "dp2", example_args=(inputs[0],), batches=[batches[0], {"input": inputs[1]}], **asked)


# --- Planted faults


def test_a_norm_that_counts_replicas_once_a_rank(monkeypatch):
    monkeypatch.setattr(gradient_norms, "is_owner_at", lambda *where: True)
    first = trained(run_of(zoo.gpt2), "tp2").first_mismatch
    assert (first.step, first.kind, first.name) == (1, "norm", "") and first.error > 1e-3, str(first)
    assert "step 1: norm differs by" in str(first) and "not 3.5166" in str(first)


def test_a_tied_weight_that_counts_twice(monkeypatch):
    is_owner_at = gradient_norms.is_owner_at
    monkeypatch.setattr(
        gradient_norms,
        "is_owner_at",
        lambda stored, mesh, at, owners: is_owner_at(stored, mesh, at, (at.get("pp", 0),)),
    )
    first = trained(run_of(zoo.gpt2), "pp2").first_mismatch
    assert (first.step, first.kind) == (1, "norm"), str(first)
    assert trained(run_of(zoo.llama), "pp2").ok  # nothing is tied there


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_clipping_by_a_rank_s_own_norm(mesh, monkeypatch):
    whole = lockstep_steps.AllRanks._norms

    def own_norms(ranks):
        """The right norm is reported, and another one is clipped by."""
        clip, norms = ranks._clip, whole(ranks)

        def by_own(norms):
            grads = {r: [p.grad for p in local.values() if p.grad is not None] for r, local in ranks.shards.items()}
            clip({rank: torch.nn.utils.get_total_norm(local) for rank, local in grads.items()})

        ranks._clip = by_own
        return norms

    monkeypatch.setattr(lockstep_steps.AllRanks, "_norms", own_norms)
    first = trained(run_of(zoo.gpt2), mesh).first_mismatch
    assert (first.step, first.kind, first.rank) == (1, "gradient", 0), str(first)
    assert first.name in dict(run_of(zoo.gpt2).base.named_parameters()) and "entry [" in str(first)


def test_one_rank_that_skips_a_step(monkeypatch):
    calls = []

    def skips(found):
        calls.append(found)
        return {**found, 1: len(calls) == 2}

    monkeypatch.setattr(lockstep_steps, "any_infinity", skips)
    first = trained(run_of(zoo.skip_mlp), "dp2", scaler=True).first_mismatch
    assert (first.step, first.kind, first.rank) == (2, "scale", 1), str(first)
    assert "the step is skipped, and on one device it is taken" in str(first)


class Rooted(nn.Module):
    """The gradient of a feature's weights is not a number where `scale` has a zero; the loss is finite."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.up(x).square() * scale).sqrt().mean()


def rooted_batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    x, ones = torch.randn(4, 4, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    zero = ones.clone()
    zero[7] = 0.0  # of the last rank's features
    return [{"x": x, "scale": scale} for scale in (ones, zero, ones)]


def rooted(**asked: Any) -> Verification:
    torch.manual_seed(0)
    batches = rooted_batches()
    pins = {"up.weight": {"tp": "S(0)"}}
    return autopart.verify(
        Rooted().double(), "tp2", example_kwargs=batches[0], batches=batches, pins=pins,
        optimizer=sgd, max_norm=1.0, **asked,
    )  # fmt: skip


def test_an_infinity_skips_the_step_on_all_ranks():
    found = rooted(scaler={"init_scale": 4.0})
    assert found.ok, str(found)
    assert [report.skipped for report in found.steps] == [False, True, False]
    assert [report.scale for report in found.steps] == [4.0, 4.0, 2.0]
    assert "scale 4, skipped" in str(found)


def test_a_scaler_that_keeps_an_infinity_to_itself(monkeypatch):
    monkeypatch.setattr(lockstep_steps, "any_infinity", dict)
    first = rooted(scaler=True).first_mismatch
    assert (first.step, first.kind, first.rank) == (2, "scale", 0), str(first)
    assert "the step is taken, and on one device it is skipped" in str(first)


def test_an_optimizer_that_is_stepped_twice_on_one_rank(monkeypatch):
    update = lockstep_steps.AllRanks.update

    def twice(ranks):
        assert list(ranks.updates[1].step()) == []  # nothing is sent
        update(ranks)

    monkeypatch.setattr(lockstep_steps.AllRanks, "update", twice)
    first = trained(run_of(zoo.skip_mlp), "dp2").first_mismatch
    assert (first.step, first.kind, first.rank) == (1, "weight", 1), str(first)
    assert "the gradients are equal; AdamW made a different update on this rank" in str(first)


# --- Optimizers that are not elementwise, and gradients of nothing


@pytest.mark.large
@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_an_optimizer_that_needs_the_whole_of_a_weight(kind):
    def optimizer(named):
        return getattr(torch.optim, kind)([p for _, p in named if p.dim() == 2], lr=1e-2)

    for mesh in ("tp2", "pp2"):
        found = trained(run_of(zoo.skip_mlp), mesh, optimizer=optimizer)
        assert found.ok, str(found)


@pytest.mark.large
def test_an_update_from_shards_alone_is_found(monkeypatch):
    monkeypatch.setattr(lockstep_steps.SingleDeviceTraining, "names_of_full_tensors", lambda _: set())
    first = trained(run_of(zoo.skip_mlp), "tp2", optimizer=lambda named: torch.optim.Adafactor(
        [p for _, p in named if p.dim() == 2], lr=1e-2)).first_mismatch  # fmt: skip
    assert (first.step, first.kind, first.name) == (1, "weight", "layers.0.weight") and first.error > 1e-4
    assert "which Adafactor may amplify" in str(first)


class Loud(nn.Module):
    """A large loss, and a bias that shifts all scores alike: its gradient is what rounding leaves."""

    def __init__(self):
        super().__init__()
        self.up, self.shift = nn.Linear(8, 16), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return 1e6 * (self.up(x).sin() + self.shift).softmax(-1).square().sum()


def test_gradients_of_rounding_alone_decide_nothing():
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    found = autopart.verify(Loud().double(), "dp2,tp2", example_kwargs={"x": x}, steps=2)
    assert found.ok, str(found)
    assert "weights whose gradient is only rounding are not compared: shift" in found.notes


class Counts(nn.Module):
    """A buffer that is assigned anew in each forward, and read."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return (self.up(x) * self.count).square().mean()


@pytest.mark.large
def test_buffers_that_are_assigned_carry_over():
    torch.manual_seed(0)
    model, x = Counts().double(), torch.randn(8, 8, dtype=torch.float64)
    found = autopart.verify(model, "dp2", example_kwargs={"x": x}, steps=3)
    assert found.ok and found.errors["step 3 buffer count"] == 0, str(found)
    assert found.steps[2].loss > 4 * found.steps[0].loss and float(model.count) == 0


@pytest.mark.large
def test_batches_of_other_shapes_follow_the_same_plan():
    model, batch = zoo.llama()
    batches = [batch, zoo.causal_batch(4, 8, 64), batch, zoo.causal_batch(4, 8, 64)]
    found = autopart.verify(model, "dp2,tp2", example_kwargs=batch, batches=batches, max_norm=0.5)
    assert found.ok and len(found.steps) == 4, str(found)
    assert len({report.loss for report in found.steps}) == 4


# --- What is refused


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"steps": 0}, "steps=0 is not a number of training steps"),
        ({"max_norm": -1.0}, "max_norm=-1.0 is not a norm to clip to"),
        ({"optimizer": "adamw"}, "optimizer='adamw' does not make optimizers"),
        ({"scaler": {"scale": 2}}, "scaler has no setting 'scale'"),
        ({"scaler": "yes"}, "scaler='yes' is not a loss scaler"),
    ],
)
def test_what_is_no_training_loop(asked, text):
    model, batch = zoo.skip_mlp()
    with pytest.raises(OptionError) as error:
        autopart.verify(model, "dp2", example_kwargs=batch, **asked)
    assert text in str(error.value)


def test_an_optimizer_with_a_closure():
    with pytest.raises(OptionError, match="LBFGS cannot be verified in training steps"):
        trained(run_of(zoo.skip_mlp), "dp2", optimizer=lambda named: torch.optim.LBFGS([p for _, p in named]))
    with pytest.raises(OptionError, match="returned a list, not a torch"):
        trained(run_of(zoo.skip_mlp), "dp2", optimizer=lambda named: named)

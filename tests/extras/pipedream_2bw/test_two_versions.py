"""`schedule="1f1b_2bw"` (PipeDream-2BW) against one process that takes every optimizer step a batch late."""

import copy
import math

import dist
import pytest
import torch
import zoo
from torch import nn

import autopart
from autopart.errors import AutopartError, InputError, OptionError, StageError, UsageError
from autopart.ir.mesh import Mesh

TIMEOUT_S = 150.0
SIZES = {"num_layers": 2, "hidden": 32, "heads": 4, "vocab": 32, "rows": 8, "seq": 8}
TWO_BW = {"schedule": "1f1b_2bw", "microbatches": 4}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def example(kind="llama", number=6, **sizes):
    """A model (the embeddings of GPT-2 are tied: the first stage and the last have them) and batches."""
    model, first = getattr(zoo, kind)(**{**SIZES, **sizes})
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, SIZES["vocab"], first["input_ids"].shape, generator=generator) for _ in range(number)]
    return model, [{"input_ids": one, "labels": one} for one in ids]


class Delayed:
    """One process: `step(batch)` takes its gradient at the weights there are, and leaves that of the call before.

    It is the definition, W(k+1) = W(k) - f(gradient of batch k-1 at W(k-1)), without a pipeline: nothing overlaps.
    """

    def __init__(self, model):
        self.model, self.held = model, None
        self.named = dict(model.named_parameters())

    def step(self, batch, loss_scale=1.0):
        new = None
        if batch is not None:
            loss = self.model(**batch).loss
            grads = torch.autograd.grad(loss, list(self.named.values()))
            new = loss.item(), dict(zip(self.named, grads, strict=True))
        held, self.held = self.held, new
        if held is None:
            return math.nan
        for name, parameter in self.named.items():
            grad = loss_scale * held[1][name]
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return held[0]

    def flush(self, loss_scale=1.0):
        return self.step(None, loss_scale)

    def grads(self):
        return {name: p.grad for name, p in self.named.items() if p.grad is not None}


class Both:
    """The partitioned model and `Delayed`, step by step; whatever differs raises."""

    def __init__(self, mesh, kind="llama", optimizer=adamw, number=6, **options):
        model, self.batches = example(kind, number)
        self.one = Delayed(copy.deepcopy(model))
        self.pm = autopart.parallelize(model, mesh, example_kwargs=self.batches[0], **{**TWO_BW, **options})
        self.optimizers = [optimizer(self.one.model.parameters()), optimizer(self.pm.parameters())]

    def step(self, batch, **options):
        loss = self.pm.step(**batch, **options)
        options.pop("num_tokens", None)
        self.same_loss(loss, self.one.step(batch, **options))

    def flush(self, **options):
        self.same_loss(self.pm.flush(), self.one.flush(**options))

    def same_loss(self, loss, expected):
        assert loss.shape == () and not loss.requires_grad
        assert math.isnan(loss) == math.isnan(expected)
        assert math.isnan(expected) or abs(loss.item() - expected) <= 1e-10 * abs(expected)

    def same_grads(self):
        expected = self.one.grads()
        if expected:
            zoo.assert_same_grads(self.pm.full_grads(), expected)
        else:
            assert not self.pm.full_grads()

    def same_weights(self):
        found = self.pm.full_state_dict()
        for name, value in self.one.model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)

    def update(self, max_norm=None):
        if max_norm is not None:
            expected = torch.nn.utils.clip_grad_norm_(self.one.model.parameters(), max_norm)
            torch.testing.assert_close(self.pm.clip_grad_norm_(max_norm), expected, rtol=1e-10, atol=1e-12)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- Exact.


def trained(mesh, kind="llama", optimizer=adamw, max_norm=None, looks=(), number=6, **options):
    """Steps, a flush, and steps again; at the steps in `looks` gradients and weights are compared, which drains."""
    both = Both(mesh, kind, optimizer, number, **options)
    for _ in range(2):
        for index, batch in enumerate(both.batches):
            both.step(batch)
            if index in looks:
                both.same_grads()
                both.same_weights()
            both.update(max_norm)
        both.flush()
        both.same_grads()
        both.update()
        both.same_weights()


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "kind", "options"),
    [
        ("pp2", "llama", {}), ("pp4", "llama", {"looks": (2, 4)}), ("dp2,pp2", "llama", {"optimizer": sgd}),
        ("pp2,tp2", "gpt2", {"max_norm": 0.1}), ("pp2", "gpt2", {"compile": True}),
        ("pp3", "gpt2", {"microbatches": 8}),
        ("dp2,pp2", "gpt2", {"dp_sync": "top_k:1.0", "looks": (1,)}), ("pp2,cp2", "llama", {"context": "ring"}),
        ("pp2,tp2", "llama", {"recompute": "full", "sequence_parallel": True, "microbatches": 2, "looks": (0, 5)}),
    ],
)  # fmt: skip
def test_steps_are_those_of_one_process_a_batch_late(mesh, kind, options):
    dist.run_ranks(trained, Mesh.parse(mesh).num_ranks, mesh, kind, timeout_s=TIMEOUT_S, **options)


def many(mesh):
    trained(mesh, number=25, optimizer=sgd)


@pytest.mark.large
def test_fifty_steps():
    dist.run_ranks(many, 4, "dp2,pp2", timeout_s=TIMEOUT_S)


# --- What users do between steps.


def uses(mesh):
    both = Both(mesh)
    first, second, third, fourth, *_ = both.batches
    pm, one = both.pm, both.one
    assert pm.flush().isnan() and not pm.full_grads()  # nothing has begun

    both.step(first)
    both.step(second)
    both.step(third)  # gradients are added up
    both.same_grads()
    both.update()
    both.step(fourth, loss_scale=4.0)  # of what this call leaves, not of what the call before has begun
    pm.full_state_dict()
    both.same_grads()
    both.update()
    with torch.no_grad():  # an evaluation finishes what has begun
        assert abs(pm(**first).loss.item() - one.model(**first).loss.item()) < 1e-12
    both.step(first, loss_scale=2.0)
    both.update()
    shorter = {name: value[:4] for name, value in second.items()}
    both.step(shorter)  # another program
    both.update()
    both.step(third)
    both.update()
    both.flush()
    both.same_grads()
    both.update()
    both.same_weights()


@pytest.mark.large
def test_other_calls_in_between():
    dist.run_ranks(uses, 2, "pp2", timeout_s=TIMEOUT_S)


def own_memory():
    """Parameters whose memory a user exchanges, and frozen ones."""
    model, batches = example()
    pm = autopart.parallelize(model, "pp2", example_kwargs=batches[0], **TWO_BW)
    one = Delayed(copy.deepcopy(model))
    pm.step(**batches[0])
    one.step(batches[0])
    for parameter in pm.parameters():
        parameter.data = parameter.data * 2
    for parameter in one.model.parameters():
        parameter.data = parameter.data * 2
    assert abs(pm.step(**batches[1]).item() - one.step(batches[1])) < 1e-10
    assert abs(pm.flush().item() - one.flush()) < 1e-10
    zoo.assert_same_grads(pm.full_grads(), one.grads())


def test_memory_that_users_exchange():
    dist.run_ranks(own_memory, 2, timeout_s=TIMEOUT_S)


def hooked():
    """Hooks on parameters see the gradient that a step leaves."""
    model, batches = example(number=2)
    pm = autopart.parallelize(model, "pp2", example_kwargs=batches[0], **TWO_BW)
    seen = []
    for name, parameter in pm.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    pm.step(**batches[0])
    assert not seen
    pm.step(**batches[1])
    found = pm.full_grads()
    assert {name for name, _ in seen} <= set(found) and len(seen) == len(list(pm.parameters()))
    assert all(torch.equal(grad, pm.get_parameter(name).grad) for name, grad in seen)


def test_hooks_see_what_is_left():
    dist.run_ranks(hooked, 2, timeout_s=TIMEOUT_S)


def in_flight():
    """The most microbatches that a rank holds between forward and backward, of two batches together."""
    model, batches = example()
    pm = autopart.parallelize(model, "pp4", example_kwargs=batches[0], **{**TWO_BW, "microbatches": 8})
    pm.step(**batches[0])
    stages = [executable.pipeline.schedule._stage for executable in pm._in_flight.batch.pair.executables]
    most = []
    for stage in stages:

        def forward(*args, own=stage.forward_one_chunk, **kwargs):
            result = own(*args, **kwargs)
            most.append(sum(len(one.fwd_cache) for one in stages))
            return result

        stage.forward_one_chunk = forward
    pm.step(**batches[1])
    pm.step(**batches[2])
    pm.flush()
    return max(most)


@pytest.mark.large
def test_as_many_microbatches_are_held_as_under_1f1b():
    assert dist.run_ranks(in_flight, 4, timeout_s=TIMEOUT_S) == [4, 3, 2, 1]


def too_few_rows():
    model, batches = example()
    pm = autopart.parallelize(model, "pp2", example_kwargs=batches[0], **TWO_BW)
    pm.step(**batches[0])
    row = {name: value[:1] for name, value in batches[1].items()}
    with pytest.raises(StageError, match="this schedule needs at least 2 microbatches"):
        pm.step(**row)
    with torch.no_grad():
        pm(**row)
    assert not pm.flush().isnan()


@pytest.mark.large
def test_a_batch_of_too_few_rows():
    dist.run_ranks(too_few_rows, 2, timeout_s=TIMEOUT_S)


# --- Ranks that are called otherwise.


def unlike(first_wrong):
    model, batches = example()
    pm = autopart.parallelize(model, "pp2", example_kwargs=batches[0], timeout=20.0, **TWO_BW)
    one = Delayed(copy.deepcopy(model))
    for batch in batches[:3]:
        pm.step(**batch)
        one.step(batch)
    wrong = torch.distributed.get_rank() == first_wrong
    with pytest.raises(InputError, match="different values of input_ids"):
        pm.step(**batches[4 if wrong else 3])
    pm.zero_grad()
    one.model.zero_grad()
    loss = pm.step(**batches[3])  # nothing is lost: what had begun is finished, and left now
    assert abs(loss.item() - one.step(batches[3])) < 1e-10
    zoo.assert_same_grads(pm.full_grads(), one.grads())
    for flushes in (wrong, not wrong):
        with pytest.raises(InputError, match="different inputs"):
            if flushes:
                pm.flush()
            else:
                pm.step(**batches[4])
    pm.zero_grad()
    one.model.zero_grad()
    assert abs(pm.flush().item() - one.flush()) < 1e-10
    zoo.assert_same_grads(pm.full_grads(), one.grads())


@pytest.mark.large
@pytest.mark.parametrize("first_wrong", [0, 1])
def test_nothing_is_lost_where_ranks_are_called_unlike(first_wrong):
    dist.run_ranks(unlike, 2, first_wrong, timeout_s=TIMEOUT_S)


# --- What it cannot do.


class Counting(nn.Module):
    """It counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layers(x).square().mean()


REFUSED = {
    "no pipeline": ("dp2", {}, OptionError, "schedule='1f1b_2bw' needs a pipeline"),
    "few microbatches": ("pp2", {"microbatches": 1}, StageError, "this schedule needs at least 2 microbatches"),
    "stages": ("pp2", {"virtual_stages": 2}, StageError, "this schedule runs one stage per rank, not 2"),
    "zero": ("dp2,pp2", {"zero": 1}, StageError, "cannot be combined with parameters sharded over dp .zero=."),
    "fp16": ("pp2", {"precision": "fp16"}, StageError, "precision='fp16' cannot be combined with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_when_planned(case):
    mesh, options, kind, message = REFUSED[case]
    model, batches = example()
    with pytest.raises(kind, match=message):
        autopart.plan(model, mesh, example_kwargs=batches[0], **{**TWO_BW, **options})


def test_models_that_write_buffers_are_refused():
    model, batch = Counting().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}
    with pytest.raises(StageError, match="does not support a model whose forward writes buffer 'calls'\n  why "):
        autopart.plan(model, "pp2", example_kwargs=batch, **TWO_BW)
    autopart.plan(model.eval(), "pp2", example_kwargs=batch, **TWO_BW)


def refusals():
    model, batches = example()
    pm = autopart.parallelize(copy.deepcopy(model), "pp2", example_kwargs=batches[0], **TWO_BW)
    pm.step(**batches[0])
    with pytest.raises(UsageError, match="outputs=True is not supported with schedule='1f1b_2bw'"):
        pm.step(**batches[1], outputs=True)
    with pm.no_sync(), pytest.raises(UsageError, match=r"step\(\) cannot run inside no_sync\(\)"):
        pm.step(**batches[1])
    with pytest.raises(UsageError, match=r"load_state_dict\(\) cannot run while a batch is in flight"):
        pm.load_state_dict(pm.state_dict())
    assert not pm.flush().isnan()
    pm.load_state_dict(pm.state_dict())
    plain = autopart.parallelize(model, "pp2", example_kwargs=batches[0], microbatches=4)
    with pytest.raises(UsageError, match=r"flush\(\) is only for schedule='1f1b_2bw'"):
        plain.flush()


@pytest.mark.large
def test_what_is_refused_in_a_loop():
    dist.run_ranks(refusals, 2, timeout_s=TIMEOUT_S)


# --- Its figures.


@pytest.mark.large
def test_a_search_never_chooses_it():
    model, batches = example(rows=16)
    found = autopart.search(model, devices=4, example_kwargs=batches[0], hardware="a100-80gb-sxm", count=8)
    assert all(plan.schedule.name != "1f1b_2bw" for plan in found)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["pp2", "pp4", "dp2,pp2"])
def test_plan_has_a_second_version_and_no_bubble(mesh, tmp_path):
    model, batches = example()
    plain, late = (
        autopart.plan(model, mesh, example_kwargs=batches[0], microbatches=4, schedule=schedule)
        for schedule in ("1f1b", "1f1b_2bw")
    )
    for one, two in zip(plain.memory, late.memory, strict=True):
        assert two["parameters"] == one["parameters"] + one["gradients"]
        assert (two["activations"], two["inputs"]) == (one["activations"], 2 * one["inputs"])
    assert autopart.simulate(late).step_time_s < autopart.simulate(plain).step_time_s
    assert late.cost.parts["bubble"] == 0
    path = tmp_path / "plan.json"
    late.save(path)
    assert autopart.simulate(autopart.Plan.load(path)).step_time_s == autopart.simulate(late).step_time_s
    late.cost.at(m=8)


def test_frozen_weights_have_two_versions_too():
    """What changes them between two steps, such as a running mean of others, must not reach a batch in flight."""
    model, batches = example()
    model.model.embed_tokens.requires_grad_(False)
    plain, late = (
        autopart.plan(model, "pp2", example_kwargs=batches[0], microbatches=4, schedule=schedule)
        for schedule in ("1f1b", "1f1b_2bw")
    )
    for one, two in zip(plain.memory, late.memory, strict=True):
        assert two["parameters"] == 2 * one["parameters"]
    assert plain.memory[0]["gradients"] < plain.memory[0]["parameters"]
    values = (late.cost.memory_parts["parameters"], plain.cost.memory_parts["parameters"])
    assert values[0] == 2 * values[1]


@pytest.mark.large
def test_verify_gives_optimizers_the_gradient_of_the_batch_before():
    model, batches = example()
    one = Delayed(copy.deepcopy(model))
    optimizer = adamw(one.model.parameters())
    losses = []
    for batch in batches[:4]:
        one.model.zero_grad()
        losses.append(one.model(**batch).loss.item())
        one.step(batch)
        optimizer.step()
    found = autopart.verify(
        model, "pp2,tp2", example_kwargs=batches[0], steps=4, batches=batches[:4],
        optimizer=lambda named: adamw([p for _, p in named]), **TWO_BW,
    )  # fmt: skip
    assert found.ok and [step.loss for step in found.steps] == pytest.approx(losses, rel=1e-7)
    with pytest.raises(OptionError, match="scaler= cannot be combined with schedule='1f1b_2bw'"):
        autopart.verify(model, "pp2", example_kwargs=batches[0], steps=1, scaler=True, **TWO_BW)


def test_errors_are_told():
    model, batches = example()
    with pytest.raises(AutopartError, match="unknown schedule '2bw'"):
        autopart.plan(model, "pp2", example_kwargs=batches[0], schedule="2bw")
    plan = autopart.plan(model, "pp2", example_kwargs=batches[0], schedule="1F1B-2BW", microbatches=4)
    assert plan.schedule.name == "1f1b_2bw" and "1f1b_2bw, 4 microbatches" in str(plan.explain())

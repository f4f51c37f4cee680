"""`pm.no_sync()`: gradients of several calls, summed over ranks once, against accumulation in one process."""

import copy

import dist
import pytest
import torch
import zoo

import autopart
from autopart.errors import UsageError
from autopart.ir.mesh import Mesh
from autopart.runtime.gradients import no_sync, reductions

TIMEOUT_S = 150.0
SIZES = {"hidden": 32, "heads": 4, "vocab": 32, "rows": 4, "seq": 8}


def example(kind="gpt2"):
    """A model (GPT-2 has a tied weight, Llama norms that sequence parallelism sums over tp) and six batches."""
    model, first = getattr(zoo, kind)(**SIZES)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(6):
        ids = torch.randint(3, SIZES["vocab"], first["input_ids"].shape, generator=generator)
        labels = ids.clone()
        labels[:2, : index + 1] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return model, batches


def run(fn, mesh, *args, **options):
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, mesh, *args, timeout_s=TIMEOUT_S, **options)


def same_grads(pm, model):
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    zoo.assert_same_grads(pm.full_grads(), expected)


class Counter:
    """How often gradients are summed."""

    def __init__(self, monkeypatch):
        self.sums = 0
        monkeypatch.setattr(reductions, "begin_all_reduce", self.counted(reductions.begin_all_reduce))

    def counted(self, function):
        def call(*args, **kwargs):
            self.sums += 1
            return function(*args, **kwargs)

        return call


def accumulated(mesh, kind="gpt2", own_loop=False, **options):
    """Complete gradients before, two calls inside, one outside, and again: the same as in one process."""
    model, batches = example(kind)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0], **options)

    def call(batch):
        model(**batch).loss.backward()
        if own_loop:
            pm(**batch).loss.backward()
        else:
            pm.step(**batch)

    with pytest.MonkeyPatch.context() as patch:
        counter = Counter(patch)
        call(batches[0])
        one_call = counter.sums
        same_grads(pm, model)
        counter.sums = 0
        with pm.no_sync():
            call(batches[1])
            with pm.no_sync():
                call(batches[2])
        assert counter.sums == 0
        call(batches[3])
        assert min(1, one_call) <= counter.sums <= one_call  # of two stages of a rank together, where it was kept
    same_grads(pm, model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert float(pm.clip_grad_norm_(0.5)) == pytest.approx(float(norm), rel=1e-10)
    same_grads(pm, model)
    with pm.no_sync():
        call(batches[4])
    model.zero_grad()
    pm.zero_grad()  # what was left is forgotten, with `.grad`
    with pm.no_sync():
        call(batches[4])
    for p in (*model.parameters(), *pm.parameters()):
        p.grad.zero_()
    call(batches[5])
    same_grads(pm, model)
    return one_call


CASES = {
    "tp2": {},
    "tp2 sequence": {"kind": "llama", "sequence_parallel": True},
    "tp2 sequence, own loop": {"kind": "llama", "sequence_parallel": True, "own_loop": True},
    "dp2": {"microbatches": 2},
    "dp2 own loop": {"own_loop": True},
    "dp2 recompute": {"own_loop": True, "recompute": "full"},
    "dp2 compile": {"own_loop": True, "compile": True},
    "pp2": {"microbatches": 2},
    "dp2,tp2": {"kind": "llama", "sequence_parallel": True},
    "dp2,tp2 own loop": {"own_loop": True},
    "dp2,pp2": {"microbatches": 2},
    "pp2,tp2": {"kind": "llama", "sequence_parallel": True, "schedule": "zbv", "microbatches": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_several_calls_are_summed_once(name):
    summed = run(accumulated, name.split()[0], **CASES[name])
    assert any(summed) or name == "tp2", "no gradient is summed over ranks: nothing was tried"


def interleaved(mesh):
    """Which forwards were inside decides, in whatever order and together with which others they are differentiated."""
    model, batches = example()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0])
    for order in ("inside last", "outside last", "outside first", "together", "together, inside first"):
        model.zero_grad()
        pm.zero_grad()
        if order == "together, inside first":
            with pm.no_sync():
                inside = pm(**batches[1]).loss
            outside = pm(**batches[0]).loss
        else:
            outside = pm(**batches[0]).loss
            with pm.no_sync():
                inside = pm(**batches[1]).loss
        if order.startswith("together"):
            (inside + outside).backward()
        elif order == "inside last":
            outside.backward()
            inside.backward()
            pm(**batches[2]).loss.backward()
            model(**batches[2]).loss.backward()
        elif order == "outside last":
            inside.backward()
            outside.backward()
        else:
            with pm.no_sync():  # a backward in here of a forward outside
                inside.backward()
                outside.backward()
        for batch in batches[:2]:
            model(**batch).loss.backward()
        same_grads(pm, model)


@pytest.mark.large
def test_the_forward_decides_and_not_the_order():
    run(interleaved, "dp2")


def refusals(mesh, **options):
    """What reads gradients that are not summed says so, on every rank; after the next call it works."""
    model, batches = example()
    pm = autopart.parallelize(model, mesh, example_kwargs=batches[0], **options)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    scaler = autopart.GradScaler(init_scale=2.0)
    pm.step(**batches[0], loss_scale=scaler.get_scale())
    reads = {
        "grad_norm": pm.grad_norm,
        "clip": lambda: pm.clip_grad_norm_(1.0),
        "clip of torch": lambda: torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0),
        "total norm": lambda: torch.nn.utils.get_total_norm([p.grad for p in pm.parameters()]),
        "full_grads": pm.full_grads,
        "scaler": lambda: scaler.unscale_(optimizer),
        "step": optimizer.step,
    }
    with pm.no_sync():
        pm.step(**batches[1], loss_scale=scaler.get_scale())
    for name, read in reads.items():
        with pytest.raises(UsageError, match="needs gradients that are reduced over the ranks"):
            read()
            raise AssertionError(name)
    handle = next(iter(pm.parameters())).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UsageError, match=r"the gradient hook of .* cannot run inside no_sync"):
        pm.step(**batches[2])
    handle.remove()
    pm.step(**batches[2], loss_scale=scaler.get_scale())
    for read in reads.values():
        read()


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "options"), [("dp2", {}), ("pp2", {"microbatches": 2})])
def test_gradients_that_are_not_summed_are_not_read(mesh, options):
    run(refusals, mesh, **options)


def a_failed_call(mesh):
    """What a call that fails inside or at the end leaves is what was there."""
    model, batches = example()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0])
    bad = {**batches[0], "input_ids": torch.full_like(batches[0]["input_ids"], 10_000)}
    pm.step(**batches[0])
    with pm.no_sync():
        pm.step(**batches[1])
        with pytest.raises(IndexError):
            pm.step(**bad)
    with pytest.raises(IndexError):
        pm.step(**bad)
    pm.step(**batches[2])
    for batch in batches[:3]:
        model(**batch).loss.backward()
    same_grads(pm, model)


@pytest.mark.large
def test_a_failed_call_changes_nothing():
    run(a_failed_call, "dp2")


def other_ranks(mesh, **options):
    model, batches = example()
    pm = autopart.parallelize(model, mesh, example_kwargs=batches[0], **options)
    if options:
        with pytest.raises(UsageError) as error, pm.no_sync():
            pass
        return str(error.value)
    pm.step(**batches[0])
    if torch.distributed.get_rank() == 0:
        with pytest.raises(ValueError) as error, pm.no_sync():
            pm.step(**batches[0])
    else:
        with pytest.raises(ValueError) as error:
            pm.step(**batches[0])
    return str(error.value)


def test_all_ranks_are_inside_or_none():
    texts = run(other_ranks, "dp2")
    assert texts[0] == texts[1] and "inside no_sync()" in texts[0]


def test_parameters_in_parts_have_no_gradients_that_could_wait():
    texts = run(other_ranks, "dp2", zero=3)
    assert texts[0] == texts[1] and "microbatches=" in texts[0] and "for sharded parameters (zero=)" in texts[0]


@pytest.mark.large
def test_a_sum_that_forgets_what_was_complete_is_found(monkeypatch):
    """The comparison above can fail: without `begin`, what was complete is summed twice."""
    with pytest.raises(dist.RankError, match=r"gradient of .* is off"):
        run(without_begin, "dp2")


def without_begin(mesh):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(no_sync.NoSync, "_is_first_owner", lambda self, name: True)
        accumulated(mesh)

"""`local_batch=True`: every rank gives its own rows, as a DistributedSampler hands them out.

The numbers are those of one process on the batches of all ranks together."""

import copy

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from step_models import Small
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopart
from autopart.errors import AutopartError, InputError
from autopart.ir.mesh import Mesh

TIMEOUT_S = 150.0
IGNORED = -100
SEQ = 8


def run(fn, mesh, *args, **options):
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, mesh, *args, timeout_s=TIMEOUT_S, **options)


def made(kind="gpt2"):
    return getattr(zoo, kind)(hidden=32, heads=4, vocab=32, rows=4, seq=SEQ)[0]


def dataset(rows=22):
    """Rows of which another number of labels counts."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 32, (rows, SEQ), generator=generator)
    lengths = torch.randint(1, SEQ, (rows, 1), generator=generator)
    return TensorDataset(ids, ids.masked_fill(torch.arange(SEQ) > lengths, IGNORED))


def loader_of(pm, batch_size=2):
    sampler = DistributedSampler(
        dataset(), num_replicas=pm.num_data_ranks, rank=pm.data_rank, shuffle=True, seed=5, drop_last=True
    )
    return DataLoader(dataset(), batch_size=batch_size, sampler=sampler, drop_last=True)


def batches_of_all(num_data_ranks, batch_size=2):
    """What the loaders of all data ranks give, put together in the order of the ranks."""
    loaders = []
    for rank in range(num_data_ranks):
        sampler = DistributedSampler(dataset(), num_replicas=num_data_ranks, rank=rank, seed=5, drop_last=True)
        loaders.append(DataLoader(dataset(), batch_size=batch_size, sampler=sampler, drop_last=True))
    for parts in zip(*loaders, strict=True):
        yield [torch.cat(column) for column in zip(*parts, strict=True)]


def trained(mesh, kind="gpt2", own_loop=False, lazy=False, **options):
    """Losses, norms and weights of an epoch, of a partitioned model on its rank's rows and of one process on all."""
    model = made(kind)
    example = None if lazy else {"input_ids": dataset()[:2][0], "labels": dataset()[:2][1]}
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=example, local_batch=True, **options)
    assert (pm.num_data_ranks, pm.data_rank) == (pm.mesh.data_parallel_size, pm.mesh.row_index(pm._process.coordinates))
    whole = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected, found = [], []
    for ids, labels in batches_of_all(pm.num_data_ranks):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        expected += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        whole.step()
        whole.zero_grad()
    optimizer = None
    for ids, labels in loader_of(pm):
        if own_loop:
            outputs = pm(input_ids=ids, labels=labels)
            assert outputs.logits.shape == (len(ids), SEQ, 32)
            loss = outputs.loss
            loss.backward()
        else:
            loss = pm.step(input_ids=ids, labels=labels)
        optimizer = optimizer or torch.optim.AdamW(pm.parameters(), lr=1e-2)
        found += [loss.item(), pm.clip_grad_norm_(1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    assert len(found) >= 4 and found == pytest.approx(expected, rel=1e-10)
    for name, value in pm.full_state_dict().items():
        assert (value - model.state_dict()[name]).abs().max() <= 1e-10, name
    evaluated(pm, model)


def evaluated(pm, model):
    """Batches of other sizes and lengths, without gradients: a rank's own rows of the outputs."""
    pm.eval()
    model.eval()
    for rows, length in ((1, SEQ), (3, 5)):
        ids = torch.randint(3, 32, (rows * pm.num_data_ranks, length), generator=torch.Generator().manual_seed(0))
        mine = ids[pm.data_rank * rows :][:rows]
        with torch.no_grad():
            outputs, expected = pm(input_ids=mine, labels=mine), model(input_ids=ids, labels=ids)
        zoo.assert_close_outputs(outputs.loss, expected.loss)
        zoo.assert_close_outputs(outputs.logits, expected.logits[pm.data_rank * rows :][:rows])
    pm.train()
    model.train()


CASES = {
    "dp2": {},
    "dp2 own loop": {"own_loop": True},
    "dp2 lazy, microbatches": {"lazy": True, "microbatches": 2},
    "dp2 zero": {"zero": 3},
    "dp2 recompute": {"recompute": "full", "microbatches": 2},
    "dp2 compile": {"compile": True},
    "dp4": {"own_loop": True, "zero": 3},
    "dp2,tp2": {"kind": "llama", "sequence_parallel": True},
    "dp2,tp2 own loop": {"own_loop": True},
    "dp2,pp2": {"microbatches": 2},
    "dp2,pp2 lazy": {"microbatches": 2, "lazy": True, "schedule": "zbv"},
    "tp2": {"own_loop": True},
    "pp2": {"microbatches": 2},
}


@pytest.mark.large
@pytest.mark.parametrize("name", CASES)
def test_a_distributed_sampler_trains_as_one_process_does(name):
    run(trained, name.split()[0], **CASES[name])


class Images(nn.Module):
    """Floats in, an output whose second dim is rows, a number, and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)
        self.norm, self.dropout = nn.BatchNorm2d(8), nn.Dropout(dropout)

    def forward(self, images, weights, scale):
        x = self.dropout(F.relu(self.norm(self.conv(images)))).mean((2, 3))
        logits = self.head(x) * scale
        return {"logits": logits, "by_class": logits.t(), "size": logits.square().mean(), "doubled": weights * 2.0}


def picture_loss(outputs, target):
    return F.cross_entropy(outputs["logits"], target, ignore_index=IGNORED)


def pictures(rows=8):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(rows, 3, 6, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(10, (rows,), generator=generator)
    target[:3] = IGNORED
    weights = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    return {"images": images, "weights": weights, "scale": torch.tensor(1.5, dtype=torch.float64)}, target


def own(pm, value):
    rows = value.size(0) // pm.num_data_ranks if value.dim() else 0
    return value[pm.data_rank * rows :][:rows] if value.dim() else value


def images_stay(mesh, dropout=0.0, **options):
    """A model of images with a statistic of the batch, outputs of every kind, and the gradient of an input."""
    torch.manual_seed(0)
    model = Images(dropout).double()
    data, target = pictures()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, local_batch=True, rng="exact", **options)
    mine = {name: own(pm, value) for name, value in data.items()}
    for _ in range(2):
        torch.manual_seed(1)
        expected = model(**data)
        expected_loss = picture_loss(expected, target)
        expected_loss.backward()
        torch.manual_seed(1)
        loss, outputs = pm.step(**mine, loss_fn=picture_loss, target=own(pm, target), outputs=True)
        zoo.assert_close_outputs(loss, expected_loss.detach())
        for name in ("logits", "doubled"):
            zoo.assert_close_outputs(outputs[name], own(pm, expected[name].detach()), where=name)
        rows = 8 // pm.num_data_ranks
        by_class = expected["by_class"].detach().narrow(1, pm.data_rank * rows, rows)
        zoo.assert_close_outputs(outputs["by_class"], by_class)
        zoo.assert_close_outputs(outputs["size"], expected["size"].detach())
        zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})
    for name, value in model.state_dict().items():
        assert (pm.full_state_dict()[name] - value).abs().max() <= 1e-10, name
    executable = pm._executables.values()[-1]
    return sorted(executable.rows.local_inputs), sorted(executable.rows.gathered_inputs)


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp2", {}), ("dp2", {"dropout": 0.5}), ("dp2,tp2", {}), ("dp2,pp2", {"dropout": 0.5, "microbatches": 1,
                                                                                   "schedule": "gpipe"})],
)  # fmt: skip
def test_images_do_not_travel(mesh, options):
    own_rows, whole = run(images_stay, mesh, **options)[0]
    assert "images" in own_rows and "target" in whole, (own_rows, whole)


def gradients_of_inputs(mesh):
    """An input that needs a gradient gets that of its own rows; a loss of one's own rows adds up over ranks."""
    torch.manual_seed(0)
    model = Images().double().eval()
    data, _ = pictures()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, local_batch=True)
    pm.eval()
    whole = {**data, "images": data["images"].clone().requires_grad_()}
    mine = {name: own(pm, value) for name, value in data.items()}
    mine["images"].requires_grad_()
    model(**whole)["logits"].square().mean().backward()
    (pm(**mine)["logits"].square().mean() / pm.num_data_ranks).backward()
    zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})
    zoo.assert_close_outputs(mine["images"].grad, own(pm, whole["images"].grad))


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2"])
def test_gradients_of_inputs_are_those_of_a_ranks_rows(mesh):
    run(gradients_of_inputs, mesh)


def dropout_of_all_rows(mesh, rng):
    """Masks of dropout are those of the global batch, whoever gives its rows."""
    losses = []
    for local in (False, True):
        torch.manual_seed(0)
        model = Small(norm=False)
        model.head = nn.Sequential(nn.Dropout(0.5), model.head)
        ids, labels = dataset(8)[:]
        batch = {"tokens": ids, "labels": labels}
        pm = autopart.parallelize(model.double(), mesh, example_kwargs=None, local_batch=local, rng=rng)
        given = {name: own(pm, value) for name, value in batch.items()} if local else batch
        torch.manual_seed(7)
        losses.append([pm.step(**given).item(), float(pm.grad_norm())])
    return losses


@pytest.mark.few
@pytest.mark.parametrize("rng", ["exact", "fast"])
def test_dropout_is_that_of_the_global_batch(rng):
    for whole, local in run(dropout_of_all_rows, "dp2", rng):
        assert local == pytest.approx(whole, rel=1e-12)


def wrong(mesh, use):
    """What is said of rows that do not fit together."""
    ids, labels = dataset()[:]
    pm = autopart.parallelize(made(), mesh, local_batch=True, microbatches=2 if use == "rows to cut" else None)
    rank, rows = torch.distributed.get_rank(), slice(2 * pm.data_rank, 2 * pm.data_rank + 2)
    if use in ("rows", "rows to cut"):
        rows = slice(0, 2 + rank)
    if use == "neighbours":
        rows = slice(2 * rank, 2 * rank + 2)
    call = {"input_ids": ids[rows], "labels": labels[rows]}
    if use == "shapes":
        call = {name: value[:, : SEQ - rank] for name, value in call.items()}
    if use == "calls" and rank == 1:
        with pytest.raises(InputError) as error:
            pm(**call)
        return str(error.value)
    if use == "number":
        call["num_items_in_batch"] = torch.tensor(10 + rank)
    with pytest.raises(AutopartError) as error:
        pm.step(**call)
    if use != "calls":
        pm.step(input_ids=ids[:2], labels=labels[:2])  # and then goes on
    return str(error.value)


WRONG = {
    ("dp2", "rows"): ["different numbers of samples", "rank 0: 2 samples; rank 1: 3 samples", "drop_last=True"],
    ("dp2", "rows to cut"): ["different numbers of samples", "rank 0: 2 samples; rank 1: 3 samples"],
    ("tp2", "rows"): ["different numbers of samples", "rank 0: 2 samples; rank 1: 3 samples"],
    ("tp2", "neighbours"): ["different values of input_ids, labels", "rank 1 unlike rank 0", "pm.data_rank"],
    ("dp2,tp2", "neighbours"): ["values of input_ids, labels", "rank 1 unlike rank 0, rank 3 unlike rank 2"],
    ("dp2,pp2", "neighbours"): ["values of input_ids, labels", "rank 2 unlike rank 0, rank 3 unlike rank 1"],
    ("dp2", "shapes"): ["different inputs", "input_ids i64[2,8]", "input_ids i64[2,7]"],
    ("dp2", "calls"): ["different inputs", "rank 0: step(input_ids", "rank 1: forward(input_ids"],
    ("dp2", "number"): ["different values of num_items_in_batch", "the same values on every rank"],
}


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "use"), WRONG, ids=lambda part: part)
def test_rows_that_do_not_fit_are_refused_on_every_rank(mesh, use):
    texts = run(wrong, mesh, use)
    assert len(set(texts)) == 1
    assert all(part in texts[0] for part in WRONG[mesh, use]), texts[0]


class Trimmed(nn.Module):
    """Reads a length, or selects rows, by values of which every rank has others."""

    def __init__(self, reads):
        super().__init__()
        self.linear, self.reads = nn.Linear(8, 8), reads

    def forward(self, x, lengths):
        if self.reads:
            x = x[:, : int(lengths.max())]
        return self.linear(x)[lengths > 2].square().mean()


def own_values(mesh):
    torch.manual_seed(0)
    x, lengths, results = torch.randn(8, 6, 8), torch.tensor([1, 3, 3, 2, 6, 4, 3, 5]), []
    for reads in (False, True):
        model = Trimmed(reads)
        pm = autopart.parallelize(copy.deepcopy(model), mesh, local_batch=True)
        try:
            loss = pm.step(x.chunk(2)[pm.data_rank], lengths.chunk(2)[pm.data_rank])
            results.append(float(loss - model(x, lengths)))
        except InputError as error:
            results.append(str(error))
    return results


@pytest.mark.large
def test_values_that_differ_between_ranks():
    for selected, error in run(own_values, "dp2"):
        assert abs(selected) < 1e-6
        assert "the model reads `int(lengths.max())`, and local_batch=True gives every data rank other samples" in error

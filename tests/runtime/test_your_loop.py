"""The training loop of the guides, run on real processes and compared with one process."""

import copy
import re
from pathlib import Path

import pytest
import torch
import zoo
from dist import run_ranks
from torch.utils.data import DataLoader, DistributedSampler

import autopart

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = ("training-loop.md", "checking-a-plan.md")
NUM_STEPS, ACCUMULATE = 20, 2
MESHES = {"tp2": {}, "pp2": {}, "dp2": {}, "dp2,tp2": {}, "dp2 zero": {"zero": 3}}


def blocks_of_the_guides():
    """{name: value} of all names that functions and imports of the guides define."""
    namespace = {}
    for page in PAGES:
        for source in re.findall(r"```python\n(.*?)```", (GUIDES / page).read_text(), re.S):
            if re.search(r"^def ", source, re.M) and not source.startswith("# "):
                exec(compile(source, page, "exec"), namespace)
    return namespace


def example():
    """A model with a tied weight and biases, and batches with other numbers of labels that count."""
    model, batch = zoo.gpt2(hidden=32, heads=4, vocab=32, rows=4, seq=8)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(NUM_STEPS * ACCUMULATE):
        ids = torch.randint(2, 32, batch["input_ids"].shape, generator=generator)
        labels = ids.clone()
        labels[:, : index % 5] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return model, batches


def in_one_process():
    """The same loop as one writes it for one device; a mean over all labels of a step's batches."""
    model, batches = example()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
    losses, norms = [], []
    for first in range(0, len(batches), ACCUMULATE):
        group = batches[first : first + ACCUMULATE]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in group]
        total = 0.0
        for batch, count in zip(group, counts, strict=True):
            loss = model(**batch).loss * count / sum(counts)
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def expected():
    return in_one_process()


def on_a_rank(mesh, options):
    model, batches = example()
    return blocks_of_the_guides()["train"](model, mesh, batches, ACCUMULATE, **options)


@pytest.mark.parametrize("name", MESHES)
def test_the_loop_of_the_guide_equals_one_process(name, expected):
    mesh = name.split()[0]
    losses, norms, weights = expected
    assert max(norms) > 1.0, "nothing is clipped"
    size = 4 if "," in mesh else 2
    for history in run_ranks(on_a_rank, size, mesh, MESHES[name], timeout_s=180):
        assert history["loss"] == pytest.approx(losses, rel=1e-10)
        assert history["norm"] == pytest.approx(norms, rel=1e-10)
        for key, whole in weights.items():
            assert (history["weights"][key] - whole).abs().max() <= 1e-10, key


class Rows(torch.utils.data.Dataset):
    """Rows of which another number of labels counts; 19, so that some are dropped."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(2, 32, (19, 8), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) < index % 5, -100)}


def own_rows_in_one_process(num_data_ranks, batch_size, epochs):
    """The batches of all samplers together, in one process."""
    model, _ = example()
    data, optimizer, losses = Rows(), torch.optim.AdamW(model.parameters(), lr=1e-3), []
    samplers = [DistributedSampler(data, num_data_ranks, rank, drop_last=True) for rank in range(num_data_ranks)]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, batch_size // num_data_ranks, sampler=s, drop_last=True) for s in samplers]
        for parts in zip(*loaders, strict=True):
            batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.state_dict()


def own_rows(mesh, options):
    return blocks_of_the_guides()["train_on_own_rows"](example()[0], mesh, Rows(), 4, 2, **options)


OWN_ROWS = {"dp2": {}, "dp2,tp2": {}, "dp2 zero": {"zero": 3}, "pp2,dp2": {"microbatches": 2}, "tp2": {}}


@pytest.mark.few
@pytest.mark.parametrize("name", OWN_ROWS)
def test_own_rows_on_every_rank_equal_one_process(name):
    mesh = autopart.Mesh.parse(name.split()[0])
    losses, weights = own_rows_in_one_process(mesh.data_parallel_size, batch_size=4, epochs=2)
    assert len(losses) == 8
    for history in run_ranks(own_rows, mesh.num_ranks, name.split()[0], OWN_ROWS[name], timeout_s=180):
        assert history["loss"] == pytest.approx(losses, rel=1e-10)
        for key, whole in weights.items():
            assert (history["weights"][key] - whole).abs().max() <= 1e-10, key


def names_and_accumulation(mesh):
    """Three updates with the guide's groups, its accumulation and its averages, beside one process."""
    blocks = blocks_of_the_guides()
    model, batches = example()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0])
    optimizers = [torch.optim.AdamW(blocks["by_name"](module), lr=1e-3) for module in (pm, model)]
    averages = [blocks["averages"](module, 0.9) for module in (pm, model)]
    for first in range(0, 9, 3):
        group = batches[first : first + 3]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in group]
        loss = blocks["accumulate"](pm, group, sum(counts))
        expected = sum(model(**batch).loss * count for batch, count in zip(group, counts, strict=True)) / sum(counts)
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-10)
        for module, optimizer, average in zip((pm, model), optimizers, averages, strict=True):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(module)
    for partitioned, whole in ((pm, model), (averages[0].module, averages[1].module)):
        weights = partitioned.full_state_dict()
        for key, value in whole.state_dict().items():
            assert (weights[key] - value).abs().max() <= 1e-10, key


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "pp2", "dp2,tp2"])
def test_groups_accumulation_and_averages_of_the_guide(mesh):
    run_ranks(names_and_accumulation, autopart.Mesh.parse(mesh).num_ranks, mesh, timeout_s=180)


def stop_and_go_on(meshes, folder):
    """Three steps on the first mesh, saved; three more on the second, resumed. The weights in the end."""
    _, batches = example()
    for index, mesh in enumerate(meshes):
        model, _ = example()
        if index:  # what is loaded must not have been there before
            torch.nn.init.normal_(next(model.parameters()))
        pm = autopart.parallelize(model, mesh, example_kwargs=batches[0])
        optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        if index:
            pm.load(folder, "latest", optimizer=optimizer, scheduler=scheduler)
        for batch in batches[3 * index : 3 * index + 3]:
            pm.step(**batch)
            pm.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not index:
            pm.save(folder, optimizer=optimizer, scheduler=scheduler, keep=1)
    return pm.full_state_dict()


@pytest.mark.large
@pytest.mark.parametrize("meshes", [("tp2", "pp2"), ("pp2", "dp2")], ids=" then ".join)
def test_a_run_is_resumed_on_another_mesh(meshes, tmp_path):
    model, batches = example()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for batch in batches[:6]:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for weights in run_ranks(stop_and_go_on, 2, meshes, str(tmp_path / "checkpoint"), timeout_s=180):
        for key, whole in model.state_dict().items():
            assert (weights[key] - whole).abs().max() <= 1e-10, key


@pytest.mark.large
def test_the_loop_is_proven_in_one_process(capsys):
    model, batches = example()
    blocks_of_the_guides()["prove"](model, "dp2,tp2", batches[0])
    assert "exact on dp2,tp2" in capsys.readouterr().out

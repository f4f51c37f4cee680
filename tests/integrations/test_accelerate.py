"""accelerate on partitioned models: a training loop equals that of one process, and its state loads on another mesh."""

import sys

import dist
import pytest
import torch
import trainer_cases as cases
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

import autopart
from autopart.errors import UsageError

TIMEOUT_S = 280.0
MESHES = {
    "tp2": {}, "dp2": {}, "dp2 zero3": {"zero": 3}, "dp2 local": {"local_batch": True}, "dp2,tp2": {}, "pp2": {},
    "pp2,tp2": {"microbatches": 2},
}  # fmt: skip
FAST = ("dp2",)
EPOCHS, STEPS = 2, 12


def loop(model, rows, accumulate, saved=None, resumed=None):
    """A loop as in accelerate's no-trainer scripts. On a pipeline `step` replaces the call and `backward`."""
    cases.forget_processes()
    loading = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of samples of one process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=loading)
    set_seed(1)
    num_shards = cases.ROWS // rows  # accelerate steps a scheduler once per shard of the data
    by_step = isinstance(model, autopart.ParallelModule) and model.mesh.size("pp") > 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS * num_shards)
    columns = [
        {name: item[name] for name in ("input_ids", "labels")} for item in map(cases.Tokens(24).__getitem__, range(24))
    ]
    loader, evaluation = DataLoader(columns, rows, shuffle=True), DataLoader(columns[:11], rows)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    if resumed is not None:
        accelerator.load_state(resumed)
    history = []
    for epoch in range(0 if resumed is None else 1, EPOCHS):
        loader.set_epoch(epoch)
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                if by_step:
                    loss = model.step(**batch, loss_scale=1 / accumulate)
                else:
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else 0.0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            history.append((float(loss), float(norm), scheduler.get_last_lr()[0]))
        model.eval()
        logits = []
        for batch in evaluation:
            with torch.no_grad():
                logits.append(accelerator.gather_for_metrics(model(**batch).logits))
        history.append((float(torch.cat(logits).abs().sum()), len(torch.cat(logits)), 0.0))
        if saved is not None and epoch == 0:
            accelerator.save_state(saved)
    return history, accelerator.get_state_dict(model), accelerator.num_processes


def differences(history, expected):
    assert len(history) == len(expected), (len(history), len(expected))
    return [(got, right) for pair in zip(history, expected, strict=True) for got, right in zip(*pair, strict=True)
            if abs(got - right) > 1e-10 * max(1.0, abs(right))]  # fmt: skip


def run(mesh, options, expected, saved, resumed):
    pm = cases.partitioned(mesh, **options)
    rows = cases.ROWS // (pm.num_data_ranks if options.get("local_batch") else 1)
    history, weights, shards = loop(pm, rows, 2, saved, resumed)
    assert shards == (pm.num_data_ranks if options.get("local_batch") else 1)
    wrong = differences(history, expected[0][-len(history) :])
    assert not wrong, (mesh, options, wrong)
    cases.check_weights(pm, expected[1], mesh)
    assert weights.keys() == expected[1].keys()


def expected_of_one_process():
    history, weights, _ = loop(cases.gpt2(), cases.ROWS, 2)
    return history, {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize("case", [pytest.param(m, marks=() if m in FAST else pytest.mark.large) for m in MESHES])
def test_a_loop_equals_one_process(case, tmp_path):
    mesh = case.split()[0]
    size = autopart.Mesh.parse(mesh).num_ranks
    dist.run_ranks(run, size, mesh, MESHES[case], expected_of_one_process(), str(tmp_path), None, timeout_s=TIMEOUT_S)


@pytest.mark.large
@pytest.mark.parametrize(("saved_on", "resumed_on"), [("tp2", "dp2 zero3"), ("dp2 zero3", "pp2")])
def test_state_on_another_mesh(saved_on, resumed_on, tmp_path):
    expected = expected_of_one_process()
    for case, saved, resumed in ((saved_on, str(tmp_path), None), (resumed_on, None, str(tmp_path))):
        dist.run_ranks(run, 2, case.split()[0], MESHES[case], expected, saved, resumed, timeout_s=TIMEOUT_S)


def loop_with_own_loss(model, rows):
    """A loss outside of the model: with `local_batch=True` it is the mean over the rank's samples, as in DDP."""
    cases.forget_processes()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    columns = [{name: item[name] for name in ("input_ids", "labels")} for item in cases.Tokens(16)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(columns, rows))
    history = []
    for step, batch in enumerate(loader):
        outputs = model(**batch)
        loss = outputs.logits.square().mean()
        if step % 2:  # the model's loss is that of the global batch on every rank
            outputs.loss *= 0.5
            loss = loss + outputs.loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(accelerator.reduce(loss.detach(), "mean")), float(norm)))
    return history, accelerator, model


def run_with_own_loss(expected, folder):
    options = {"zero": 3, "local_batch": True}
    pm = autopart.parallelize(cases.gpt2(), "dp2", example_kwargs=cases.batch(cases.ROWS // 2), **options)
    history, accelerator, model = loop_with_own_loss(pm, cases.ROWS // 2)
    assert not differences(history, expected[0])
    cases.check_weights(pm, expected[1], "own loss")
    main, save = accelerator.is_main_process, accelerator.save
    model.save_pretrained(folder, is_main_process=main, save_function=save, state_dict=accelerator.get_state_dict(pm))
    texts = []
    for use in (lambda: accelerator.save(pm.state_dict(), f"{folder}/shards.pt"),
                lambda: accelerator.join_uneven_inputs([model]).__enter__(),
                lambda: LocalSGD(accelerator, model, 2)):  # fmt: skip
        with pytest.raises(UsageError) as error:
            use()
        texts.append(str(error.value).splitlines()[0])
    return texts


def test_own_loss_of_local_batches(tmp_path):
    history, _, model = loop_with_own_loss(cases.gpt2(), cases.ROWS)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for texts in dist.run_ranks(run_with_own_loss, 2, (history, weights), str(tmp_path), timeout_s=TIMEOUT_S):
        assert texts == [
            "accelerator.save() of a partitioned model's state_dict() would write one rank's shards",
            "join_uneven_inputs() does not work with local_batch=True",
            "LocalSGD does not work with a partitioned model",
        ]
    saved = cases.DoubleGPT2.from_pretrained(tmp_path).state_dict()
    assert all(torch.allclose(saved[name], value, rtol=0, atol=1e-10) for name, value in weights.items())


def refusals():
    cases.forget_processes()
    pm = cases.partitioned("dp2")
    optimizer, texts = torch.optim.SGD(pm.parameters(), lr=0.1), []
    late = Accelerator(cpu=True)
    late.prepare(optimizer)
    for use in (lambda: late.prepare(pm), lambda: Accelerator(cpu=True, mixed_precision="bf16").prepare(pm)):
        with pytest.raises(UsageError) as error:
            use()
        texts.append(str(error.value))
        cases.forget_processes()
    return texts


@pytest.mark.large
def test_refused_uses():
    (late, precision), _ = dist.run_ranks(refusals, 2, timeout_s=TIMEOUT_S)
    assert late.splitlines()[0] == "the partitioned model is prepared too late"
    assert precision.splitlines()[-1] == "  try    parallelize(..., precision='bf16')"


@pytest.mark.large
def test_libraries_that_are_not_connected(monkeypatch):
    """A library that is imported late is named by the error of DDP; a version that cannot be connected is ignored."""
    name = "autopart.integrations.accelerate"
    monkeypatch.setitem(sys.modules, "autopart.integrations.transformers", None)
    pm = autopart.parallelize(cases.gpt2(), "tp1", example_kwargs=cases.batch())
    assert name in sys.modules
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError) as error:
        torch.nn.DataParallel(pm)
    assert str(error.value).endswith("import autopart.integrations.transformers or .accelerate before them")

"""Lightning on partitioned models: losses, metrics, weights and checkpoints equal those of one process."""

import os
from pathlib import Path

import dist
import pytest
import torch
import torch.nn.functional as F
import trainer_cases as cases
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import autopart
from autopart.errors import UsageError

L = pytest.importorskip("lightning.pytorch")
strategy = pytest.importorskip("autopart.integrations.lightning")

TIMEOUT_S = 280.0
MESHES = {
    "tp2": {}, "dp2": {}, "dp2 zero3": {"zero": 3}, "dp2 local": {"local_batch": True}, "dp2,tp2": {}, "pp2": {},
    "pp2,tp2": {"microbatches": 2},
}  # fmt: skip
FAST = ("tp2",)
STEPS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2, "log_every_n_steps": 1}


class Language(L.LightningModule):
    """A model that returns its loss, with automatic optimization."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.model = cases.gpt2(dropout)
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.seen.append(float(loss))
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        guesses = outputs.logits[:, :-1].argmax(-1)
        self.log_dict({"val_loss": outputs.loss, "right": (guesses == batch["labels"][:, 1:]).double().mean()},
                      sync_dist=True, batch_size=len(guesses))  # fmt: skip

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Language):
    """The same model with manual optimization and a loss outside of the model; a parameter is not partitioned."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        logits = self.model(input_ids=batch["input_ids"]).logits * self.temperature
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.lr_schedulers().step()
        self.seen.append(float(loss))


class Images(L.LightningModule):
    """Two submodules that are partitioned separately, as in Lightning's autoencoder example."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12)).double()
        self.seen = []

    def training_step(self, batch):
        x = batch["input_ids"].double() / cases.VOCABULARY
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.seen.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adversarial(L.LightningModule):
    """Two submodules with an optimizer each, of which one is toggled at a time."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)).double()
        self.critic = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1)).double()
        self.seen = []

    def training_step(self, batch):
        x = batch["input_ids"].double() / cases.VOCABULARY
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.critic(self.generator(x)) - self.critic(x)).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.seen.append(float(loss))

    def configure_optimizers(self):
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.generator, self.critic)]


class TwoOptimizers(Language):
    """Two optimizers of one model under manual optimization, with accumulation and both ways to clip."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.manual_backward(loss / 2)
        self.seen.append(float(loss))
        if batch_idx % 2:
            for optimizer, value, algorithm in zip(self.optimizers(), (0.1, 1e-3), ("norm", "value"), strict=True):
                self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]


class OutsideLoss(Language):
    """A loss of outputs, which is that of the rank's own samples with `local_batch=True`."""

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"]).logits.square().mean()
        self.log("loss", loss, sync_dist=True)
        self.seen.append(float(self.all_gather(loss).mean()))
        return loss


def loader(size, rows=cases.ROWS, shuffle=False):
    columns = [{name: item[name] for name in ("input_ids", "labels")} for item in cases.Tokens(size)]
    if rows == cases.ROWS:
        return DataLoader(columns, rows, shuffle=shuffle)
    shards = cases.ROWS // rows
    return DataLoader(columns, rows, sampler=DistributedSampler(columns, shards, int(os.environ["RANK"]), shuffle))


def trainer(folder, **options):
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                "enable_model_summary": False, "default_root_dir": folder}  # fmt: skip
    return L.Trainer(**{**defaults, **options})


def fitted(module, folder, rows=cases.ROWS, shuffle=True, **options):
    """Fit, validate and test. Returns losses, metrics and the trainer."""
    torch.manual_seed(3)
    made = trainer(folder, **options)
    has_validation = isinstance(module, Language) and "limit_val_batches" not in options
    loaders = (loader(24, rows, shuffle), loader(8, rows)) if has_validation else (loader(24, rows, shuffle),)
    made.fit(module, *loaders)
    metrics = dict(made.callback_metrics)
    if has_validation:
        metrics |= made.validate(module, loader(16, rows), verbose=False)[0]
        metrics |= {f"test {k}": v for k, v in made.test(module, loader(12, rows), verbose=False)[0].items()}
    return module.seen, {name: float(value) for name, value in metrics.items()}, made


def weights_of(module):
    state = {}
    for name, child in module.named_children():
        full = child.full_state_dict() if isinstance(child, autopart.ParallelModule) else child.state_dict()
        state |= {f"{name}.{key}": value.clone() for key, value in full.items()}
    return state | {name: p.detach().clone() for name, p in module.named_parameters(recurse=False)}


def check(module, results, expected, case):
    losses, metrics, weights = expected
    assert results[0] == pytest.approx(losses, rel=1e-10), (case, results[0], losses)
    assert results[1] == pytest.approx(metrics, rel=1e-6), case  # Lightning keeps metrics in float32
    for name, value in weights_of(module).items():
        torch.testing.assert_close(
            value, weights[name], rtol=1e-10, atol=1e-10, msg=lambda t, n=name: f"{case} {n} {t}"
        )


def one_process(kind, folder, **options):
    module = kind()
    losses, metrics, _ = fitted(module, folder, devices=1, **options)
    return losses, metrics, weights_of(module)


def fit(kind, mesh, options, steps, expected, folder):
    module = kind()
    plan = strategy.AutopartStrategy(mesh, **options)
    rows = cases.ROWS // plan.num_data_ranks
    results = fitted(module, folder, rows, devices=plan._mesh.num_ranks, strategy=plan, **steps)
    check(module, results, expected, f"{kind.__name__} {mesh} {options}")
    return [type(one).__name__ for one in module.children()]


@pytest.mark.parametrize("case", [pytest.param(m, marks=() if m in FAST else pytest.mark.large) for m in MESHES])
def test_fit_equals_one_process(case, tmp_path):
    mesh = case.split()[0]
    steps = {**STEPS, "shuffle": "local" not in case}  # a distributed sampler shuffles in another order
    steps |= {"use_distributed_sampler": False} if "local" in case else {}  # Lightning's own sampler always shuffles
    expected = one_process(Language, tmp_path, **steps)
    size = autopart.Mesh.parse(mesh).num_ranks
    kinds = dist.run_ranks(fit, size, Language, mesh, MESHES[case], steps, expected, str(tmp_path), timeout_s=TIMEOUT_S,
                           init=False)  # fmt: skip
    assert kinds == [["ParallelModule"]] * size


@pytest.mark.large
@pytest.mark.parametrize("kind", [Manual, Images, Adversarial])
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_other_modules_equal_one_process(kind, mesh, tmp_path):
    expected = one_process(kind, tmp_path, max_epochs=2)
    dist.run_ranks(fit, 2, kind, mesh, {}, {"max_epochs": 2}, expected, str(tmp_path), timeout_s=TIMEOUT_S, init=False)


@pytest.mark.large
@pytest.mark.parametrize(("kind", "case"), [
    (TwoOptimizers, "pp2"), (TwoOptimizers, "dp2 zero3"), (OutsideLoss, "dp2 local"),
])  # fmt: skip
def test_manual_steps_and_outside_losses(kind, case, tmp_path):
    steps = {"max_epochs": 2} | ({"shuffle": False, "use_distributed_sampler": False} if "local" in case else {})
    expected = one_process(kind, tmp_path, **steps)
    dist.run_ranks(fit, 2, kind, case.split()[0], MESHES[case], steps, expected, str(tmp_path), timeout_s=TIMEOUT_S,
                   init=False)  # fmt: skip


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save(mesh, options, folder):
    made = fitted(Language(), folder, devices=2, strategy=strategy.AutopartStrategy(mesh, **options), **STEPS,
                  shuffle=False, enable_checkpointing=True, limit_val_batches=0,
                  callbacks=[L.callbacks.ModelCheckpoint(folder, "saved-{epoch}", save_top_k=-1)])[2]  # fmt: skip
    return made.is_global_zero


def resume(mesh, options, folder, expected):
    module, plan = Language(), strategy.AutopartStrategy(mesh, **options)
    made = trainer(folder, devices=2, strategy=plan, **STEPS)
    made.fit(module, loader(24), ckpt_path=f"{folder}/saved-epoch=0.ckpt")
    assert made.global_step == 6 and module.seen == pytest.approx(expected[0][6:], rel=1e-10)
    for name, value in weights_of(module).items():
        torch.testing.assert_close(value, expected[2][name], rtol=1e-10, atol=1e-10)


@pytest.mark.large
@pytest.mark.parametrize(
    ("saved_on", "resumed_on"),
    [
        ("tp2", "dp2 zero3"),
        ("dp2 zero3", "pp2"),
        ("pp2", "tp2"),
        ("pp2", "pp2"),
    ],
)
def test_checkpoints_on_another_mesh(saved_on, resumed_on, tmp_path):
    expected = one_process(Language, tmp_path, shuffle=False, **STEPS, limit_val_batches=0)
    dist.run_ranks(save, 2, saved_on.split()[0], MESHES[saved_on], str(tmp_path), timeout_s=TIMEOUT_S, init=False)
    assert (Path(tmp_path) / "saved-epoch=0.ckpt" / "autopart").is_dir()
    dist.run_ranks(resume, 2, resumed_on.split()[0], MESHES[resumed_on], str(tmp_path), expected, timeout_s=TIMEOUT_S,
                   init=False)  # fmt: skip


# --- refused ---------------------------------------------------------------------------------------------------------


class Uncalled(Language):
    """A LightningModule with a submodule that training_step does not call."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(2, 2)


class OwnLoss(Language):
    """A loss of the model's logits, which a pipeline cannot differentiate."""

    def training_step(self, batch, batch_idx):
        return self.model(**batch).logits.square().mean()


def refusals(folder):
    texts = []
    for kind, mesh, options, steps in (
        (Uncalled, "tp2", {}, {}), (OwnLoss, "pp2", {}, {}),
        (Language, "tp2", {"precision": "fp16"}, {"precision": "bf16-mixed"}),
        (Language, "pp2", {}, {"callbacks": [L.callbacks.StochasticWeightAveraging(1e-3)]}),
        (Language, "pp2", {}, {"callbacks": [L.callbacks.EMAWeightAveraging()]}),
    ):  # fmt: skip
        made = trainer(folder, devices=2, strategy=strategy.AutopartStrategy(mesh, **options), max_epochs=1, **steps)
        with pytest.raises(UsageError) as error:
            made.fit(kind(), loader(8))
        texts.append(str(error.value))
    return texts


@pytest.mark.large
def test_refused_uses(tmp_path):
    for texts in dist.run_ranks(refusals, 2, str(tmp_path), timeout_s=TIMEOUT_S, init=False):
        assert texts[0] == (
            """training_step does not call teacher
  why    AutopartStrategy traces a submodule at its first call
  try    AutopartStrategy(mesh, modules=('model',)) with the names of the submodules that are called"""
        )
        assert texts[1].splitlines()[0] == "the loss is computed from outputs of a model on a pipeline"
        assert texts[2].splitlines()[0] == (
            "Trainer(precision='bf16-mixed') and AutopartStrategy(precision='fp16') differ"
        )
        assert texts[4].splitlines()[0] == "EMAWeightAveraging does not work on a mesh with pp"
        assert texts[3] == (
            """StochasticWeightAveraging does not work on a mesh with pp
  why    it averages a copy of the model, and each stage has other parameters
  try    a mesh without pp"""
        )

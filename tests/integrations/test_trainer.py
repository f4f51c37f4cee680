"""transformers' Trainer on partitioned models: logs, weights and checkpoints equal those of one process."""

import copy
import functools
import inspect

import dist
import pytest
import torch
import trainer_cases as cases
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import autopart
from autopart.errors import UsageError

TIMEOUT_S = 280.0
MESHES = {
    "tp2": {}, "pp2": {}, "dp2": {}, "dp2 zero3": {"zero": 3}, "dp2 local": {"local_batch": True}, "dp2,tp2": {},
    "pp2,tp2": {"microbatches": 2},
}  # fmt: skip
FAST = ("tp2", "dp2 zero3")
CHECKPOINTS = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 3,
}  # fmt: skip


@functools.cache
def plain(num_data_ranks, dropout=0.0, num_eval=cases.NUM_EVAL):
    """Return (log, weights) of one process that trains on the batches of all data ranks."""
    cases.forget_processes()
    rows = cases.ROWS * num_data_ranks
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    made = cases.trainer(cases.gpt2(dropout), "unused", num_eval=num_eval, **sizes)
    return cases.trained(made), copy.deepcopy(made.model.state_dict())


def train(mesh, options, expected, dropout, num_eval=cases.NUM_EVAL):
    cases.forget_processes()
    pm = cases.partitioned(mesh, dropout, **options)
    made = cases.trainer(pm, "unused", num_eval=num_eval)
    log, weights = expected
    wrong = cases.differences(cases.trained(made), log)
    assert not wrong, (mesh, options, wrong)
    cases.check_weights(pm, weights, mesh)
    assert isinstance(made, Trainer) and made.label_names == ["labels"] and made.model is pm
    return made.get_total_train_batch_size(made.args)


@pytest.mark.parametrize("case", [pytest.param(m, marks=() if m in FAST else pytest.mark.large) for m in MESHES])
def test_training_equals_one_process(case):
    mesh = case.split()[0]
    sizes = autopart.Mesh.parse(mesh)
    # With local batches, accelerate fills the last batch with samples of the first, which then count in the loss.
    num_eval = 16 if "local" in case else cases.NUM_EVAL
    expected = plain(sizes.data_parallel_size, num_eval=num_eval)
    totals = dist.run_ranks(train, sizes.num_ranks, mesh, MESHES[case], expected, 0.0, num_eval, timeout_s=TIMEOUT_S)
    assert totals == [2 * cases.ROWS * sizes.data_parallel_size] * sizes.num_ranks


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2"])
def test_dropout_equals_one_process(mesh):
    expected = plain(autopart.Mesh.parse(mesh).data_parallel_size, 0.2)
    dist.run_ranks(train, 2, mesh, {"rng": "exact"}, expected, 0.2, timeout_s=TIMEOUT_S)


def folder_of(base, step):
    return f"{base}/checkpoint-{step}"


@functools.cache
def plain_with_checkpoints(num_data_ranks, folder):
    cases.forget_processes()
    rows = cases.ROWS * num_data_ranks
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    made = cases.trainer(cases.gpt2(0.2), f"{folder}/plain{num_data_ranks}", **CHECKPOINTS, **sizes)
    return cases.trained(made), copy.deepcopy(made.model.state_dict()), made.state.best_metric


def save_checkpoints(mesh, options, base, expected):
    """Train to the end, and load the best model; the folders load on one device with equal outputs."""
    cases.forget_processes()
    pm = cases.partitioned(mesh, 0.2, rng="exact", **options)
    made = cases.trainer(pm, base, **CHECKPOINTS)
    log, weights, best = expected
    wrong = cases.differences(cases.trained(made), log)
    assert not wrong, (mesh, options, wrong)
    assert abs(made.state.best_metric - best) < 1e-10
    cases.check_weights(pm, weights, f"{mesh}, the best model")
    made.save_model()
    pm.eval()
    with torch.no_grad():
        logits = pm(**cases.batch()).logits
    return logits, made.state.best_model_checkpoint


def resume(mesh, options, base, step, expected):
    """Resume from a checkpoint of another mesh: the same end as one process that never stopped."""
    cases.forget_processes()
    pm = cases.partitioned(mesh, 0.2, rng="exact", **options)
    made = cases.trainer(pm, f"{base}/resumed", **CHECKPOINTS)
    log = cases.trained(made, resume_from_checkpoint=folder_of(base, step))
    log[-1]["train_loss"] = expected[0][-1]["train_loss"]  # that of the steps since the checkpoint
    wrong = cases.differences(log, expected[0])
    assert not wrong, (mesh, options, wrong)
    cases.check_weights(pm, expected[1], f"{mesh}, resumed")


@pytest.mark.large
@pytest.mark.parametrize(("saved_on", "resumed_on", "zero"), [
    ("tp2", "pp2", 0), ("pp2", "tp2", 0), ("tp2", "pp2,tp2", 0), ("dp2", "dp2,tp2", 3), ("dp2,tp2", "dp2", 3),
])  # fmt: skip
def test_checkpoints_on_another_mesh(saved_on, resumed_on, zero, tmp_path):
    sizes = autopart.Mesh.parse(saved_on)
    expected = plain_with_checkpoints(sizes.data_parallel_size, str(tmp_path))
    options = {"zero": zero} if zero else {}
    base = str(tmp_path / saved_on)
    results = dist.run_ranks(save_checkpoints, sizes.num_ranks, saved_on, options, base, expected, timeout_s=TIMEOUT_S)
    logits, best = results[0]
    loaded = cases.DoubleGPT2.from_pretrained(best).eval()
    assert loaded.dtype == torch.float64 and loaded.config.architectures == ["DoubleGPT2"]
    torch.testing.assert_close(loaded(**cases.batch()).logits, logits, rtol=1e-10, atol=1e-10)
    assert isinstance(GPT2LMHeadModel.from_pretrained(base), GPT2LMHeadModel)
    ranks = autopart.Mesh.parse(resumed_on).num_ranks
    dist.run_ranks(resume, ranks, resumed_on, options, base, 2, expected, timeout_s=TIMEOUT_S)


class Counts(TrainerCallback):
    """Callback that counts its calls, and stops training after three steps."""

    def __init__(self):
        self.steps, self.models = 0, set()

    def on_step_end(self, args, state, control, model=None, **_):
        self.steps += 1
        self.models.add(type(model).__name__)
        control.should_training_stop = state.global_step == 3


class OwnLoss(Trainer):
    """Trainer with a loss of its own: the model's, and a penalty on the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.1 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def summed_loss(outputs, labels, num_items_in_batch):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


FEATURES = {
    "loss function": ({}, {"compute_loss_func": summed_loss}, Trainer),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, Trainer),
    "own loss": ({}, {}, OwnLoss),
    "callbacks": ({}, {"callbacks": [Counts()]}, Trainer),
    "early stopping": (
        {"load_best_model_at_end": True, "metric_for_best_model": "rows", "save_strategy": "epoch"},
        {"callbacks": [EarlyStoppingCallback(1)]}, Trainer,
    ),
    "groups by length": ({"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1}, {}, Trainer),
    "sgd, no clipping": ({"optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 4}, {}, Trainer),
}  # fmt: skip


def feature(name, model, folder, num_data_ranks=1, **more):
    arguments, options, kind = FEATURES[name]
    rows = cases.ROWS * num_data_ranks
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    return cases.trainer(model, folder, kind, copy.deepcopy(options), **{**arguments, **sizes, **more})


def train_with_feature(name, mesh, expected, folder, local_batch=False, **more):
    log, weights = expected
    cases.forget_processes()
    pm = cases.partitioned(mesh, local_batch=local_batch)
    made = feature(name, pm, folder, **more)
    wrong = cases.differences(cases.trained(made), log)
    assert not wrong, (mesh, name, wrong)
    cases.check_weights(pm, weights, f"{mesh} {name}")
    counts = [one for one in made.callback_handler.callbacks if isinstance(one, Counts)]
    assert all((one.steps, one.models) == (3, {"ParallelModule"}) for one in counts)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_the_trainer(name, mesh, tmp_path):
    cases.forget_processes()
    made = feature(name, cases.gpt2(), tmp_path / "plain", autopart.Mesh.parse(mesh).data_parallel_size)
    expected = cases.trained(made), copy.deepcopy(made.model.state_dict())
    dist.run_ranks(train_with_feature, 2, name, mesh, expected, str(tmp_path / mesh), timeout_s=TIMEOUT_S)


@pytest.mark.large
@pytest.mark.parametrize("name", ["own loss", "loss function"])
def test_own_loss_of_local_batches(name, tmp_path):
    cases.forget_processes()
    more = {"eval_strategy": "no"}
    made = feature(name, cases.gpt2(), tmp_path / "plain", 2, **more)
    expected = cases.trained(made), copy.deepcopy(made.model.state_dict())
    dist.run_ranks(train_with_feature, 2, name, "dp2", expected, str(tmp_path), True, timeout_s=TIMEOUT_S, **more)


def with_adafactor(model, folder, num_data_ranks=1):
    """Trainer that updates with Adafactor all but the attention biases.

    The gradient of a key's bias is a rounding error around zero, which Adafactor scales to a full update.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("c_attn.bias"))
    rows = cases.ROWS * num_data_ranks
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    return cases.trainer(model, folder, optim="adafactor", **sizes)


def train_with_adafactor(mesh, expected, folder):
    log, weights = expected
    cases.forget_processes()
    pm = cases.partitioned(mesh)
    wrong = cases.differences(cases.trained(with_adafactor(pm, folder)), log)
    assert not wrong, (mesh, wrong)
    cases.check_weights(pm, weights, f"{mesh} adafactor")


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_adafactor_of_the_trainer(mesh, tmp_path):
    cases.forget_processes()
    made = with_adafactor(cases.gpt2(), tmp_path / "plain", autopart.Mesh.parse(mesh).data_parallel_size)
    expected = cases.trained(made), copy.deepcopy(made.model.state_dict())
    dist.run_ranks(train_with_adafactor, 2, mesh, expected, str(tmp_path / mesh), timeout_s=TIMEOUT_S)


# --- refused ---------------------------------------------------------------------------------------------------------


def refusals():
    """One rank: what Trainer cannot do with a partitioned model is refused by name, before training."""
    pm = cases.partitioned("tp2")
    texts = {}
    for name, arguments in REFUSED.items():
        cases.forget_processes()
        with pytest.raises(UsageError) as error:
            cases.trainer(pm, "unused", **arguments)
        texts[name] = str(error.value)
    return texts


REFUSED = {
    "activation_checkpointing": {"activation_checkpointing": True},
    "torch_compile": {"torch_compile": True},
    "bf16": {"bf16": True},
    "neftune": {"neftune_noise_alpha": 5.0},
}


def refusals_on_a_pipeline():
    cases.forget_processes()
    made = cases.trainer(cases.partitioned("pp2"), "unused", OwnLoss)
    with pytest.raises(UsageError) as error:
        made.train()
    return str(error.value)


@pytest.mark.large
def test_refused_options():
    for texts in dist.run_ranks(refusals, 2, timeout_s=TIMEOUT_S):
        assert texts["activation_checkpointing"] == (
            """TrainingArguments(activation_checkpointing=True) does not work with a partitioned model
  why    the option changes a model that is not partitioned
  try    parallelize(..., recompute='full')"""
        )
        assert texts["bf16"] == (
            """bf16 mixed precision is requested, and the model is partitioned with precision=None
  why    the compute dtype is a part of the partitioned model's programs
  try    parallelize(..., precision='bf16')"""
        )
        assert "parallelize(..., compile=True)" in texts["torch_compile"]
        assert "neftune_noise_alpha" in texts["neftune"]
    (text, _) = dist.run_ranks(refusals_on_a_pipeline, 2, timeout_s=TIMEOUT_S)
    assert text.startswith("OwnLoss.compute_loss() does not work with pp or precision='fp16'")


def test_a_trainer_of_other_models_is_unchanged():
    cases.forget_processes()
    made = cases.trainer(cases.gpt2(), "unused")
    assert type(made) is Trainer and type(made.accelerator).__name__ == "Accelerator"
    assert inspect.signature(Trainer.__init__).parameters["model"].default is None
    assert TrainingArguments(output_dir="unused", use_cpu=True).world_size == 1

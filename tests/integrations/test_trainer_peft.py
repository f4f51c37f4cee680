"""Trainer with PEFT on partitioned models: adapters equal those of one process, and are saved as PEFT saves them."""

import copy

import dist
import pytest
import torch
import trainer_cases as cases
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
)

import autopart
from autopart.errors import CheckpointError

TIMEOUT_S = 280.0
LOSS_ONLY = {"compute_metrics": None}  # virtual tokens make the logits longer than the labels
CONFIGS = {
    "lora": lambda: LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    "dora": lambda: LoraConfig(
        r=2,
        target_modules=["c_fc"],
        fan_in_fan_out=True,
        use_dora=True,
        modules_to_save=["ln_f"],
        task_type="CAUSAL_LM",
    ),
    "ia3": lambda: IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
}


def adapted(name):
    model = cases.gpt2()
    torch.manual_seed(1)
    return get_peft_model(model, CONFIGS[name]()).double()  # PEFT creates some adapters in float32


def train_adapter(name, mesh, options, base, expected):
    log, weights = expected
    cases.forget_processes()
    folder = f"{base}/{name}"
    pm = autopart.parallelize(adapted(name), mesh, example_kwargs=cases.batch(), **options)
    made = cases.trainer(pm, folder, options=LOSS_ONLY, num_train_epochs=1, save_strategy="steps", save_steps=1)
    wrong = cases.differences(cases.trained(made), log)
    assert not wrong, (mesh, name, wrong)
    cases.check_weights(pm, weights, f"{mesh} {name}")
    cases.forget_processes()
    again = autopart.parallelize(adapted(name), mesh, example_kwargs=cases.batch(), **options)
    made = cases.trainer(again, folder, options=LOSS_ONLY, num_train_epochs=1)
    cases.trained(made, resume_from_checkpoint=f"{folder}/checkpoint-1")
    cases.check_weights(again, weights, f"{mesh} {name}, resumed")
    again.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors"):
        again.load_pretrained(base)


@pytest.mark.large
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", ["tp2", "pp2", "dp2 zero3"])
def test_adapters_equal_those_of_one_process(case, name, tmp_path):
    mesh, options = case.split()[0], {"zero": 3} if "zero3" in case else {}
    rows = cases.ROWS * autopart.Mesh.parse(mesh).data_parallel_size
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    cases.forget_processes()
    made = cases.trainer(adapted(name), tmp_path / "plain", options=LOSS_ONLY, num_train_epochs=1, **sizes)
    log, weights = cases.trained(made), copy.deepcopy(made.model.state_dict())
    dist.run_ranks(train_adapter, 2, name, mesh, options, str(tmp_path), (log, weights), timeout_s=TIMEOUT_S)
    model = adapted(name)
    model.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(cases.gpt2(), tmp_path / name, autocast_adapter_dtype=False).double()
    saved = load_peft_weights(str(tmp_path / name), device="cpu")
    for key, value in get_peft_model_state_dict(model, save_embedding_layers=False).items():
        torch.testing.assert_close(saved[key], value, rtol=1e-10, atol=1e-10, msg=f"{name} {key}")
    with torch.no_grad():
        right, got = model.eval()(**cases.batch()).logits, loaded.eval()(**cases.batch()).logits
    tolerance = 1e-5 if model.peft_config["default"].is_prompt_learning else 1e-10  # PEFT loads prompts as float32
    torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance, msg=name)

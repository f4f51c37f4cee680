"""TRL's SFTTrainer, DPOTrainer and RewardTrainer on partitioned models: logs and weights equal those of one process."""

import copy
import importlib

import dist
import pytest
import torch
import trainer_cases as cases
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

import autopart
from autopart.errors import UsageError
from autopart.integrations.trl import NAME, add_parallel_head

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

TIMEOUT_S = 280.0
WORDS = [f"t{index}" for index in range(cases.VOCABULARY - 2)]


def tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def text(seed, length):
    ids = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in ids)


def rewards():
    torch.manual_seed(0)
    sizes = {"vocab_size": cases.VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=0, use_cache=False)
    return LlamaForSequenceClassification(config)


def common(folder, rows):
    return {"output_dir": str(folder), "per_device_train_batch_size": rows, "max_steps": 4, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
            "learning_rate": 1e-2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "save_strategy": "no",
            "seed": 0, "lr_scheduler_type": "cosine"}  # fmt: skip


def sft(model, folder, rows):
    data = datasets.Dataset.from_dict({"input_ids": [[2 + i % 60 for i in range(s, s + 12)] for s in range(48)]})
    args = trl.SFTConfig(**common(folder, rows), max_length=12)
    return trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())


def pairs(size):
    return datasets.Dataset.from_dict({
        "prompt": [text(index, 4) + " " for index in range(size)],
        "chosen": [text(100 + index, 5) for index in range(size)],
        "rejected": [text(200 + index, 5) for index in range(size)],
    })  # fmt: skip


def dpo(model, folder, rows, reference=None):
    args = trl.DPOConfig(**common(folder, rows), beta=0.3)
    return trl.DPOTrainer(model, reference, args, train_dataset=pairs(48), processing_class=tokenizer())


def reward(model, folder, rows):
    data = pairs(48).map(lambda row: {side: row["prompt"] + row[side] for side in ("chosen", "rejected")})
    data = data.remove_columns("prompt")
    args = trl.RewardConfig(**common(folder, rows))
    return trl.RewardTrainer(model, args, train_dataset=data, processing_class=tokenizer())


TRAINERS = {"sft": sft, "dpo": dpo, "reward": reward}
EXAMPLES = {"sft": lambda rows: cases.batch(rows), "dpo": lambda rows: cases.batch(2 * rows)}
COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "rewards/margins", "num_tokens",
            "logits/chosen", "accuracy", "mean_reward", "margin")  # fmt: skip


def models_of(name, make=lambda model: model):
    """Return the model of a trainer, and the reference model of DPO, both transformed by `make`."""
    if name == "reward":
        return (make(rewards()),)
    return (make(cases.gpt2()), make(cases.gpt2())) if name == "dpo" else (make(cases.gpt2()),)


def trained(name, given, folder, rows):
    made = TRAINERS[name](given[0], folder, rows, *given[1:])
    return cases.trained(made), made


def one_process(name, folder, rows, head):
    """Train in one process, with TRL's own head or with the head that partitioned models get."""
    cases.forget_processes()
    module = importlib.import_module(f"trl.trainer.{name}_trainer")
    original = getattr(module, NAME, None)
    if head is not None and original is not None:
        setattr(module, NAME, head)
    try:
        log, made = trained(name, models_of(name), folder, rows)
    finally:
        if original is not None:
            setattr(module, NAME, original)
    return log, copy.deepcopy(made.model.state_dict())


def differences(log, expected, tolerance):
    assert len(log) == len(expected), (log, expected)
    return [(name, got[name], right[name]) for got, right in zip(log, expected, strict=True) for name in COMPARED
            if name in right and abs(got[name] - right[name]) > tolerance * max(1.0, abs(right[name]))]  # fmt: skip


def train(name, mesh, options, folder, expected, own):
    cases.forget_processes()
    rows = cases.ROWS // autopart.Mesh.parse(mesh).data_parallel_size
    batch = cases.batch(cases.ROWS * (1 if name == "sft" else 2))
    example = {"input_ids": batch["input_ids"]} if name == "reward" else batch

    def partition(model):
        return autopart.parallelize(model, mesh, example_kwargs=example, **options)

    log, made = trained(name, models_of(name, partition), folder, rows)
    tolerance = 1e-10 if name != "reward" else 1e-5
    wrong = differences(log, expected[0], tolerance)
    assert not wrong, (name, mesh, wrong)
    wrong = differences(log, own[0], 1e-4)
    assert not wrong, (name, mesh, "TRL's own head", wrong)
    for key, value in made.model.full_state_dict().items():
        torch.testing.assert_close(
            value, expected[1][key], rtol=tolerance, atol=tolerance, msg=lambda t, k=key: f"{k} {t}"
        )


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "dp2 zero3"])
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_equal_one_process(name, mesh, tmp_path):
    mesh, options = mesh.split()[0], {"zero": 3} if "zero3" in mesh else {}
    expected = one_process(name, tmp_path, cases.ROWS, add_parallel_head)
    own = one_process(name, tmp_path, cases.ROWS, None)
    dist.run_ranks(train, 2, name, mesh, options, str(tmp_path), expected, own, timeout_s=TIMEOUT_S)


def refusals(folder):
    cases.forget_processes()
    texts = []
    made = sft(autopart.parallelize(cases.gpt2(), "pp2", example_kwargs=cases.batch()), folder, cases.ROWS)
    with pytest.raises(UsageError) as error:
        made.train()
    texts.append(str(error.value).splitlines()[0])
    cases.forget_processes()
    from peft import LoraConfig, get_peft_model

    with pytest.raises(UsageError) as error:
        get_peft_model(made.model, LoraConfig(target_modules=["c_attn"]))
    return [*texts, str(error.value)]


@pytest.mark.large
def test_refused_uses(tmp_path):
    for texts in dist.run_ranks(refusals, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        assert texts == [
            "SFTTrainer.compute_loss() does not work with pp or precision='fp16'",
            "an adapter of PEFT cannot be added to a partitioned model\n"
            "  why    its programs were traced without the adapter\n"
            "  try    add it first: pm = parallelize(get_peft_model(model, config), mesh, ...)",
        ]

"""The command line, by click's runner where one process does, by subprocess where the process itself is tested."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import zoo
from click.testing import CliRunner

import autopart
from autopart import simulate
from autopart.cli.main import main
from autopart.options import Options
from autopart.plans.plan import Plan, schema
from autopart.recipe.model_source import SourceOptions, from_hf_config

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32, **TOKENS}
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


# Callables for --model


def gpt2():
    return zoo.gpt2(exact=False)


def model_only():
    return torch.nn.Linear(4, 4)


def no_model():
    return 3, 4


def on_any_device():
    """A model that is made on the default device."""
    return zoo.SkipMLP(4, 32), {"x": torch.randn(8, 32), "y": torch.randn(8, 32)}


NOT_CALLABLE = 3


def words(text):
    """Text without its line breaks and columns."""
    return " ".join(text.split())


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def config(tmp_path):
    """Writes a config.json."""

    def write(entries):
        path = tmp_path / "config.json"
        path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
        return path

    return write


# plan and explain


@pytest.mark.large
def test_plan_to_standard_output(config):
    result = invoke("plan", "--hf-config", config(GPT2), "--mesh", "pp2,tp2")
    assert result.exit_code == 0, result.output
    plan = Plan.from_json(result.stdout)
    assert plan.mesh == {"pp": 2, "tp": 2} and plan.inputs["input_ids"]["shape"] == [8, 32]


@pytest.mark.large
def test_plan_to_a_file_with_options_then_explain(config, tmp_path):
    path = tmp_path / "plan.json"
    result = invoke("plan", "--hf-config", config(GPT2), "--mesh", "pp2", "--schedule", "gpipe", "--microbatches", 2,
                    "--batch", 4, "--sequence", 16, "--recompute", "*.1=full", "-o", path)  # fmt: skip
    assert result.exit_code == 0 and f"wrote {path}" in result.output
    plan = Plan.load(path)
    assert plan.recompute == {"*.1": "full"}
    assert (plan.schedule.name, plan.schedule.microbatches) == ("gpipe", 2)
    assert plan.inputs["labels"]["shape"] == [4, 16]
    assert invoke("explain", path).output == plan.explain()
    assert invoke("simulate", path).output == f"{simulate(plan)}\n"
    assert json.loads(invoke("simulate", path, "--json").output) == simulate(plan).as_data()


def test_explain_a_model():
    result = invoke("explain", "--model", "test_cli:gpt2", "--mesh", "tp2")
    assert result.exit_code == 0, result.output
    assert "c_attn.weight S(1; sections=3)" in result.output


def test_a_callable_is_made_on_meta_where_asked():
    result = invoke("plan", "--model", "test_cli:on_any_device", "--mesh", "tp2", "--meta", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert Plan.from_json(result.stdout).inputs["x"]["dtype"] == "bfloat16"


def test_schema_needs_nothing_else():
    result = invoke("plan", "--schema")
    assert result.exit_code == 0 and json.loads(result.output) == schema()


@pytest.mark.large
@pytest.mark.timeout(180)
def test_plan_of_a_seven_billion_parameter_llama(config, tmp_path):
    path = tmp_path / "plan.json"
    start_s = time.perf_counter()
    result = invoke("plan", "--hf-config", config(LLAMA_7B), "--mesh", "pp8,tp8", "--sequence", "128", "-o", path)
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start_s < 120
    plan = Plan.load(path)
    assert plan.model["num_parameters"] == 6_738_415_616
    assert path.stat().st_size < 130_000
    text = plan.explain()
    assert max(map(len, text.splitlines())) <= 120 and "6.74 billion" in text
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("entries", "name", "inputs"),
    [
        ({"model_type": "bert"}, "BertForMaskedLM", {"input_ids", "labels"}),
        ({"model_type": "t5"}, "T5ForConditionalGeneration", {"input_ids", "labels"}),
        ({"model_type": "llama", "torch_dtype": "bfloat16"}, "LlamaForCausalLM", {"input_ids", "labels"}),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel", {"input_ids"}),
    ],
)
def test_class_and_inputs_of_a_config(config, entries, name, inputs):
    source = from_hf_config(config(entries), SourceOptions(meta=True))
    assert type(source.model).__name__ == name and set(source.example) == inputs
    assert all(p.is_meta for p in source.model.parameters())
    dtype = torch.bfloat16 if "torch_dtype" in entries else torch.float32
    assert {p.dtype for p in source.model.parameters()} == {dtype}
    assert torch.get_default_dtype() == torch.float32


def test_seed_and_dtype_of_a_config(config):
    path = config(GPT2)
    first, again, other = (from_hf_config(path, SourceOptions(seed=s, dtype="float64")) for s in (0, 0, 1))
    assert torch.equal(first.model.lm_head.weight, again.model.lm_head.weight)
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)
    assert torch.equal(first.example["input_ids"], again.example["input_ids"])
    assert first.model.lm_head.weight.dtype == torch.float64
    assert not (first.example["input_ids"] == TOKENS["pad_token_id"]).any()


# verify


@pytest.mark.large
def test_verify_a_config_and_a_plan(config, tmp_path):
    path, plan = config(GPT2), tmp_path / "plan.json"
    assert invoke("plan", "--hf-config", path, "--mesh", "pp2,tp2", "-o", plan).exit_code == 0
    result = invoke("verify", "--hf-config", path, "--plan", plan)
    assert result.exit_code == 0 and result.stdout.startswith("exact on pp2,tp2"), result.output


@pytest.mark.large
def test_verify_without_dropout(config):
    result = invoke("verify", "--hf-config", config(GPT2), "--mesh", "tp2", "--rng", "fast")
    assert result.exit_code == 0 and "eval mode" in result.output, result.output


def test_verify_exits_with_1_where_values_differ(config):
    result = invoke("verify", "--hf-config", config(GPT2), "--mesh", "tp2", "--tolerance", 0)
    assert result.exit_code == 1 and result.stdout.startswith("WRONG on tp2"), result.output


# run


@pytest.mark.large
@pytest.mark.parametrize("rng", ["fast", "exact"])
def test_run_in_one_process(config, rng):
    result = invoke("run", "--hf-config", config(GPT2), "--mesh", "dp1", "--steps", 2, "--compare", "--rng", rng)
    assert result.exit_code == 0, result.output
    check_steps(result.stdout, 2)


@pytest.mark.large
def test_run_under_torchrun(config):
    path = config({**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "autopart"]
    done = process(*command, "run", "--hf-config", path, "--mesh", "pp2", "--steps", "2", "--compare", timeout_s=150)
    assert done.returncode == 0, done.stderr
    check_steps(done.stdout, 2)


def check_steps(text, num_steps):
    """Every step once, the plain model's loss beside it, and the loss goes down."""
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    assert [int(line[1]) for line in lines] == list(range(1, num_steps + 1)), text
    losses, plain = [float(line[3]) for line in lines], [float(line[8]) for line in lines]
    assert losses == pytest.approx(plain, abs=1e-4) and losses[-1] < losses[0]


def test_check_steps_can_fail():
    with pytest.raises(AssertionError):
        check_steps("step 1 loss 2.0 0.1 s plain model 3.0\nstep 2 loss 1.0 0.1 s plain model 1.0", 2)
    with pytest.raises(AssertionError):
        check_steps("step 1 loss 2.0 0.1 s plain model 2.0", 2)


# Errors

ERRORS = [
    (["plan", "--mesh", "tp2"], "exactly one of --model and --hf-config is needed\n  try    --model"),
    (["plan", "--model", "test_cli:gpt2", "--mesh", "tp2", "--memory", "100kB"], "on a rank, and memory is 100 kB\n"),
    (["plan", "--model", "test_cli:gpt2", "--hf-config", "c.json", "--mesh", "tp2"], "exactly one of --model and "
     "--hf-config is needed"),
    (["plan", "--model", "test_cli:gpt2"], "no mesh is named\n  try    --mesh pp2,dp2,tp2"),
    (["plan", "--model", "test_cli:gpt2", "--mesh", "xx2"], "unknown mesh axis 'xx'"),
    (["plan", "--model", "test_cli", "--mesh", "tp2"], "--model test_cli names no callable"),
    (["plan", "--model", "no_such.module:f", "--mesh", "tp2"], "no_such.module:f: there is no module 'no_such'"),
    (["plan", "--model", "test_cli:missing", "--mesh", "tp2"], "--model test_cli:missing: 'test_cli' has no 'missing'"),
    (["plan", "--model", "test_cli:NOT_CALLABLE", "--mesh", "tp2"], "is a int, not a callable"),
    (["plan", "--model", "test_cli:no_model", "--mesh", "tp2"], "test_cli:no_model() returned a tuple of int, int"),
    (["plan", "--model", "test_cli:model_only", "--mesh", "tp2"], "--model test_cli:model_only returns no example "
     "inputs"),
    (["plan", "--model", "test_cli:gpt2", "--mesh", "tp2", "--batch", "4"], "--batch only applies to --hf-config"),
    (["plan", "--model", "test_cli:gpt2", "--mesh", "tp2", "--hardware", "abacus"], "no hardware profile 'abacus'"),
    (["plan", "--model", "test_cli:gpt2", "--mesh", "tp2", "-o", "no/such/dir/plan.json"], "cannot write no/such/dir/"),
    (["plan", "--hf-config", "missing.json", "--mesh", "tp2"], "there is no config at missing.json"),
    (["explain", "missing.json"], "there is no plan at missing.json"),
    (["explain", "plan.json", "--model", "test_cli:gpt2"], "explain takes a plan or a model, not both"),
    (["explain"], "no mesh is named"),
    (["verify", "--model", "test_cli:gpt2"], "no mesh is named"),
    (["verify", "--model", "test_cli:gpt2", "--plan", "p.json", "--schedule", "1f1b"],
     "--schedule cannot be combined with --plan"),
    (["run", "--model", "test_cli:gpt2", "--mesh", "tp2"], "mesh tp2 needs 2 processes"),
]  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=[text[:40] for _, text in ERRORS])
def test_errors_are_texts(arguments, text):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert words(text) in words(result.stderr) and "Traceback" not in result.output
    assert max(map(len, result.stderr.splitlines())) <= 80


CONFIG_ERRORS = [
    ('{"model_type": ', "is not JSON"),
    ("[]", "is not a transformers config"),
    ({"n_layer": 2}, "is not a transformers config"),
    ({"model_type": "abacus"}, "has no model_type 'abacus'"),
    ({**GPT2, "architectures": ["NoSuchClass"]}, "has no class 'NoSuchClass'"),
    ({"model_type": "vit"}, "has no language model for model_type 'vit'"),
    ({"model_type": "vit", "architectures": ["ViTModel"]}, "there are no example inputs for ViTModel"),
    ({**GPT2, "architectures": ["GPT2ForSequenceClassification"]}, "there are no example inputs for GPT2ForSeq"),
]


@pytest.mark.parametrize(("entries", "text"), CONFIG_ERRORS, ids=[text[:40] for _, text in CONFIG_ERRORS])
def test_config_errors_are_texts(config, entries, text):
    result = invoke("plan", "--hf-config", config(entries), "--mesh", "tp2")
    assert result.exit_code == 2, result.output
    assert text in words(result.stderr)


def test_a_sequence_that_is_too_long(config):
    result = invoke("plan", "--hf-config", config(GPT2), "--mesh", "tp2", "--sequence", 64)
    assert result.exit_code == 2
    assert "--sequence 64 is too long for GPT2LMHeadModel why its config allows at most 32 tokens" in words(
        result.stderr
    )


def test_transformers_that_is_missing_is_named(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("plan", "--hf-config", config(GPT2), "--mesh", "tp2")
    assert result.exit_code == 2 and "--hf-config needs transformers" in result.stderr


# The process


def process(*command, timeout_s=60):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(part) for part in command]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)


def test_python_m_autopart():
    done = process(sys.executable, "-m", "autopart", "--version")
    assert done.stdout.strip() == f"autopart, version {autopart.__version__}", done.stderr


@pytest.mark.large
def test_python_m_autopart_exits_with_2():
    done = process(sys.executable, "-m", "autopart", "plan", "--mesh", "tp2")
    assert done.returncode == 2 and done.stderr.startswith("exactly one of --model and --hf-config is needed"), (
        done.stderr
    )


def test_import_does_not_need_transformers():
    code = "import sys, autopart, autopart.cli.main; sys.exit('transformers' in sys.modules)"
    assert process(sys.executable, "-c", code).returncode == 0


def test_a_shell_completes_commands_and_options():
    for words, wanted in (("autopart pl", "plan"), ("autopart plan --micro", "--microbatches")):
        environ = {"_AUTOPART_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        answer = CliRunner().invoke(main, [], prog_name="autopart", env=environ)
        assert f"plain,{wanted}" in answer.output.split()


def test_every_help_has_an_example():
    inner = [("checkpoint", name) for name in main.commands["checkpoint"].commands]
    for command in ((), *((name,) for name in main.commands), *inner):
        assert "Example:" in invoke(*command, "--help").output, command


@pytest.mark.parametrize(("command", "has_groups"), [("plan", True), ("verify", True), ("report", False)])
def test_help_of_many_options_has_groups(command, has_groups):
    text = invoke(command, "--help").output
    assert ("\nMemory and precision:\n" in text) is has_groups and ("\nOptions:\n" in text) is not has_groups
    names = [max(param.opts, key=len) for param in main.commands[command].params if param.param_type_name == "option"]
    assert all(text.count(f"{name} ") + text.count(f"{name}\n") >= 1 for name in names)


def test_help_says_the_defaults_that_the_code_has():
    text = " ".join(invoke("plan", "--help").output.split())
    assert Options().sequence_parallel == "auto" and "over tp. [default: auto, where faster]" in text
    assert Options().zero is None and "[default: 0, or what memory= needs]" in text
    assert Options().compile is False and "torch.compile. [default: no]" in text

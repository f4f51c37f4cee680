"""`--json`: every command prints one JSON object on standard output, and all words on standard error."""

import json

import click
import pytest
import torch
import zoo
from click.testing import CliRunner

import autopart
from autopart.cli import shared_options
from autopart.cli.console import WIDTH, wrapped
from autopart.cli.main import main
from autopart.ir.program import Rng
from autopart.options import OPTIONS
from autopart.recipe import model_source


def model():
    return zoo.SkipMLP(4, 32), {"x": torch.randn(8, 32), "y": torch.randn(8, 32)}


MODEL = ("--model", "test_cli_json:model")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json(*arguments, exit_code=0):
    """The one object that a command prints."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    assert result.stdout.count("\n") == 1 or arguments[0] == "plan", result.stdout
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made, example = model()
    autopart.plan(made, "pp2,tp2", example_kwargs=example).save(path)
    return path


def test_every_command_has_it():
    groups = [command.commands for command in main.commands.values() if isinstance(command, click.Group)]
    plain = {name: command for name, command in main.commands.items() if not isinstance(command, click.Group)}
    assert groups, "autopart checkpoint"
    for name, command in [pair for commands in (plain, *groups) for pair in commands.items()]:
        assert any("--json" in parameter.opts for parameter in command.params), name


def test_plan(tmp_path):
    path = tmp_path / "plan.json"
    found = as_json("plan", *MODEL, "--mesh", "tp2", "-o", path)
    assert found["wrote"] == str(path) and found["mesh"] == {"tp": 2} and found["num_ranks"] == 2
    assert as_json("plan", *MODEL, "--mesh", "tp2")["format"] == "autopart-plan/1"


def test_explain(plan_file):
    found = as_json("explain", plan_file)
    assert found["inputs"]["x"]["shape"] == [8, 32] and found["schedule"]["name"] and len(found["stages"]) == 2
    assert found["cost"]["step_time_s"] > 0 and found["memory"][0]["total"] > 0


def test_simulate_and_report(plan_file, tmp_path):
    assert as_json("simulate", plan_file)["step_time_s"] > 0
    page = tmp_path / "plan.html"
    assert as_json("report", plan_file, "-o", page) == {"wrote": str(page)} and page.exists()


def test_diff(plan_file, tmp_path):
    assert as_json("diff", plan_file, plan_file) == {"same": True, "differences": []}
    other = tmp_path / "other.json"
    made, example = model()
    autopart.plan(made, "tp2", example_kwargs=example).save(other)
    found = as_json("diff", plan_file, other, exit_code=1)
    assert (
        not found["same"]
        and {"part": "mesh", "what": "axes", "first": "pp2,tp2", "second": "tp2"} in (found["differences"])
    )


@pytest.mark.large
def test_verify_search_and_run():
    found = as_json("verify", *MODEL, "--mesh", "tp2")
    assert found["ok"] and found["max_error"] <= 1e-10 and found["first_mismatch"] is None
    found = as_json("search", *MODEL, "--devices", 2, "--count", 1)
    assert found["plans"][0]["num_ranks"] == 2 and found["wrote"] is None
    result = invoke("run", *MODEL, "--mesh", "dp1", "--steps", 2, "--compare", "--json")
    steps = json.loads(result.stdout)["steps"]
    assert [row["step"] for row in steps] == [1, 2] and steps[0]["loss"] == pytest.approx(steps[0]["plain_loss"])
    assert result.stderr.count("step ") == 2


def test_errors():
    result = invoke("explain", "missing.json", "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["kind"] == "PlanError" and found["error"].startswith("there is no plan at missing.json\n")
    assert result.stderr.startswith("there is no plan at missing.json")


def test_an_error_of_another_rank_is_told_late_and_with_its_rank(monkeypatch):
    waited = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("autopart.cli.console.time.sleep", waited.append)
    result = invoke("explain", "missing.json", "--json")
    assert result.exit_code == 2 and waited == [10.0]
    assert result.stdout == "" and result.stderr.startswith("rank 1: there is no plan at missing.json")


# Words


def test_help_fits_the_screen():
    for name, command in main.commands.items():
        context = click.Context(command, info_name=name, max_content_width=WIDTH, terminal_width=WIDTH)
        long = [line for line in command.get_help(context).splitlines() if len(line) > WIDTH]
        assert long == [], name


def test_wrapped_text_loses_no_word():
    text = "cannot " + "do this " * 20 + "\n  why    " + "because of that " * 10 + "\n  try    something\nshort"
    lines = wrapped(text).splitlines()
    assert " ".join(wrapped(text).split()) == " ".join(text.split())
    assert max(map(len, lines)) <= WIDTH and lines[-1] == "short"
    assert lines[3].startswith("  why    because") and lines[4].startswith(" " * 9 + "of that")


def test_the_options_are_those_of_the_code():
    from typing import get_args

    assert tuple(model_source.DTYPES) == shared_options.DTYPES
    assert "|".join(get_args(Rng)) == OPTIONS["rng"].form


# Configs


def tokens(*arguments):
    """Rows and tokens that a command takes for a config, and what it says of them."""
    result = invoke("plan", *arguments, "--mesh", "dp1")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["inputs"]["input_ids"]["shape"], " ".join(result.stderr.split())


def small(tmp_path, **sizes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64,
                                "bos_token_id": 0, "eos_token_id": 1, **sizes}))  # fmt: skip
    return path


@pytest.mark.large
def test_a_config_is_planned_at_its_own_length_and_says_so(tmp_path):
    shape, said = tokens("--hf-config", small(tmp_path, n_positions=384))
    assert shape == [8, 384] and "8 samples x 384 tokens a step; --batch and --sequence change it" in said
    shape, said = tokens("--hf-config", small(tmp_path, n_positions=384), "--sequence", 96)
    assert shape == [8, 96] and "8 samples x 96 tokens a step, of the 384 tokens that the config allows" in said


@pytest.mark.large
def test_what_is_computed_is_short_and_says_so(tmp_path):
    result = invoke("verify", "--hf-config", small(tmp_path, n_positions=384), "--mesh", "tp2", "--batch", 2)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "2 samples x 128 tokens a step, of the 384 tokens that the config allows; --sequence changes it" in said


@pytest.mark.large
def test_a_shipped_config_is_planned_without_a_warning(caplog):
    result = invoke("explain", "--hf-config", "gpt2", "--mesh", "tp2", "--batch", 2, "--sequence", 16)
    assert result.exit_code == 0, result.output
    assert "loss_type" not in result.stderr and "loss_type" not in caplog.text


SIZES = {
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "gpt3-175b": 174_615_846_912, "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496, "mixtral-8x7b": 46_702_792_704,
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("name", model_source.config_names())
def test_shipped_configs_have_the_published_sizes(name):
    source = model_source.from_hf_config(name, model_source.SourceOptions(meta=True, batch=1, sequence=8))
    assert sum(p.numel() for p in source.model.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "llama-9b"])
def test_names_that_are_not_in_the_local_cache(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = invoke("plan", "--hf-config", name, "--mesh", "tp2")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"there is no config at {name} why it is no file, no config that autopart ships, and not on the hub" in said
    assert all(known in said for known in model_source.config_names())

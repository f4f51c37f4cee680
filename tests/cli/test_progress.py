"""Long work says what it does, once it has taken a while; quick work says nothing."""

import re
import time

import pytest
import torch
from click.testing import CliRunner

import autopart
from autopart.cli.main import main
from autopart.common.progress import SETTLED_S, numbered, phase, shown
from autopart.plans.plan import Plan


def test_quick_work_says_nothing():
    lines = []
    with shown(lines.append):
        phase("one")
        phase("two")
    assert lines == []


def test_long_work_says_each_phase_once():
    lines = []
    with shown(lines.append, after_s=0.3):
        phase("before the limit")
        time.sleep(0.1)
        phase("one")
        time.sleep(1.0)
        phase("two")
        time.sleep(1.0)
    assert [re.sub(r"^\[ *\d+ s\] ", "", line) for line in lines] == ["one", "two"]


def test_outside_nobody_listens():
    lines = []
    with shown(lines.append, after_s=0.0):
        pass
    phase("unheard")
    time.sleep(0.5)
    assert lines == []


def heard(work):
    """The phases of a piece of work, however quick."""
    from autopart.common.progress import _listener

    phases = []
    token = _listener.set(phases.append)
    try:
        work()
    finally:
        _listener.reset(token)
    return phases


@pytest.mark.large
def test_search_and_plan_say_what_they_do():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    batch = {"input": torch.randn(8, 8)}
    planned = heard(lambda: autopart.plan(model, "tp2", example_kwargs=batch))
    assert planned[0] == "tracing the model" and "choosing layouts and stages on tp2" in planned
    searched = " ".join(heard(lambda: autopart.search(model, 2, example_kwargs=batch, count=1)))
    for part in ("counting operators on dp1", "sweeping", "simulating 1", "planning the best"):
        assert part in searched, part


@pytest.mark.large
def test_a_command_says_it_on_standard_error(monkeypatch):
    """With `--json` too: standard output has the object alone."""

    def slow(*args, **kwargs):
        phase("waiting for the test")
        time.sleep(3.0)
        raise autopart.AutopartError("what was asked cannot be")

    monkeypatch.setattr(Plan, "load", staticmethod(slow))
    result = CliRunner().invoke(main, ["explain", "plan.json", "--json"])
    assert result.exit_code == 2
    assert re.search(r"^\[ +\d s\] waiting for the test$", result.stderr, re.MULTILINE)
    assert result.stdout == '{"error": "what was asked cannot be", "kind": "AutopartError"}\n'


def test_phases_of_numbered_items_have_their_number():
    heard = []
    with shown(heard.append, after_s=0.0):
        for item in numbered(["a", "b"]):
            phase(f"reading {item}")
            time.sleep(2 * SETTLED_S)
        phase("done")
        time.sleep(2 * SETTLED_S)
    texts = [line.partition("] ")[2] for line in heard]
    assert texts == ["reading a (1 of 2)", "reading b (2 of 2)", "done"]

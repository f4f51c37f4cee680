"""Files with hostile or edited contents end in an error of autopart: never a traceback of another library."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import zoo

import autopart
from autopart.common.files import write_whole
from autopart.common.json_text import parse_json
from autopart.errors import CheckpointError, PlanError
from autopart.plans.plan import Plan
from autopart.runtime.weights.safetensors_files import SafetensorsFiles


@pytest.fixture(scope="module")
def plan_text() -> str:
    model, batch = zoo.skip_mlp()
    return autopart.plan(model, "pp2,tp2", example_kwargs=batch).to_json()


TEXTS = {
    "deep": ("[" * 100_000 + "]" * 100_000, "its brackets are nested too deeply"),
    "digits": ('{"a": ' + "9" * 5000 + "}", "is too large"),
    "infinite": ('{"a": 1e400}', "the number 1e400 is too large"),
    "NaN": ('{"a": NaN}', "NaN is not a JSON number"),
    "twice": ('{"mesh": {}, "mesh": {}}', "it has two entries 'mesh'"),
    "control": ('{"\\u001b[31m": 1, "\\u001b[31m": 1}', r"two entries '\?\[31m'"),
    "surrogate": ('{"a": "\\ud800"}', "surrogates not allowed"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_hardly_json(name):
    text, why = TEXTS[name]
    with pytest.raises(PlanError, match=why) as caught:
        parse_json(text, "plan.json", PlanError, "make it again")
    assert str(caught.value).startswith("plan.json cannot be read") and "make it again" in str(caught.value)


EDITS = {
    "an axis is gone": (("mesh",), {"pp": 2}),
    "no mfu": (("cost", "mfu"), None),
    "negative bytes": (("memory", 0, "parameters"), -1),
    "negative time": (("cost", "step_time_s"), -1.0),
    "a list for a number": (("cost", "weight_share"), [1]),
    "no stages": (("timing", "stages"), []),
    "no rows": (("timing", "table", "rows"), None),
    "text for layers": (("stages", 0, "blocks"), [{"block": "layers.*", "layers": "R"}]),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_figures(plan_text, name):
    keys, value = EDITS[name]
    data = copy.deepcopy(json.loads(plan_text))
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    with pytest.raises(PlanError):
        plan = Plan.from_json(json.dumps(data))
        plan.explain()
        autopart.simulate(plan)
        plan.cost.at(s=8)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_does_not_leave_its_folder(tmp_path, file):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="names a file outside of its folder"):
        SafetensorsFiles(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": 3}}))
    with pytest.raises(CheckpointError, match="no entry 'weight_map', from names of tensors to files"):
        SafetensorsFiles(tmp_path)


def test_writing_follows_no_planted_link(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("autopart.common.files.secrets.token_hex", lambda _: "guessed")
    os.symlink(victim, tmp_path / ".plan.json.guessed.part")
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "plan.json", "new")
    assert victim.read_text() == "precious"
    monkeypatch.undo()
    write_whole(tmp_path / "plan.json", "new")
    assert (tmp_path / "plan.json").read_text() == "new"
    assert Path(tmp_path / "plan.json").stat().st_mode & 0o077 == 0o077 & ~_umask() & 0o666
    write_whole(tmp_path / ("x" * 250), "long")  # a name near the limit of file systems


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

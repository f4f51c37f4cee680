"""Files of plans that are not plans, and places where none can be written: each one error in words."""

import os
import resource
import signal

import pytest
import torch
from click.testing import CliRunner

import autopart
from autopart.cli.main import main
from autopart.errors import PlanError
from autopart.plans.plan import Plan
from autopart.recipe.model_source import SourceOptions, from_hf_config

BATCH = {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}


@pytest.fixture(scope="module")
def plan():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    return autopart.plan(model, "tp2", example_args=(torch.randn(4, 8),))


# Reading

NOT_PLANS = [
    (b"\x00\x01\xff\xfe" * 100, "byte 2 is not UTF-8 text, and a plan is JSON"),
    (b"PK\x03\x04\x80\x00", "byte 4 is not UTF-8 text"),
    (b"", "is empty\n  why    nothing was written, or not yet"),
    (b" \n ", "is empty"),
    (b"\x00\x00", "is not JSON"),
    (b'{"format": "autopart-plan/1", ', "is not JSON"),
    (b"[]", "is not a valid plan"),
]


@pytest.mark.parametrize(("content", "text"), NOT_PLANS, ids=[text[:20] for _, text in NOT_PLANS])
def test_a_file_that_is_not_a_plan(content, text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(path) in str(error.value) and text in str(error.value)


def test_a_folder_and_nothing(tmp_path):
    with pytest.raises(PlanError, match=r"is a folder, not a plan\n  try    a file in "):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match=r"there is no plan at .*missing.json"):
        Plan.load(tmp_path / "missing.json")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("{}")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_text", refuse)  # root may read all files
    with pytest.raises(PlanError, match=r"cannot read .*plan.json\n  why    Permission denied"):
        Plan.load(path)


OTHER_FILES = {
    "pins": (lambda path: autopart.plan(Pair(), "tp2", example_kwargs=BATCH, pins=path), "a file of pins"),
    "hardware": (lambda path: autopart.plan(Pair(), "tp2", example_kwargs=BATCH, hardware=path), "a hardware profile"),
    "config": (lambda path: from_hf_config(path, SourceOptions(meta=True)), "a config"),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_other_files_that_are_none(kind, tmp_path):
    read, what = OTHER_FILES[kind]
    path = tmp_path / "file.json"
    path.write_bytes(b"\x00\x01\xff\xfe")
    with pytest.raises(autopart.AutopartError, match=rf"is not {what}\n  why    byte 2 is not UTF-8 text"):
        read(str(path))
    path.write_bytes(b"")
    with pytest.raises(autopart.AutopartError, match=r"file.json is empty"):
        read(str(path))
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(autopart.AutopartError, match=r"is a (folder|directory)"):
        read(str(tmp_path / "folder.json"))


# Writing


def test_a_place_is_looked_at_before_the_work(tmp_path):
    """A command that would write where it cannot says so at once: the model here does not even exist."""
    for command in (["plan", "--mesh", "tp2"], ["search", "--devices", "2"]):
        result = CliRunner().invoke(main, [*command, "--model", "no_such:model", "-o", str(tmp_path / "no" / "p.json")])
        assert result.exit_code == 2 and "there is no folder" in " ".join(result.stderr.split())
        result = CliRunner().invoke(main, [*command, "--model", "no_such:model", "-o", str(tmp_path)])
        assert result.exit_code == 2 and "it is a folder" in result.stderr


def test_a_saved_plan_is_read_again(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path).to_json() == plan.to_json() and os.listdir(tmp_path) == ["plan.json"]


def test_a_full_disk_leaves_the_old_plan(plan, tmp_path):
    """The limit on a file's size stands for the disk: the write fails in the middle."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(PlanError, match=r"cannot write .*plan.json\n  why    File too large\n  try    a file in a"):
            plan.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_device(plan):
    with pytest.raises(PlanError, match="cannot write /dev/full\n  why    No space left on device"):
        plan.save("/dev/full")
    assert os.path.exists("/dev/full")


def test_places_where_no_plan_can_be(plan, tmp_path):
    with pytest.raises(PlanError, match=r"why    No such file or directory"):
        plan.save(tmp_path / "no" / "plan.json")
    with pytest.raises(PlanError, match=r"why    Is a directory"):
        plan.save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"why    Not a directory"):
        plan.save(tmp_path / "file" / "plan.json")


def test_mode_and_links_stay(plan, tmp_path):
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.touch(mode=0o640)
    os.chmod(path, 0o640)
    link.symlink_to(path)
    plan.save(link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640 and Plan.load(path).mesh == {"tp": 2}


# What a call is given


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, y):
        return (self.linear(x) - y).square().mean()


def test_inputs_on_meta_are_refused_where_they_are_computed():
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    on_meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    pm = autopart.parallelize(Net(), "dp1", example_kwargs=batch)
    calls = [
        lambda: pm(**on_meta), lambda: pm.step(**on_meta), lambda: pm.step(batch["x"], on_meta["y"]),
        lambda: autopart.verify(Net(), "tp2", example_kwargs=on_meta),
        lambda: autopart.parallelize(Net(), "dp1", example_kwargs=on_meta),
        lambda: autopart.plan(Net(), "tp2", example_kwargs=on_meta),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(
            autopart.AutopartError, match=r"the input '[xy]' is on meta\n  why    it has a shape, but no values"
        ):
            call()
    pm.step(**batch)
    assert autopart.plan(Net().to("meta"), "tp2", example_kwargs=on_meta).mesh == {"tp": 2}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("1F1B", "1f1b"), ("GPipe", "gpipe"), ("Interleaved1F1B", "interleaved_1f1b"), ("ZBV", "zbv"),
     ("interleaved-1f1b", "interleaved_1f1b"), ("Interleaved Zero Bubble", "interleaved_zero_bubble"),
     ("ScheduleDualPipeV", "dualpipev"), ("looped-BFS", "looped_bfs")],
)  # fmt: skip
def test_schedules_in_any_case(name, schedule):
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    made = autopart.plan(Pair(), "pp2", example_kwargs=batch, schedule=name)
    assert made.schedule.name == schedule


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


def test_an_unknown_schedule_is_told_as_it_was_written():
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    with pytest.raises(autopart.AutopartError, match="unknown schedule 'PipeDream'\n  try    gpipe, 1f1b, "):
        autopart.plan(Pair(), "pp2", example_kwargs=batch, schedule="PipeDream")


def test_more_stages_than_operators():
    batch = {"x": torch.randn(64, 8), "y": torch.randn(64, 8)}
    with pytest.raises(autopart.AutopartError) as error:
        autopart.plan(Pair(), "pp64", example_kwargs=batch)
    assert str(error.value) == (
        "the model cannot be split into 64 stages\n"
        "  why    it has 12 operators that depend on parameters, and 11 possible stage boundaries between them\n"
        "  try    pp=12 or less (pp times virtual_stages is the number of stages)"
    )

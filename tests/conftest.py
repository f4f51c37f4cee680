"""Fixtures and options for all tests."""

import difflib
import gc
import multiprocessing.process
import random
import re
import subprocess
from pathlib import Path

import dist
import hypothesis
import pytest
import torch

SEED = 0
SAMPLE, ONE_IN = 2, 24
"""`make test` runs this many cases of a parametrised test, or one case in ONE_IN if that is more."""
STARTS_PROCESSES = re.compile(
    r"^(import|from) (dist|subprocess|process_\w+)\b|run_ranks|verify_loop|compile=True", re.M
)
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)  # `make fuzz` draws other examples
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=100, help="how many random graphs to run (test_fuzz.py)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="the first seed of random graphs")
    parser.addoption("--no-processes", action="store_true", help="leave out the files whose tests start processes")
    parser.addoption("--golden-update", action="store_true", help="rewrite the golden files instead of comparing")


def pytest_configure(config):
    torch.set_num_threads(1)
    dist.whole_float32()


def pytest_ignore_collect(collection_path, config):
    """Leave out the files whose tests start processes if `--no-processes` says so."""
    if config.getoption("--no-processes") and collection_path.name.startswith("test_"):
        return bool(STARTS_PROCESSES.search(collection_path.read_text())) or None
    return None


def pytest_collection_finish():
    gc.freeze()  # what is imported stays: only what tests make is looked through
    gc.set_threshold(700, 10, 100)  # all of it a tenth as often as Python would: traces are large, and mostly kept


def pytest_collection_modifyitems(items):
    """Mark cases of parametrised tests as `large`, except a random sample that is the same in every run."""
    for cases in _cases_by_function(items):
        sampled = [case for case in cases if not (case.get_closest_marker("whole") or case.get_closest_marker("large"))]
        count = 1 if cases[0].get_closest_marker("few") else max(SAMPLE, len(sampled) // ONE_IN)
        kept = {*random.Random(SEED).sample(range(len(sampled)), min(count, len(sampled)))}
        for index, case in enumerate(sampled):
            if index not in kept:
                case.add_marker(pytest.mark.large)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cases_by_function(items):
    functions = {}
    for item in items:
        functions.setdefault((item.fspath, getattr(item, "originalname", item.name)), []).append(item)
    return functions.values()


def pytest_sessionfinish():
    dist.shutdown()


@pytest.fixture(autouse=True)
def _seed():
    random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _no_process_is_started(request, monkeypatch):
    """With `--no-processes`, fail a test that starts one."""
    if request.config.getoption("--no-processes"):
        for starts in (dist.Pool, subprocess.Popen, multiprocessing.process.BaseProcess):
            monkeypatch.setattr(starts, "run" if starts is dist.Pool else "__init__", _refuse)


def _refuse(*_, **__):
    pytest.fail("a test of a file without processes starts one: match the file by STARTS_PROCESSES")


class Golden:
    """`golden("name", text)` fails with a diff unless the text is that of `name.txt` in the golden folder."""

    def __init__(self, folder: Path, update: bool) -> None:
        self.folder, self.update = folder, update

    def __call__(self, name: str, text: str) -> None:
        path = self.folder / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"golden file {path.name} does not exist; run with --golden-update to write it\n{text}")
        expected = path.read_text()
        if text == expected:
            return
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"{path.name} (golden)", f"{path.name} (now)", lineterm=""
        )
        pytest.fail("\n".join(["differs from its golden file; review, then --golden-update", *lines]), pytrace=False)


@pytest.fixture
def golden(request):
    """Compare a string with tests/golden/<name>.txt; `--golden-update` rewrites the file."""
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--golden-update"))

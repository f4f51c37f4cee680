"""Fixtures and options for all tests."""

import difflib
import gc
import os
import random
import shutil
import tempfile
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean

import dist
import hypothesis
import pytest
import remembered
import torch

SEED = 0
SAMPLE = 2
"""How many cases of a parametrised test `make test` runs at least: of a large one one in ONE_IN, of `few` one alone."""
ONE_IN = 24
LONGEST = (
    "test_precision", "test_rules", "test_hangs", "test_context", "test_memory", "test_skipped_writes",
    "test_sent_in_parts", "test_weights", "test_dp_sync_ranks", "test_two_versions", "test_compile", "test_search",
    "test_recompute", "test_counted", "test_folded", "test_zero_levels", "test_other_calls", "test_dist", "test_masks",
    "test_imports", "test_attention_dropout", "test_verify_size", "test_one_number", "test_random_exact",
    "test_zero_over_axes", "test_published", "test_compiled_memory", "test_folding", "test_experts", "test_formula",
    "test_zero", "test_chances", "test_balance", "test_pins", "test_written_parameters", "test_expert_plan", "test_cli",
    "test_formats", "test_axes", "test_sequence_parallel", "test_verify_loop", "test_local_batch", "test_expert_loops",
    "test_sequence_dims", "test_plan", "test_buffers",
)  # fmt: skip
"""The files that take longest in `make test`, the longest first (`pytest --durations=0`)."""
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)  # `make fuzz` draws other examples
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=100, help="how many random graphs to run (test_fuzz.py)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="the first seed of random graphs")
    parser.addoption("--golden-update", action="store_true", help="rewrite the golden files instead of comparing")


def pytest_configure(config):
    torch.set_num_threads(1)
    dist.whole_float32()
    remembered.remember()
    if remembered.FOLDER not in os.environ:
        os.environ[remembered.FOLDER] = folder = tempfile.mkdtemp(prefix="traces-")
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_collection_finish():
    gc.freeze()  # what is imported stays: only what tests make is looked through
    gc.set_threshold(700, 10, 100)  # all of it a tenth as often as Python would: traces are large, and mostly kept


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _place(item.path.stem))  # stable: the order inside a file stays
    for (_, name), cases in _by_function(items).items():
        sampled = [case for case in cases if not (case.get_closest_marker("whole") or case.get_closest_marker("large"))]
        count, first = max(SAMPLE, len(sampled) // ONE_IN), 0
        if cases[0].get_closest_marker("few"):
            count, first = 1, zlib.crc32(name.encode())  # another one in each matrix, not always `dp2`
        for index in beyond_sample([case.name for case in sampled], count, first):
            sampled[index].add_marker(pytest.mark.large)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _by_function(items):
    """{(file, function): its cases in order}."""
    functions = {}
    for item in items:
        functions.setdefault((item.fspath, getattr(item, "originalname", item.name)), []).append(item)
    return functions


def _place(file):
    """Where a file comes in the order of a run: the longest first, so that no worker is left with one at the end."""
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def beyond_sample(names, count, first=0):
    """Which cases of a matrix `make test` leaves to `make test-all`, by their names, `test[dp2-zero3]`. The others are
    chosen one by one: the case at `first`, then each time the first of those whose words are the rarest among the
    chosen.

    >>> matrix = [f"test[{mesh}-{zero}]" for mesh in ("dp2", "tp2", "pp2") for zero in range(3)]
    >>> [name for index, name in enumerate(matrix) if index not in beyond_sample(matrix, 3)]
    ['test[dp2-0]', 'test[tp2-1]', 'test[pp2-2]']
    >>> beyond_sample(["test"], 3), beyond_sample(matrix[:3], 1, first=4), beyond_sample([], 1)
    (set(), {0, 2}, set())
    """
    left, times = {index: name[:-1].partition("[")[2].split("-") for index, name in enumerate(names)}, Counter()
    for turn in range(min(len(names), count)):
        chosen = min(left, key=lambda index: fmean(times[word] for word in left[index])) if turn else first % len(names)
        times.update(left.pop(chosen))
    return set(left)


def pytest_runtest_setup(item):
    """What tests of traces and passes trace is theirs alone."""
    remembered.remember_all(item.path.parent.name not in ("tracing", "passes"))


def pytest_sessionfinish():
    dist.shutdown()


@pytest.fixture(autouse=True)
def _seed():
    random.seed(SEED)
    torch.manual_seed(SEED)


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

"""What runs passes: their names and texts, what an error says, and what `AUTOPART_DUMP` and `AUTOPART_CHECK` do."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopart
from autopart.common.flags import CHECK, DUMP, VARIABLES, environment, flags
from autopart.errors import LayoutError, OptionError
from autopart.ir.graph import operator_name
from autopart.passes import dump
from autopart.passes.dump import graph_text
from autopart.passes.normalize import AS_TRACED, NORMALIZE, PASSES
from autopart.passes.pass_pipeline import UNTOUCHED, Pass, PassError, on_calls, run_passes
from autopart.recipe import compiler, make_plan
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call, trace


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()  # the source line


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.addmm(x, x, self.layers[0].weight).mean()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def planned(mesh: str = "dp2,tp2", **options: Any) -> Any:
    return autopart.plan(Model(), mesh, example_kwargs={"x": torch.ones(4, 8)}, **options)


def traced_graph() -> fx.Graph:
    return trace(Model(), bind_call(Model(), (torch.ones(4, 8),), {})).graph


# Names and texts


def test_names_are_unique():
    functions = {rewrite.run for rewrite in (*AS_TRACED, *NORMALIZE)} | {PASSES["in_double"].run}
    assert {rewrite.run for rewrite in PASSES.values()} == functions
    assert len(PASSES) == len(functions)


def test_a_text_parses_back():
    for rewrite in PASSES.values():
        assert Pass.parse(str(rewrite), PASSES) == rewrite
    shallow = Pass(PASSES["take_apart"].run, (("depth", 1),))
    assert str(shallow) == "take_apart{depth=1}"
    assert Pass.parse(str(shallow), PASSES) == shallow


def test_an_option_of_any_kind_parses_back():
    def planted(graph: fx.Graph, name: str = "", number: int = 0, share: float = 0.0, deep: bool = False) -> None: ...

    options = (("name", "a, b=}'{"), ("number", -3), ("share", 0.5), ("deep", True))
    rewrite = Pass(planted, options)
    assert Pass.parse(str(rewrite), {"planted": rewrite}) == rewrite


@pytest.mark.whole
@pytest.mark.parametrize(
    "text",
    ["take_apart{depth}", "take_apart{depth=True}", "take_apart{deep=2}", "take_apart{depth=2", "take_apart{depth=f()}",
     "take_apart{depth=1)+dict(a=1}", "take_apart{1}", "take_apart{**{}}", "one_linear{depth=2}"],
)  # fmt: skip
def test_a_text_that_is_not_a_pass(text):
    with pytest.raises(
        OptionError, match=r"is not a valid pass\n  why    the options of [a-z_]+ are (depth: int|none)\n"
    ):
        Pass.parse(text, PASSES)


def test_an_unknown_pass():
    with pytest.raises(OptionError, match=r"unknown pass 'one_liner'\n  try    .*one_linear"):
        Pass.parse("one_liner", PASSES)


def test_options_are_what_a_pass_is_called_with():
    graph = traced_graph()

    def planted(graph: fx.Graph, number: int = 1) -> int:
        return number

    assert run_passes(graph, (Pass(planted), Pass(planted, (("number", 3),)))) == [1, 3]


def test_a_pass_over_calls_is_given_those_there_are_in_their_order():
    graph, met = traced_graph(), []

    @on_calls("aten::tanh", "aten::matmul")
    def planted(graph: fx.Graph, node: fx.Node) -> None:
        """A pass."""
        met.append(node)

    expected = [node for node in graph.nodes if operator_name(node) in ("aten::tanh", "aten::matmul")]
    assert planted(graph) is None and met == expected and len(expected) == 4
    assert (planted.__name__, planted.__doc__) == ("planted", "A pass.")
    assert planted(fx.Graph()) is UNTOUCHED


# Errors

PLACES = {
    "one_linear": "autopart.passes.normalize.matmul_forms._matrix_product",
    "annotate": "autopart.passes.facts.analyze.pattern_for",
    "decide{": "autopart.passes.choose.solve.batch_axis.strategies",
    "lower{": "autopart.passes.write.lower.write_local",
}
"""{pass: what raises in it}, one of normalising, facts, choosing and writing."""


@pytest.mark.whole
@pytest.mark.parametrize("name", PLACES)
def test_an_error_has_the_pass_the_node_the_module_and_the_line(name, monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(PLACES[name], broken)
    with pytest.raises(PassError) as caught:
        planned()
    text = str(caught.value)
    assert re.match(rf"pass {re.escape(name)}.* failed at '\w+'\n  why    ZeroDivisionError: planted\n", text), text
    line, module = (r"torch\.addmm\(.*", "") if name == "one_linear" else (r".*# the source line", r" \(layers\.0\)")
    assert re.search(rf"\n  where  {re.escape(__file__)}:\d+: .*{line}{module}\n", text), text
    assert text.splitlines()[-1] == (
        "  try    this is a fault of autopart: report it with the model and the dump (AUTOPART_DUMP=folder)"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_over_a_stage_says_which():
    def planted(graph: fx.Graph) -> None:
        raise KeyError("planted")

    with pytest.raises(PassError, match=r"^pass planted of stage 1 failed\n  why    KeyError: 'planted'\n  try"):
        run_passes(fx.Graph(), (Pass(planted),), of="stage 1")


def test_a_mistake_of_the_user_stays_what_it_is():
    with pytest.raises(LayoutError, match="tp=3 divides no weight"):
        planned("tp3")


def test_search_does_not_take_a_fault_for_a_mesh_that_cannot_be_cut():
    assert not issubclass(PassError, ValueError)


# AUTOPART_CHECK


def unordered(graph: fx.Graph) -> None:
    last = graph.output_node()
    next(node for node in graph.nodes if node.op == "call_function").append(last)


def twice(graph: fx.Graph) -> None:
    """Two nodes of one name: only all of the check finds it."""
    first, second, *_ = (node for node in graph.nodes if node.op == "call_function")
    second._rename = None
    object.__setattr__(second, "name", first.name)


def nothing(graph: fx.Graph) -> None:
    pass


def test_the_order_is_checked_after_every_pass():
    with pytest.raises(
        PassError, match="pass unordered failed at 'output'\n  why    RuntimeError: 'output' uses 'mean'"
    ):
        run_passes(traced_graph(), (Pass(unordered), Pass(nothing)))


@pytest.mark.whole
@pytest.mark.parametrize(("check", "name"), [(False, "nothing"), (True, "twice")])
def test_check_finds_the_pass_that_breaks_a_graph(check, name):
    with environment(check=check), pytest.raises(PassError, match=f"pass {name} failed .*\n  why    RuntimeError"):
        run_passes(traced_graph(), (Pass(twice), Pass(nothing), Pass(nothing)))


def test_check_changes_no_plan():
    with environment(check=True):
        checked = planned("dp2,pp2").to_json()
    assert planned("dp2,pp2").to_json() == checked


# AUTOPART_DUMP


def applied(text: str, diff: str) -> str:
    """A text after a unified diff. Raises AssertionError where the text is not what the diff was made of."""
    before, after, at = text.splitlines(keepends=True), [], 0
    first, *lines = [line for line in diff.splitlines(keepends=True)[1:] if not line.startswith(("--- ", "+++ "))]
    for line in (first, *lines):
        if line.startswith("@@"):
            start, count = (re.match(r"@@ -(\d+),?(\d*)", line) or pytest.fail(line)).groups()
            start = int(start) - (count != "0")
            after += before[at:start]
            at = start
            continue
        if line[0] in " -":
            assert before[at] == line[1:]
            at += 1
        if line[0] in " +":
            after.append(line[1:])
    return "".join([*after, *before[at:]])


def folders(root: Path) -> list[Path]:
    """Of one process: those of its traces, in order."""
    (own,) = root.iterdir()
    return sorted(own.iterdir(), key=lambda folder: int(folder.name))


def listed(folder: Path) -> list[tuple[int, str, float, str]]:
    """(number, whether it changed anything, milliseconds, text) of all passes."""
    rows = [re.fullmatch(r"(\d+) +(\S+) +([\d.]+) ms  (.+)", line) for line in passes_text(folder).splitlines()]
    return [(int(row[1]), row[2], float(row[3]), row[4]) for row in rows if row is not None]


def passes_text(folder: Path) -> str:
    return (folder / "passes.txt").read_text()


def test_diffs_lead_from_the_trace_to_the_choice(tmp_path):
    with environment(dump=tmp_path):
        model = Model()
        traced = prepare(model, bind_call(model, (torch.ones(4, 8),), {}))
        after_facts = folders(tmp_path)[0]
        text = (after_facts / "00-traced.txt").read_text()
        for diff in sorted(after_facts.glob("*.diff"))[:-1]:
            text = applied(text, diff.read_text())
    assert text == graph_text(traced.graph)
    (facts,) = after_facts.glob("*-annotate.diff")
    with_facts = applied(text, facts.read_text())
    assert re.sub("  #.*|\n", "", with_facts) == re.sub("  #.*|\n", "", text)
    assert re.search(
        r"\nmatmul = matmul.default\(\w+, \w+\)  # f32\[4,8\]; active; grad; m k, k n -> m n\n", with_facts
    )


def test_the_passes_are_listed_with_what_they_did(tmp_path):
    with environment(dump=tmp_path):
        planned("dp2,pp2,tp2", zero=3)
    (folder,) = folders(tmp_path)
    rows = listed(folder)
    assert [number for number, *_ in rows] == list(range(1, len(passes_text(folder).splitlines()) + 1))
    names = [text.partition("{")[0] for *_, text in rows]
    assert names[: len(AS_TRACED) + len(NORMALIZE)] == [p.name for p in (*AS_TRACED, *NORMALIZE)]
    assert [n for n in names if n in ("annotate", "decide", "lower")] == ["annotate", "decide", "lower"]
    for number, state, milliseconds, text in rows:
        name = re.match(r"\w+", text)[0]
        written = (folder / f"{number:02}-{name}.diff").exists() or (folder / f"{number:02}-{name}").exists()
        assert (state == "changed") is written, text
        assert milliseconds >= 0
    (linear,) = folder.glob("*-one_linear.diff")
    assert re.match(r"one_linear, [\d.]+ ms\n--- a/graph.txt\n\+\+\+ b/graph.txt\n@@", linear.read_text())
    assert "stage 1; rows S(0)" in next(folder.glob("*-decide.diff")).read_text()
    assert "; dp:S(" in next(folder.glob("*-choose_sharded_storage.diff")).read_text()


def test_the_list_runs_again(tmp_path):
    """The texts of `passes.txt` are the passes."""
    with environment(dump=tmp_path):
        graph = traced_graph()
        run_passes(graph, AS_TRACED)
        run_passes(graph, NORMALIZE)
    (folder,) = folders(tmp_path)
    again = traced_graph()
    run_passes(again, tuple(Pass.parse(text, PASSES) for *_, text in listed(folder)))
    assert graph_text(again) == graph_text(graph)


def test_a_program_is_written_stage_by_stage(tmp_path):
    with environment(dump=tmp_path):
        plan = planned("pp2,dp2")
    (written,) = folders(tmp_path)[0].glob("*-lower")
    assert sorted(file.name for file in written.iterdir()) == ["stage0.txt", "stage1.txt"]
    for stage in plan.reasons.program.stages:
        text = (written / f"stage{stage.index}.txt").read_text()
        assert text.endswith(f"\nstage {stage.index}\n\n{graph_text(stage.graph.graph)}")
        assert text.startswith(f"prologue\n\n{graph_text(stage.prologue.graph)}")


def test_traces_and_ranks_stay_apart(tmp_path, monkeypatch):
    with environment(dump=tmp_path):
        planned("dp2")
        before = passes_text(folders(tmp_path)[0])
        planned("tp2")
        assert [folder.name for folder in folders(tmp_path)] == ["1", "2"]
        assert passes_text(folders(tmp_path)[0]) == before
        monkeypatch.setenv("RANK", "3")
        planned("dp2")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"pid{os.getpid()}", "rank3"]


def test_all_choices_for_a_trace_are_in_its_folder(tmp_path):
    model = Model()
    with environment(dump=tmp_path):
        pm = compiler.Compiler(model, autopart.ir.mesh.Mesh.parse("dp2"), compiler.Options())
        pm.trace_example((torch.ones(4, 8),), {})
        pm.ready()
    (folder,) = folders(tmp_path)
    names = [text.partition("{")[0] for *_, text in listed(folder) if " of " not in text]
    assert names[names.index("annotate") :] == [
        "annotate", "find_bands", "share_selections", "decide", "choose_sharded_storage", "lower", "decode", "lower",
    ]  # fmt: skip


def test_a_pass_that_fails_is_in_the_dump(tmp_path, monkeypatch):
    def halfway(graph: fx.Graph) -> None:
        graph.output_node().args = ((),)
        raise KeyError("planted")

    graph = traced_graph()
    with environment(dump=tmp_path), pytest.raises(PassError, match="halfway"):
        run_passes(graph, (Pass(nothing), Pass(halfway)))
    (folder,) = folders(tmp_path)
    assert [(state, text) for _, state, _, text in listed(folder)] == [("-", "nothing"), ("failed", "halfway")]
    assert "+return ()" in (folder / "02-halfway.diff").read_text()


def test_nothing_is_made_without_the_variable(tmp_path, monkeypatch):
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a text was made")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dump, "graph_text", forbidden)
    monkeypatch.setattr(dump.Path, "mkdir", forbidden)
    planned()
    assert list(tmp_path.iterdir()) == []


def test_a_dump_changes_no_plan(tmp_path):
    with environment(dump=tmp_path):
        dumped = planned("pp2,tp2").to_json()
    assert planned("pp2,tp2").to_json() == dumped


@pytest.mark.whole
@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_is_not_a_folder(tmp_path, below, monkeypatch):
    monkeypatch.setattr(make_plan, "trace", lambda *args: pytest.fail("traced before the folder was tried"))
    (tmp_path / "notes.txt").write_text("mine")
    with environment(dump=f"{tmp_path}/notes.txt{below}"), pytest.raises(OptionError) as caught:
        planned()
    assert str(caught.value) == (
        f"AUTOPART_DUMP='{tmp_path}/notes.txt{below}' is not a folder to write to\n"
        "  why    the path or one of its parents is a file\n"
        "  where  the environment\n"
        "  try    AUTOPART_DUMP=dump: a folder, which is created if it does not exist"
    )
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with environment(dump=tmp_path), pytest.raises(OptionError, match="is not writable"):
        planned()


def test_a_disk_that_is_full_is_told_in_words(tmp_path, monkeypatch):
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    planned()  # the first trace of a process opens files of its own
    monkeypatch.setattr(Path, "open", full)
    with environment(dump=tmp_path), pytest.raises(OptionError, match="why    No space left on device"):
        planned()


def test_the_dump_in_the_documentation(tmp_path):
    """docs/passes.md shows what its model gives, but for times and folders."""
    text = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()
    blocks = re.findall(r"```(python|diff|text)\n(.*?)```", text, re.DOTALL)
    (code,) = (block for kind, block in blocks if kind == "python")
    (diff,) = (block for kind, block in blocks if kind == "diff")
    listing, program, *_ = (block for kind, block in blocks if kind == "text")
    with environment(dump=tmp_path):
        exec(compile(code, "mlp.py", "exec"), {"__name__": "mlp"})
    (folder,) = folders(tmp_path)
    assert (folder / "67-lower" / "stage0.txt").read_text() == program
    assert without_times((folder / "23-one_linear.diff").read_text()) == without_times(diff)
    for line in listing.splitlines():
        assert line == "..." or without_times(line) in without_times(passes_text(folder)).splitlines()


def without_times(text: str) -> str:
    return re.sub(r" *[\d.]+ ms", " ms", text)


# The variables


def test_a_switch_is_one_or_zero(monkeypatch):
    monkeypatch.setenv(CHECK, "yes")
    with pytest.raises(OptionError) as caught:
        planned()
    assert str(caught.value) == (
        "AUTOPART_CHECK='yes' is neither 1 nor 0\n  where  the environment\n  "
        "try    AUTOPART_CHECK=1 or AUTOPART_CHECK=0"
    )


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.setenv(CHECK, "1")
    with pytest.raises(KeyError), environment(dump="somewhere"):
        assert flags() == ("somewhere", False)
        raise KeyError
    assert os.environ.get(CHECK) == "1" and DUMP not in os.environ

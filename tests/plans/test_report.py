"""The report: one page that needs no network and shows what the plan and the simulator say."""

import re
import shutil
from dataclasses import replace

import pytest
import zoo
from click.testing import CliRunner
from report_page import data_of, texts_of

import autopart
from autopart.cli.main import main
from autopart.common.text import quantity
from autopart.plans.plan import Plan
from autopart.show.report.page import page
from autopart.show.report.report_data import MOST_ACTIONS, MOST_LINES
from autopart.show.report.suggestions import SHOWN, suggestions

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def plan():
    model, batch = zoo.gpt2()
    return autopart.plan(model, "pp2,tp2", example_kwargs=batch)


@pytest.fixture(scope="module")
def shown(plan):
    return data_of(page({"plan": plan}))["plans"][0]


def test_a_page_needs_no_network_and_shows_what_the_plan_says(plan, tmp_path):
    plan.report(tmp_path / "plan.html")
    html = (tmp_path / "plan.html").read_text()
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]* src|@import|url\(", html.partition("<script>")[0])
    texts, simulation = texts_of(html), autopart.simulate(plan)
    assert quantity(simulation.step_time_s, "s") in texts and str(plan.explain()) in texts
    assert all(kind in texts for kind in simulation.parts if kind not in ("matmul", "attention", "other"))
    assert all(quantity(row["total"], "B") in texts for row in plan.memory)
    assert len(html) < 5_000_000


def test_a_stage_that_only_stores_a_tied_weight_is_shown(tmp_path):
    model, batch = zoo.gpt2()
    tied = autopart.plan(model, "dp2,pp2", example_kwargs=batch, zero=3)
    assert any("flops" not in block for stage in tied.stages for block in stage["blocks"])
    tied.report(tmp_path / "tied.html")
    assert (tmp_path / "tied.html").exists()


def test_the_first_sentences_have_the_likely_range(plan, shown):
    likely = autopart.simulate(plan).likely_range
    text = f"(likely {quantity(likely.low_s, 's')} to {quantity(likely.high_s, 's')}; "
    assert text in shown["summary"]


def test_the_timeline_has_every_action(plan, shown):
    timeline = autopart.simulate(plan).timeline
    assert sum(map(len, timeline.spans)) < MOST_ACTIONS
    for line, spans in zip(shown["timeline"]["lines"], timeline.spans, strict=True):
        expected = [[span.start_s, span.end_s, span.kind, span.stage, span.microbatch] for span in spans]
        assert line["actions"] == expected


def test_the_waterfall_adds_up_to_the_busiest_rank(plan, shown):
    parts = autopart.simulate(plan).parts
    rows = shown["waterfall"]
    assert sum(row["s"] for row in rows) == pytest.approx(sum(parts.values()), rel=1e-12)
    assert rows[0]["group"] == "ideal" and {row["name"] for row in rows} >= {"tp all_reduce", "optimizer"}


def test_every_operator_and_parameter_is_in_a_block(plan, shown):
    blocks = {block["name"]: block for stage in shown["stages"] for block in stage["blocks"]}
    assert sum(len(block["operators"]) for block in blocks.values()) == len(plan.operators)
    assert sum(len(block["parameters"]) for block in blocks.values()) == len(plan.parameters)
    (mlp,) = [block for name, block in blocks.items() if name.endswith(".mlp")]
    assert ["c_fc.weight", plan.parameters["transformer.h.*.mlp.c_fc.weight"], "", ""] in mlp["parameters"]
    assert any(text.startswith("tp forward: all_reduce") for text in mlp["collectives"])


def test_names_cannot_become_markup(plan):
    html = page({"plan": replace(plan, notes=(HOSTILE,), model={**plan.model, "class": HOSTILE})})
    assert "<img" not in html.partition("<script>")[0] and HOSTILE in data_of(html)["plans"][0]["notes"]


def test_a_suggestion_is_what_a_plan_predicts(plan):
    model, batch = zoo.gpt2()
    found = suggestions(plan)
    assert 0 < len(found) <= SHOWN and [row.step_time_s for row in found] == sorted(row.step_time_s for row in found)
    row = next(row for row in found if not row.notes)  # its layouts are those of a new plan
    options = eval(f"dict({row.change})")
    again = autopart.plan(model, **{"mesh": "pp2,tp2", "microbatches": plan.schedule.microbatches} | options,
                          example_kwargs=batch)  # fmt: skip
    assert again.cost["step_time_s"] == pytest.approx(row.step_time_s, rel=0.05)
    assert row.gain == pytest.approx(1 - row.step_time_s / plan.cost["step_time_s"], rel=1e-9)


def test_why_of_a_setting_has_the_price_of_every_alternative(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")  # no model is needed
    why = again.why("schedule")
    assert why.chosen == "1f1b" and "schedule='gpipe'" in why.others and why.runner_up in why.others
    gpipe = autopart.plan(zoo.gpt2()[0], "pp2,tp2", example_kwargs=zoo.gpt2()[1], schedule="gpipe",
                          microbatches=plan.schedule.microbatches)  # fmt: skip
    assert why.others["schedule='gpipe'"].startswith(quantity(gpipe.cost["step_time_s"], "s") + " (")
    for setting, value in (("mesh", "pp2,tp2"), ("zero", "0"), ("microbatches", str(plan.schedule.microbatches))):
        assert again.why(setting).chosen == value and "on the fullest rank" in again.why(setting).reason
    assert "no other value can be predicted" in again.why("zero").reason
    result = CliRunner().invoke(main, ["why", str(tmp_path / "plan.json"), "schedule"])
    assert result.exit_code == 0 and result.output.startswith("schedule: 1f1b\n  because"), result.output
    with pytest.raises(autopart.AutopartError, match="no alternatives of layouts"):
        again.why("transformer.h.0.mlp.c_fc")


def test_a_plan_from_a_file_has_the_price_of_every_layout(plan, tmp_path):
    name = "transformer.h.0.mlp.c_fc.weight"
    plan.with_alternatives().save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.why(name) == plan.why(name) and again.why(name).others
    assert again.why("transformer.h.1.mlp.c_fc").subject.startswith("transformer.h.*.mlp.c_fc")
    stages = data_of(page({"plan": again}))["plans"][0]["stages"]
    (row,) = [row for block in stages[0]["blocks"] for row in block["parameters"]
              if block["name"].endswith(".mlp") and row[0] == "c_fc.weight"]  # fmt: skip
    why = plan.why(name)
    assert row[2] == f"{why.runner_up}: {why.others[why.runner_up]}" and row[3] == why.where
    assert again.why("loss").others and "shards the values" in again.why("loss").reason
    result = CliRunner().invoke(main, ["why", str(tmp_path / "plan.json"), name])
    assert result.exit_code == 0 and result.output.rstrip("\n") == str(plan.why(name))
    with pytest.raises(autopart.AutopartError, match=r"nothing with the name 'transformer.nowhere'\n.*try"):
        again.why("transformer.nowhere")


def test_why_of_recompute_bounds_its_alternatives(plan):
    why = Plan.from_json(plan.to_json()).why("recompute")
    assert why.chosen == "none" and why.others.keys() == {"recompute='selective'", "recompute='full'"}
    full = autopart.plan(zoo.gpt2()[0], "pp2,tp2", example_kwargs=zoo.gpt2()[1], recompute="full",
                         microbatches=plan.schedule.microbatches)  # fmt: skip
    spans = autopart.simulate(plan).timeline.spans
    forward_s = max(sum(span.end_s - span.start_s for span in rank if span.kind == "F") for rank in spans)
    assert 0 < full.cost["step_time_s"] - plan.cost["step_time_s"] <= 1.05 * forward_s
    assert quantity(forward_s, "s") in why.others["recompute='full'"]


def test_a_plan_that_does_not_fit_gets_changes_that_fit(plan):
    needed = max(row["total"] for row in plan.memory)
    small = replace(plan, cost={**plan.cost, "device_memory_bytes": 0.97 * needed})
    assert all(row.memory_bytes <= 0.97 * needed and row.fits for row in suggestions(small))


def test_several_plans_are_compared(plan, tmp_path):
    model, batch = zoo.gpt2()
    other = autopart.plan(model, "dp2,tp2", example_kwargs=batch)
    for name, one in (("pipeline", plan), ("data", other)):
        one.save(tmp_path / f"{name}.json")
    paths = [str(tmp_path / f"{name}.json") for name in ("pipeline", "data")]
    result = CliRunner().invoke(main, ["report", *paths, "-o", str(tmp_path / "both.html")])
    assert result.exit_code == 0, result.output
    data = data_of((tmp_path / "both.html").read_text())
    assert [row["label"] for row in data["comparison"]["rows"]] == ["pipeline", "data"] and len(data["plans"]) == 2
    assert "matrix products" in data["comparison"]["kinds"] and "matmul" not in data["comparison"]["kinds"]
    assert min(row["slower"] for row in data["comparison"]["rows"]) == 1
    assert "mesh" in data["comparison"]["diff"]


@pytest.mark.large
def test_a_module_prints_its_graph(tmp_path):
    model, batch = zoo.gpt2()
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
    pm.report(tmp_path / "own.html")
    texts = texts_of((tmp_path / "own.html").read_text())
    assert "Graph of stage 0" in texts and re.search(r"torch\.ops\.aten\.linear", texts)


def test_a_page_that_cannot_be_written(plan, tmp_path):
    with pytest.raises(autopart.AutopartError, match=r"cannot write the report to .*\n.*No such file"):
        plan.report(tmp_path / "nowhere" / "plan.html")


@pytest.mark.large
def test_many_ranks_stay_readable(plan):
    many = page({str(index): plan for index in range(3)})
    assert len(data_of(many)["plans"][0]["timeline"]["lines"]) <= MOST_LINES and len(many) < 5_000_000


@pytest.mark.large
def test_a_browser_draws_it_without_errors(plan, tmp_path):
    """Clicks, search, tabs and colours in headless Chromium: needs `pip install playwright` and a browser."""
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    api = pytest.importorskip("playwright.sync_api")
    if browser_path is None:
        pytest.skip("no Chromium")
    hostile = replace(plan, notes=(HOSTILE,))
    (tmp_path / "page.html").write_text(page({"first": hostile, "second": plan}))
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        tab, faults = browser.new_page(viewport={"width": 1280, "height": 900}), []
        tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("dialog", lambda dialog: faults.append(dialog.message))
        tab.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
        tab.goto((tmp_path / "page.html").as_uri())
        assert tab.locator(".chart canvas, .chart svg").count() >= 5
        tab.locator("button.block", has_text="attn").first.click()
        assert "Operators" in tab.locator(".details").inner_text()
        tab.locator("input[type=search]").fill("c_fc")
        assert tab.locator(".block.match").count() >= 1 and tab.locator(".block.other").count() >= 1
        tab.get_by_role("tab", name="second").click()
        assert tab.locator("[role=tab][aria-selected=true]").inner_text() == "second"
        tab.get_by_role("button", name=re.compile("dark|light")).click()
        assert tab.locator(".chart").count() >= 5
        assert faults == []
        browser.close()


def test_a_plan_from_a_file_has_the_same_report(plan):
    assert page({"plan": Plan.from_json(plan.to_json())}) == page({"plan": plan})

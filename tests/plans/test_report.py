"""The report: one page that stands alone and says what the plan and the simulator say."""

import re
from html.parser import HTMLParser

import pytest
import zoo
from click.testing import CliRunner

import autopart
from autopart.cli.main import main
from autopart.common.text import quantity
from autopart.show.report import MOST


class Page(HTMLParser):
    """Its tags, its text, and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(path):
    page = Page(path.read_text())
    assert not page.open, "every tag is closed"
    return page


@pytest.fixture(scope="module")
def plan():
    model, batch = zoo.gpt2()
    return autopart.plan(model, "pp2,tp2", example_kwargs=batch)


def test_a_page_stands_alone_and_says_what_the_plan_says(plan, tmp_path):
    plan.report(tmp_path / "plan.html")
    page, text = read(tmp_path / "plan.html"), (tmp_path / "plan.html").read_text()
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img"} and "http" not in text
    said = "".join(page.words)
    simulation = autopart.simulate(plan)
    assert quantity(simulation.step_time_s, "s") in said and str(plan.explain()) in said
    assert all(kind in said for kind in simulation.parts)
    assert all(quantity(row["total"], "B") in said for row in plan.memory)


def test_every_action_is_drawn_where_it_runs(plan, tmp_path):
    plan.report(tmp_path / "plan.html")
    timeline = autopart.simulate(plan).timeline
    boxes = [attrs for tag, attrs in read(tmp_path / "plan.html").tags if tag == "rect"]
    spans = [(rank, span) for rank, found in enumerate(timeline.spans) for span in found]
    assert len(spans) < MOST
    drawn = [(float(b["x"]) / 1000, float(b["width"]) / 1000, int(b["y"]) // 26) for b in boxes]
    for rank, span in spans:
        start, length = (s / timeline.step_time_s for s in (span.start_s, span.end_s - span.start_s))
        assert any(abs(x - start) < 1e-4 and abs(w - length) < 1e-3 and row == rank for x, w, row in drawn)


def test_names_are_escaped(plan, tmp_path):
    from dataclasses import replace

    replace(plan, notes=("<script>alert(1)</script> & more",)).report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text


@pytest.mark.large
def test_a_module_prints_its_graph(tmp_path):
    model, batch = zoo.gpt2()
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
    pm.report(tmp_path / "own.html")
    said = "".join(read(tmp_path / "own.html").words)
    assert "Graph of stage 0" in said and re.search(r"torch\.ops\.aten\.linear", said)


def test_command_line(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    result = CliRunner().invoke(main, ["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.html")])
    assert result.exit_code == 0 and (tmp_path / "plan.html").exists(), result.output
    with pytest.raises(autopart.AutopartError, match=r"cannot write the report to .*\n.*No such file"):
        plan.report(tmp_path / "nowhere" / "plan.html")

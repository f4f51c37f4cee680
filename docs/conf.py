"""Configuration of the documentation site: `make docs` builds it from the repository's Markdown with Sphinx.

The pages stay plain Markdown. The navigation is the list of links in `docs/index.md`; the page of the API is generated
from the docstrings of all public names; `llms.txt` lists the pages for language models.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import autopart  # noqa: E402

project, author, version = "autopart", "the autopart developers", autopart.__version__
html_title = f"autopart {version}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "CHANGELOG.md", "AGENTS.md", "docs/**.md", "docs/api.rst", "examples/README.md",
    "examples/**/README.md", "benchmarks/**.md", "autopart/extras/README.md", "autopart/extras/**/README.md",
    "skills/**.md",
]  # fmt: skip
html_theme = "furo"
html_copy_source = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
autodoc_default_options = {"members": True, "inherited-members": "Module,GradScaler,dict,ValueError,RuntimeError"}
napoleon_use_ivar = True
# Docstrings are read in editors and by `help`, so they are not escaped for reStructuredText.
suppress_warnings = ["docutils", "misc.highlighting_failure", "toc.not_included"]

SECTION = re.compile(r"^## (.+)$")
LINK = re.compile(r"\]\(([^)#\s]+\.md)")
API = "docs/api"


def sections() -> dict[str, list[str]]:
    """Return {section of docs/index.md: pages that it links}, each page once."""
    pages: dict[str, list[str]] = {}
    seen, section = set(), ""
    for line in (ROOT / "docs/index.md").read_text().splitlines():
        if match := SECTION.match(line):
            section = match[1]
        for link in LINK.findall(line):
            page = (ROOT / "docs" / link).resolve().relative_to(ROOT).with_suffix("").as_posix()
            if page not in seen:
                seen.add(page)
                pages.setdefault(section, []).append(page)
    pages.setdefault("Reference", []).insert(0, API)
    return pages


def add_navigation(app, docname, source):
    """Append the navigation to the source of the first page."""
    if docname == root_doc:
        for section, pages in sections().items():
            lines = "\n".join(f"/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{lines}\n```\n"


def write_api(app):
    """Write the page of the API: every public name with its docstring."""
    functions = [name for name in autopart.__all__ if name[0].islower()]
    lines = ["API", "===", "", "Functions and classes of ``import autopart``.", ""]
    for kind, names in (("autofunction", functions), ("autoclass", sorted({*autopart.__all__} - {*functions}))):
        for name in names:
            lines += [name, "-" * len(name), "", f".. {kind}:: autopart.{name}", ""]
    page = ROOT / f"{API}.rst"
    text = "\n".join(lines)
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def write_llms(app, error):
    """Write `llms.txt` (llmstxt.org): the title and path of every page, by section."""
    if error is not None:
        return
    lines = ["# autopart", "", "> Partitions an unmodified PyTorch model over many GPUs, with proof of exactness.", ""]
    for section, pages in sections().items():
        lines += [f"## {section}", ""]
        for page in pages:
            title = app.env.titles[page].astext() if page in app.env.titles else page
            lines.append(f"- [{title}]({page}.html)")
        lines.append("")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines))


def setup(app):
    """Connect the functions above to Sphinx's events."""
    app.connect("builder-inited", write_api)
    app.connect("source-read", add_navigation)
    app.connect("build-finished", write_llms)

"""The vocabulary of the sources: how docstrings open, and words that a PyTorch engineer would not search for.

The counts of words may only fall: a test fails if one rises, and names the lines. Lower a count after a rewrite.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("autopart", "passes", "cost", "runtime")
PAGES = ("README.md", "CHANGELOG.md", "docs/*.md", "docs/guides/*.md", "docs/notes/*.md")
GENERATED = ("models.md",)
MAX_FIRST_LINE = 100
OPENINGS = ("What", "Whether", "Of", "Where", "By", "Inside", "How", "Which", "Who", "Those", "That", "To")
WORDS = {
    "alike": 3, "anew": 0, "apart": 0, "asked": 16, "behind": 0, "beside": 3, "brought": 0, "goes around": 0,
    "heaviest": 0, "held": 5, "kept": 19, "laid": 0, "lies": 0, "made for": 7, "made of": 1, "none of": 10,
    "places": 12, "said": 0, "says": 4, "spoken": 3, "stands for": 0, "summed": 19, "taken": 7, "told": 0,
    "travels": 0, "under way": 0, "wholes": 0,
}  # fmt: skip
"""Words of a private vocabulary: how often each may stand in docstrings, comments, messages and pages."""


class Text(NamedTuple):
    """A docstring, comment, string or line of a page, and where it is."""

    where: str
    text: str


def docstrings(name: str, source: str) -> Iterator[Text]:
    """Yield the docstrings of a module, its classes and functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield Text(f"{name}:{getattr(node, 'lineno', 1)}", text)


def texts(name: str, source: str) -> Iterator[Text]:
    """Yield the comments and strings of a source file, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield Text(f"{name}:{token.start[0]}", token.string)


def bad_openings(found: Text) -> Iterator[str]:
    """Yield what is wrong with the first line of a docstring."""
    first = found.text.split("\n")[0]
    opening = re.match(r"\w+", first)
    if opening and opening[0] in OPENINGS:
        yield f"{found.where} opens with '{opening[0]}': begin with a verb (functions) or a noun (classes, modules)"
    if len(first) > MAX_FIRST_LINE:
        yield f"{found.where} has a first line of {len(first)} characters; at most {MAX_FIRST_LINE}"


def occurrences(word: str, found: list[Text]) -> list[str]:
    """Return where a word stands, in any case."""
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    return [text.where for text in found for _ in pattern.findall(text.text)]


def sources() -> dict[str, str]:
    """Return {path: text} of the product's files."""
    paths = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def pages() -> Iterator[Text]:
    """Yield the lines of README, changelog and docs, but those that a script writes."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            if path.name not in GENERATED:
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    yield Text(f"{path.relative_to(ROOT)}:{number}", line)


@pytest.mark.large
def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    faults = [
        fault
        for name, source in sources().items()
        for docstring in docstrings(name, source)
        for fault in bad_openings(docstring)
    ]
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])


def test_private_words_become_fewer() -> None:
    found = [text for name, source in sources().items() for text in texts(name, source)]
    found += pages()
    places = {word: occurrences(word, found) for word in WORDS}
    more = [f"{word}: {len(at)}, at most {WORDS[word]}: {at}" for word, at in places.items() if len(at) > WORDS[word]]
    fewer = {word: len(at) for word, at in places.items() if len(at) < WORDS[word]}
    assert not more, "\n".join(more)
    assert not fewer, f"lower the counts of this file: {fewer}"


def test_planted_texts_are_found() -> None:
    source = '"""What a module does."""\n\ndef f():\n    """Whether it is so."""\n    # brought together anew\n'
    faults = [fault for docstring in docstrings("m", source) for fault in bad_openings(docstring)]
    assert Counter(fault.split()[0] for fault in faults) == {"m:1": 1, "m:3": 1}
    assert list(bad_openings(Text("m:1", "Return " + "x" * MAX_FIRST_LINE)))
    assert not list(bad_openings(Text("m:1", "Return the size.")))
    assert occurrences("anew", list(texts("m", source))) == ["m:5"]


def missing_files(text: str, files: list[str]) -> list[str]:
    """Source files that a document names in backticks and the repository does not have."""
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    return [name for name in named if not any(f"/autopart/{file}".endswith(f"/{name}") for file in files)]


def test_documents_name_files_that_exist() -> None:
    folders = ("autopart", "passes", "cost", "runtime", "tests", "benchmarks", "examples")
    files = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    documents = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len(documents) > 30 and missing_files("see `passes/dump.py`, `no_such_file.py`", files) == [
        "no_such_file.py"
    ]
    found = {path.name: missing for path in documents if (missing := missing_files(path.read_text(), files))}
    assert not found

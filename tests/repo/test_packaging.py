"""What an install leaves behind: `autopart` and its parts, and no top-level `cost`, `passes` or `runtime`."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYER_FOLDERS = ("cost", "passes", "runtime")
DATA_SUFFIXES = (".py", ".json", ".typed")

pytestmark = pytest.mark.timeout(180)

IMPORT_NOTHING_ELSE = """
import importlib.util, site, sys
site.addsitedir(sys.argv[1])
assert importlib.util.find_spec("autopart") is not None, "autopart is not importable"
for name in ("cost", "passes", "runtime"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"an installed autopart leaves a top-level module {name}")
"""

IMPORT_ALL = """
import sys
import tomllib
sys.path.insert(0, sys.argv[1])
import autopart.cost, autopart.passes.rules, autopart.runtime
for module in (autopart, autopart.cost, autopart.passes.rules, autopart.runtime):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""


def run(*command: str, cwd: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def copy_tree(target: Path) -> Path:
    """A copy of the sources alone: no build folder, no caches; symlinks stay symlinks."""
    target.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    for folder in ("autopart", *LAYER_FOLDERS):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("packaging") / "tree")


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    dist = tree.parent / "dist"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(dist), ".", cwd=tree)
    (found,) = dist.glob("autopart-*.whl")
    return found


@pytest.fixture(scope="module")
def editable_wheel(tree: Path) -> Path:
    """What `pip install -e .` unpacks into site-packages."""
    dist = tree.parent / "editable"
    dist.mkdir()
    build = "import sys, setuptools.build_meta as backend; backend.build_editable(sys.argv[1])"
    run(sys.executable, "-c", build, str(dist), cwd=tree)
    (found,) = dist.glob("autopart-*.whl")
    return found


def unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_wheel_holds_only_autopart(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    strange = [name for name in names if not name.startswith("autopart/") and ".dist-info" not in name.split("/")[0]]
    assert strange == []


def test_wheel_holds_every_source(wheel: Path, tree: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = set()
    for folder, _, files in os.walk(tree / "autopart", followlinks=True):
        paths = (Path(folder, file) for file in files)
        sources |= {path.relative_to(tree).as_posix() for path in paths if path.suffix in DATA_SUFFIXES}
    assert {f"autopart/{folder}/__init__.py" for folder in LAYER_FOLDERS} <= sources
    assert sources - names == set()


@pytest.mark.parametrize("kind", ["wheel", "editable_wheel"])
def test_no_top_level_layer_module(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    site = unpack(request.getfixturevalue(kind), tmp_path / "site")
    # -I -S: neither this folder, nor PYTHONPATH, nor what is installed here is importable.
    run(sys.executable, "-I", "-S", "-c", IMPORT_NOTHING_ELSE, str(site), cwd=tmp_path)


def test_leftover_top_level_module_is_found(wheel: Path, tmp_path: Path) -> None:
    site = unpack(wheel, tmp_path / "site")
    (site / "cost.py").touch()
    with pytest.raises(AssertionError, match="top-level module cost"):
        run(sys.executable, "-I", "-S", "-c", IMPORT_NOTHING_ELSE, str(site), cwd=tmp_path)


@pytest.mark.large
def test_unpacked_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    site = unpack(wheel, tmp_path / "site")
    run(sys.executable, "-I", "-c", IMPORT_ALL, str(site), cwd=tmp_path)


def test_every_dependency_is_imported() -> None:
    """What an install brings along is used by the package itself."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    sources = [path.read_text() for folder in ("autopart", *LAYER_FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in asked]
    unused = [name for name in names if not any(re.search(rf"^\s*(import|from) {name}\b", s, re.M) for s in sources)]
    assert names and not unused

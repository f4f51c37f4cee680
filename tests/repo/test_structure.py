"""The structure that docs/architecture.md promises, read from the sources: who imports whom, sizes, private modules.

Every check has planted sources in which it must fail: a check that can find nothing does not pass for one that works.
"""

import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx
import pytest

from autopart.common.extras import EXTRAS

pytestmark = pytest.mark.whole  # quick, and every row of it counts

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autopart"

# A folder is a layer. `errors.py` and the first two folders are the base; two layers have files directly in autopart/.
BASE = ("errors", "common", "compat")
RECIPE = ("recipe", "options")
FRONT = ("__init__", "__main__", "api", "cli")
PLANNING = ("base", "ir", "ops", "tracing", "plans", "cost", "passes")
ALL_BUT_FRONT = (*PLANNING, "runtime", "recipe", "proof", "tuning", "show")
BELOW = {
    "base": (),
    "ir": ("base",),
    "ops": ("base", "ir"),
    "tracing": ("base", "ir", "ops"),
    "plans": ("base", "ir"),
    "cost": ("base", "ir", "ops", "plans"),
    "show": ("base", "ir", "plans", "cost"),
    "passes": ("base", "ir", "ops", "tracing", "plans", "cost"),
    "runtime": ("base", "ir", "ops", "tracing", "plans"),
    "recipe": PLANNING,
    "proof": (*PLANNING, "runtime", "recipe"),
    "tuning": (*PLANNING, "runtime", "recipe", "proof"),
    "extras": ALL_BUT_FRONT,
    "integrations": ALL_BUT_FRONT,
    "front": (*ALL_BUT_FRONT, "extras", "integrations"),
}
# Files directly in passes/ that passes are written with.
DRIVER = ("dump", "pass_pipeline", "rewriting")
# Files directly in a layer's folder, and folders that have no row of their own.
FILES = "files"
# Imports between the folders of a layer. Files directly in runtime/ may import all of its folders.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "passes": {
        "dump": (),
        "pass_pipeline": ("dump",),
        "rewriting": ("dump", "pass_pipeline"),
        "rules": (),
        "normalize": (*DRIVER, "rules"),
        "facts": (*DRIVER, "rules"),
        "choose": (*DRIVER, "rules", "normalize", "facts"),
        "write": (*DRIVER, "rules", "normalize", "facts", "choose"),
    },
    "cost": {
        "hardware": (),
        FILES: ("hardware",),
        "count": (FILES,),
    },
    "runtime": {
        "comm": (),
        "weights": ("comm",),
        "shards": ("comm", "weights"),
        "gradients": ("comm", "shards"),
        "batch": ("comm", "shards", "gradients"),
        "graphs": ("comm", "shards", "batch"),
        "sharded_tensor": ("comm", "shards"),
        "consistency": ("comm", "shards"),
        "optimizers": ("comm", "shards", "gradients", "sharded_tensor"),
        "checkpoint": ("comm", "weights", "shards", "gradients", "consistency", "optimizers"),
        "training": ("comm", "shards", "gradients", "sharded_tensor", "consistency"),
        "saves": (
            "comm",
            "weights",
            "shards",
            "gradients",
            "batch",
            "consistency",
            "optimizers",
            "checkpoint",
            "training",
        ),
    },
}
# What a plan can be asked for is made above it: imported inside the methods that give it.
LATE_IMPORTS = {("autopart.plans.plan", "autopart.cost.formula.plan_cost")}
LATE_IMPORTS |= {("autopart.integrations.lightning", "autopart.api")}  # a strategy partitions the model itself
LATE_IMPORTS |= {
    ("autopart.plans.plan", f"autopart.show.{name}") for name in ("diff", "explain", "report.page", "setting_reasons")
}
# Imported before a command is known, or to show a plan: torch takes seconds.
WITHOUT_TORCH = (
    "autopart",
    "autopart.cli.main",
    "autopart.show.diff",
    "autopart.show.explain",
    "autopart.cost.formula.plan_cost",
)
LAYER_FOLDERS = ("cost", "passes", "runtime")  # on the top level, and symlinked into autopart/
FOLDERS = tuple(layer for layer in BELOW if layer not in ("base", "recipe", "front"))
MAX_FOLDER_FILES = 14
MAX_FILE_LINES = 550
MAX_FUNCTION_LINES = 65
PRINTING_MODULES = ("autopart.cli.main",)
TRANSFORMERS_MODULES = (
    "autopart.recipe.model_source",
    "autopart.recipe.pretrained_model",
    "autopart.runtime.weights.transformers_names",
    "autopart.extras.generation.caches",
    "autopart.extras.generation.generating_model",
    "autopart.integrations.transformers",
)
COMPAT = "autopart.compat"
# Where operators are known by name: rules, rewrites, and what reads the formula of a loss that the rewrites write.
NAMING_ROOMS = ("rules", "normalize")
NAMING_MODULES = ("autopart.passes.facts.label_count",)
# Below these, a leading underscore is part of a public name: operators (torch.ops.aten._softmax) and torch.fx.
PUBLIC_PREFIXES = ("torch.ops.", "torch.fx.")


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name (a package's `__init__.py` has the package's) and its text."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[tuple[int, str, str]]:
        """(line, module, name) of each import, wherever it stands; `import a.b` has the name ""."""
        return [found for node in ast.walk(self.tree) for found in self._imports_of(node)]

    @cached_property
    def first_lines(self) -> set[int]:
        """The lines of the imports that run when the module is imported."""
        return {node.lineno for node in _run_at_import(self.tree.body) if isinstance(node, ast.Import | ast.ImportFrom)}

    def _imports_of(self, node: ast.AST) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, self._absolute(node), alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, ""

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parent = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parent, node.module] if node.module else parent)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: none of functions, none for type checkers alone."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _run_at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _run_at_import([n for n in getattr(node, field, []) if isinstance(n, ast.stmt)])


Check = Callable[[Module, set[str]], Iterator[str]]


def layer_of(name: str) -> str | None:
    """The layer of an autopart module, or None for a module of someone else."""
    package, _, rest = name.partition(".")
    if package != "autopart":
        return None
    first = rest.partition(".")[0] or "__init__"
    if first in FOLDERS:
        return first
    return "recipe" if first in RECIPE else "front" if first in FRONT else "base"


def import_edges(module: Module, known: set[str]) -> Iterator[str]:
    """Imports go one way: a layer imports itself and what is below it."""
    layer = layer_of(module.name)
    assert layer is not None, module.name
    for line, target, name in module.imports:
        imported = f"{target}.{name}" if f"{target}.{name}" in known else target
        target_layer = layer_of(imported)
        if imported.partition(".")[0] in LAYER_FOLDERS:
            yield f"{module.name}:{line} imports {imported}; its name is autopart.{imported}"
        elif target_layer is not None and target_layer not in (layer, *BELOW[layer]):
            is_late = line not in module.first_lines and (module.name, imported) in LATE_IMPORTS
            if is_late:
                continue
            yield f"{module.name}:{line} ({layer}) imports {imported} ({target_layer})"


def extras_by_name(module: Module, known: set[str]) -> Iterator[str]:
    """The core imports no extra: `load_extra` does, on use. Public names of extras are imported by `autopart`."""
    if layer_of(module.name) == "extras":
        return
    for line, target, name in module.imports:
        is_typing = module.name == "autopart" and line not in module.first_lines
        if f"{target}.{name}.".startswith("autopart.extras.") and not is_typing:
            yield f"{module.name}:{line} imports {target}; load_extra('...') on use"


def room_edges(module: Module, known: set[str]) -> Iterator[str]:
    """A folder inside the passes, the cost or the runtime imports itself and what is below it."""
    layer, room = _room_of(module.name)
    below = ROOMS.get(layer, {}).get(room)
    for line, target, name in module.imports if below is not None else ():
        imported = f"{target}.{name}" if f"{target}.{name}" in known else target
        other_layer, other = _room_of(imported)
        if other_layer == layer and other not in ("", room, *(below or ())) and line in module.first_lines:
            yield f"{module.name}:{line} imports {imported} ({other})"


def _room_of(name: str) -> tuple[str, str]:
    """`runtime`, `comm` of `autopart.runtime.comm.list_collectives`; `cost`, `files` of
    `autopart.cost.predict.table`."""
    _, layer, room, *_ = (*name.split("."), "", "")
    return layer, room if not room or room in ROOMS.get(layer, {}) else FILES


def cost_without_process_groups(module: Module, known: set[str]) -> Iterator[str]:
    """A plan is judged without torch.distributed: no process group, no GPU."""
    if layer_of(module.name) != "cost":
        return
    for line, target, name in module.imports:
        if f"{target}.{name}.".startswith("torch.distributed."):
            yield f"{module.name}:{line} imports {target}; cost knows nothing of torch.distributed"


def torch_at_import(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    """The ways in which importing a module imports torch."""
    seen, paths = {module.name}, [[module]]
    while paths:
        path = paths.pop()
        last = path[-1]
        for line, target, name in last.imports:
            if line not in last.first_lines:
                continue
            if target.partition(".")[0] == "torch":
                yield f"{' imports '.join(m.name for m in path)}:{line} imports {target}"
            for imported in {target, f"{target}.{name}"} & set(modules) - seen:
                seen.add(imported)
                paths.append([*path, modules[imported]])


def file_length(module: Module, known: set[str]) -> Iterator[str]:
    """A file is short enough to be read in one go."""
    num_lines = len(module.source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{module.name} has {num_lines} lines; at most {MAX_FILE_LINES}"


def function_length(module: Module, known: set[str]) -> Iterator[str]:
    """A function, with its docstring, fits on a screen."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{module.name}:{node.lineno} {node.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"


def no_print(module: Module, known: set[str]) -> Iterator[str]:
    """Only the command line prints; the library returns values and raises errors."""
    if module.name in PRINTING_MODULES:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id == "print":
            yield f"{module.name}:{node.lineno} uses print"


def no_operator_names(module: Module, known: set[str]) -> Iterator[str]:
    """What is done with an operator is decided by its rule: by name in the tables of rules and the rewrites alone."""
    layer, room = _room_of(module.name)
    if layer not in ("passes", "cost") or room in NAMING_ROOMS or module.name in NAMING_MODULES:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and re.match(r"(aten|autopart)?::\w", str(node.value)):
            yield f"{module.name}:{node.lineno} names {node.value}"
        elif isinstance(node, ast.Compare) and re.search(r"\b(aten|autopart_ops|torch\.ops)\b", ast.unparse(node)):
            yield f"{module.name}:{node.lineno} compares with an operator: {ast.unparse(node)}"


def no_transformers(module: Module, known: set[str]) -> Iterator[str]:
    """autopart knows graphs, not a model library."""
    if module.name in TRANSFORMERS_MODULES:
        return
    for line, target, _ in module.imports:
        if target.partition(".")[0] == "transformers":
            yield f"{module.name}:{line} imports {target}"


def private_torch(module: Module, known: set[str]) -> Iterator[str]:
    """Private names of torch, imported or reached as attributes, stand where an upgrade is looked for."""
    if module.name.startswith(f"{COMPAT}."):
        return
    aliases = torch_aliases(module.tree)
    used = [(line, f"{target}.{name}".rstrip(".")) for line, target, name in module.imports]
    used += [
        (node.lineno, dotted_name(node, aliases)) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)
    ]
    for line, dotted in sorted(set(used)):
        if is_private_torch(dotted):
            yield f"{module.name}:{line} touches {dotted}; only {COMPAT} may"


def torch_aliases(tree: ast.Module) -> dict[str, str]:
    """What local names stand for: `import torch.distributed as dist` and `from torch import distributed as dist`."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def dotted_name(node: ast.expr, aliases: dict[str, str]) -> str:
    """The full dotted name of an attribute chain that starts at an imported name; else ""."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_private_torch(dotted: str) -> bool:
    if not dotted.startswith("torch.") or dotted.startswith(PUBLIC_PREFIXES):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


CHECKS: tuple[Check, ...] = (
    import_edges,
    extras_by_name,
    room_edges,
    cost_without_process_groups,
    file_length,
    function_length,
    no_operator_names,
    no_print,
    no_transformers,
    private_torch,
)

LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
BAD = [
    (import_edges, Module("autopart.ir.graph", "import autopart.cost")),
    (import_edges, Module("autopart.ir.graph", "from .. import passes")),
    (import_edges, Module("autopart.ir.graph", "from autopart.runtime.stage import Stage")),
    (import_edges, Module("autopart.ir.graph", "from ..api import parallelize")),
    (import_edges, Module("autopart.ir.graph", "from autopart import parallelize")),
    (import_edges, Module("autopart.cost.time", "from autopart.passes import solve")),
    (import_edges, Module("autopart.cost.time", "from ..passes import solve")),
    (import_edges, Module("autopart.cost", "from ..runtime import stage", is_package=True)),
    (import_edges, Module("autopart.cost.time", "def f():\n    from autopart.runtime import stage")),
    (import_edges, Module("autopart.passes.solve", "from autopart.runtime import stage")),
    (import_edges, Module("autopart.passes.solve", "import importlib\nimportlib.import_module('autopart.runtime')")),
    (import_edges, Module("autopart.passes.rules.view", "from ...runtime import stage")),
    (import_edges, Module("autopart.cost.count.saved_tensors", "from autopart.passes.facts.analyze import annotate")),
    (import_edges, Module("autopart.tracing.trace_model", "from autopart.cost import flops")),
    (import_edges, Module("autopart.runtime.stage", "from autopart import cost")),
    (import_edges, Module("autopart.runtime.stage", "from autopart.passes.rules import view")),
    (import_edges, Module("autopart.passes.solve", "from cost import time")),
    (import_edges, Module("autopart.api", "import runtime.stage")),
    (import_edges, Module("autopart.passes.solve", "from autopart.runtime.comm import collectives")),
    (import_edges, Module("autopart.plans.plan", "from autopart.cost.formula.plan_cost import Cost")),
    (import_edges, Module("autopart.plans.pins", "def f():\n    from autopart.cost.formula.plan_cost import Cost")),
    (import_edges, Module("autopart.ir.graph", "from autopart.plans import plan")),
    (import_edges, Module("autopart.tracing.trace_model", "from autopart.plans import plan")),
    (import_edges, Module("autopart.passes.solve", "from autopart.show import explain")),
    (import_edges, Module("autopart.recipe.compiler", "from autopart.proof.verify import verify")),
    (import_edges, Module("autopart.proof.verify", "from autopart.api import plan")),
    (import_edges, Module("autopart.proof.scale.scaled_model", "from autopart.tuning.search import search")),
    (extras_by_name, Module("autopart.runtime.module", "from autopart.extras.dp_sync import make_sync")),
    (extras_by_name, Module("autopart.api", "from autopart import extras")),
    (extras_by_name, Module("autopart.cli.main", "def f():\n    import autopart.extras.calibrate")),
    (extras_by_name, Module("autopart.ir.mesh", "importlib.import_module('autopart.extras.dp_sync')")),
    (extras_by_name, Module("autopart", "from .extras.interop import pins_from", is_package=True)),
    (room_edges, Module("autopart.passes.rules.view", "from autopart.passes.choose import shard")),
    (room_edges, Module("autopart.passes.facts.roles", "from ..write.lower import lower")),
    (room_edges, Module("autopart.cost.predict.table", "from autopart.cost.count import kept")),
    (room_edges, Module("autopart.cost.predict.table", "from autopart.cost.count.saved_tensors import KNOWN")),
    (room_edges, Module("autopart.runtime.comm.list_collectives", "from autopart.runtime.gradients import reducer")),
    (room_edges, Module("autopart.runtime.shards.cut", "from autopart.runtime.lockstep import run")),
    (room_edges, Module("autopart.runtime.consistency.calls", "from autopart.runtime.training import norms")),
    (cost_without_process_groups, Module("autopart.cost.time", "import torch.distributed as dist")),
    (cost_without_process_groups, Module("autopart.cost.time", "from torch import distributed")),
    (cost_without_process_groups, Module("autopart.cost.time", "from torch.distributed.tensor import Shard")),
    (file_length, Module("autopart.ir.graph", "x = 1\n" * (MAX_FILE_LINES + 1))),
    (function_length, Module("autopart.ir.graph", LONG_FUNCTION)),
    (function_length, Module("autopart.ir.graph", "async " + LONG_FUNCTION)),
    (no_operator_names, Module("autopart.passes.write.lower", "SPECIAL = {'aten::mean': mean}")),
    (no_operator_names, Module("autopart.passes.write.lower", "node.target is torch.ops.aten.mean.dim")),
    (no_operator_names, Module("autopart.passes.write.lower", "node.target in (aten.mul.Tensor, aten.add.Tensor)")),
    (no_operator_names, Module("autopart.cost.count", "operator_name(node).endswith('::embedding')")),
    (no_print, Module("autopart.passes.solve", "print('here')")),
    (no_print, Module("autopart.passes.solve", "list(map(print, ()))")),
    (no_transformers, Module("autopart.ir.graph", "import transformers")),
    (no_transformers, Module("autopart.cli.main", "def f():\n    from transformers.models import gpt2")),
    (private_torch, Module("autopart.ir.graph", "import torch._dynamo")),
    (private_torch, Module("autopart.ir.graph", "from torch._subclasses import FakeTensorMode")),
    (private_torch, Module("autopart.ir.graph", "from torch.utils import _pytree")),
    (private_torch, Module("autopart.runtime.stage", "import torch.distributed._functional_collectives as fc")),
    (private_torch, Module("autopart.runtime.stage", "from torch.distributed.pipelining import _backward")),
    (private_torch, Module("autopart.runtime.stage", "from torch.distributed.pipelining._utils import flatten")),
    (private_torch, Module("autopart.runtime.stage", "import torch\ntorch._C._get_graph_exec_group_size()")),
    (private_torch, Module("autopart.runtime.stage", "import torch.distributed as d\nd._functional_collectives")),
]

GOOD = [
    Module("autopart.passes.write.lower", "emit(aten.mul.Tensor, x)\noperator_name(node).removeprefix('autopart::')"),
    Module("autopart.passes.rules.tables", "RULES = {'aten::linear': rule}"),
    Module("autopart.plans.plan", "def f():\n    from autopart.cost.formula.plan_cost import Cost"),
    Module("autopart.ir.graph", "from autopart.ir import layout\nfrom .layout import Layout\nimport torch, sympy"),
    Module(
        "autopart.cost.time", "from autopart.cost import memory\nfrom ..ir.graph import Graph\nfrom . import memory"
    ),
    Module("autopart.cost", "from .time import f\nfrom ..ir.graph import Graph", is_package=True),
    Module(
        "autopart.cost.count.saved_tensors",
        "from autopart.cost.predict.table import Row\nfrom autopart.ir.trace import Trace",
    ),
    Module("autopart.passes.solve", "from autopart.cost.time import f\nfrom autopart.passes.rules import view"),
    Module("autopart.passes.solve", "from torch.distributed.tensor import Shard\nimport my_transformers"),
    Module("autopart.runtime.stage", "import torch.distributed as dist\nfrom ..ir.graph import Graph\ndist.all_reduce"),
    Module("autopart.api", "from . import cost, passes, runtime\nfrom autopart.passes.solve import solve"),
    Module("autopart", "from .api import parallelize\nfrom .cost import time", is_package=True),
    Module("autopart", "if TYPE_CHECKING:\n    from autopart.extras.interop import pins_from", is_package=True),
    Module("autopart.extras.interop", "from autopart.extras.interop.formats import export", is_package=True),
    Module("autopart.cli.main", "print('a table')"),
    Module("autopart.ir.graph", "import torch\ntorch.ops.aten._softmax.default\ntorch.__version__\nx._private"),
    Module("autopart.ir.graph", "from torch.fx import _symbolic_trace\nimport torch.fx"),
    Module("autopart.ir.graph", "graph.print_tabular()\n" * (MAX_FILE_LINES - 1)),
    Module("autopart.ir.graph", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)),
    Module(f"{COMPAT}.torch_internals", "import torch.distributed._functional_collectives"),
]
PLANTED_NAMES = {"autopart.ir.layout", "autopart.ir.graph", "autopart.cost.memory_kinds", "autopart.passes.rules.view"}
PLANTED_NAMES |= {f"autopart.{folder}" for folder in LAYER_FOLDERS}


def read_package() -> list[Module]:
    """Every module of autopart; os.walk enters the symlinked folders, so their modules have their imported names."""
    modules = []
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(ROOT).with_suffix("").parts
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return modules


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read_package()


@pytest.mark.few
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package(check: Check, modules: list[Module]) -> None:
    known = {module.name for module in modules}
    violations = [violation for module in modules for violation in check(module, known)]
    assert not violations, "\n  ".join([check.__doc__ or "", *violations])


def circles(modules: list[Module]) -> list[list[str]]:
    """Return the groups of files that import each other, inside functions too, but not for type checkers alone."""
    graph = networkx.DiGraph()
    names = {module.name for module in modules}
    for module in modules:
        for node in _run(module.tree):
            for _, target, name in module._imports_of(node):
                imported = f"{target}.{name}" if f"{target}.{name}" in names else target
                if imported in names - {module.name}:
                    graph.add_edge(module.name, imported)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `tree`, but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from _run(node)


def repeated_names(modules: list[Module]) -> list[str]:
    """Return the names of files, and of classes, that stand in the package twice."""
    files = Counter(module.name.rpartition(".")[2] for module in modules if not module.is_package)
    classes = Counter(
        node.name for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    )
    return [name for names in (files, classes) for name, count in names.items() if count > 1]


def loaders(modules: list[Module]) -> dict[str, list[str]]:
    """Return {extra: the modules that load it}; the extra is "" where `load_extra` is passed no literal name."""
    result: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "load_extra":
                name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
                result.setdefault(str(name), []).append(module.name)
    return result


def full_folders(modules: list[Module]) -> list[str]:
    """Return the folders that have too many files."""
    sizes = Counter(module.name.rpartition(".")[0] for module in modules if not module.is_package)
    return [f"{folder} has {size} files" for folder, size in sizes.items() if size > MAX_FOLDER_FILES]


@pytest.mark.large
def test_files_make_no_circle(modules: list[Module]) -> None:
    assert circles(modules) == []


def test_an_extra_is_loaded_in_one_place(modules: list[Module]) -> None:
    found = loaders(modules)
    folders = {module.name.split(".")[2] for module in modules if module.name.startswith("autopart.extras.")}
    assert set(EXTRAS) == folders
    assert {"dp_sync", "pipedream_2bw"} <= set(found) <= folders, found
    assert [names for names in found.values() if len(names) > 1] == []
    planted = [Module("autopart.a", 'load_extra("x")'), Module("autopart.b", 'extras.load_extra("x")\nload_extra(y)')]
    assert loaders(planted) == {"x": ["autopart.a", "autopart.b"], "": ["autopart.b"]}


def test_no_folder_is_full(modules: list[Module]) -> None:
    assert full_folders(modules) == []


def test_names_are_unique(modules: list[Module]) -> None:
    assert repeated_names(modules) == []


def test_planted_circles_folders_and_names_are_found() -> None:
    late = Module("autopart.a", "def f():\n    from autopart.b import g")
    typed = Module("autopart.a", "if TYPE_CHECKING:\n    from autopart.b import g")
    other = Module("autopart.b", "import autopart.a")
    assert circles([late, other]) == [["autopart.a", "autopart.b"]]
    assert circles([typed, other]) == []
    assert full_folders([Module(f"autopart.a.m{i}", "") for i in range(MAX_FOLDER_FILES + 1)])
    twice = [Module("autopart.a.m", "class A: ..."), Module("autopart.b.m", "class A: ...")]
    assert repeated_names(twice) == ["m", "A"]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_imported_without_torch(name: str, modules: list[Module]) -> None:
    by_name = {module.name: module for module in modules}
    assert list(torch_at_import(by_name[name], by_name)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from torch import nn",
        "try:\n    import torch.fx\nexcept ImportError:\n    pass",
        "class A:\n    from torch import nn",
        "from autopart.tracing import trace_model",
        "from autopart.tracing.trace_model import f",
        "if TYPE_CHECKING:\n    import sympy\nelse:\n    import torch",
    ],
)
def test_a_planted_import_of_torch_is_found(source: str) -> None:
    by_name = {"autopart.tracing.trace_model": Module("autopart.tracing.trace_model", "import torch")}
    assert list(torch_at_import(Module("autopart.plans.plan", source), by_name))


def test_a_late_import_of_torch_is_none() -> None:
    late = "def f():\n    import torch\n    from autopart.tracing.trace_model import f"
    source = f"if TYPE_CHECKING:\n    import torch\n{late}"
    by_name = {"autopart.tracing.trace_model": Module("autopart.tracing.trace_model", "import torch")}
    assert list(torch_at_import(Module("autopart.plans.plan", source), by_name)) == []


@pytest.mark.parametrize(("check", "module"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_planted_source_is_found(check: Check, module: Module) -> None:
    assert list(check(module, PLANTED_NAMES))


@pytest.mark.parametrize("module", GOOD, ids=lambda module: module.name)
def test_good_source_is_left_alone(module: Module) -> None:
    assert [violation for check in CHECKS for violation in check(module, PLANTED_NAMES)] == []


def test_every_check_is_planted() -> None:
    assert {check for check, _ in BAD} == set(CHECKS)


def test_every_layer_is_read(modules: list[Module]) -> None:
    layers = {layer_of(module.name) for module in modules}
    assert layers == set(BELOW)
    assert "autopart.passes.rules" in {module.name for module in modules}


def test_layers_make_no_circle() -> None:
    for below in (BELOW, *ROOMS.values()):
        order = list(below)
        assert all(set(below[layer]) <= set(order[:place]) for place, layer in enumerate(order))


@pytest.mark.parametrize("folder", LAYER_FOLDERS)
def test_layer_folder_is_a_relative_symlink(folder: str) -> None:
    if not (ROOT / folder).is_dir():
        pytest.skip("a source distribution holds the folders inside autopart/")
    assert os.readlink(PACKAGE / folder) == f"../{folder}"

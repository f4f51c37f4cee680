"""What is imported when: nothing before it is used, and torch for nothing that does without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autopart

HEAVY = ("torch", "sympy", "scipy", "jsonschema", "transformers", "numpy")
COMPILER = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "torch.distributed.tensor", "scipy")

LOADED = """
import json, sys
{code}
print()
print(json.dumps(sorted(sys.modules)))
"""


def loaded(code):
    """The modules that a fresh process has after some code."""
    done = subprocess.run([sys.executable, "-c", LOADED.format(code=code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """A plan of a small model on disk."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    autopart.plan(model, "pp2,tp2", example_args=(torch.randn(4, 8),)).save(path)
    return str(path)


def command(*arguments):
    return f"""
from autopart.cli.main import main
try:
    main({list(arguments)!r}, prog_name="autopart")
except SystemExit as ended:
    assert ended.code == 0, ended.code
"""


def test_import_loads_nothing():
    modules = loaded("import autopart")
    assert modules.isdisjoint(HEAVY)
    assert {name for name in modules if name.startswith("autopart")} == {"autopart"}


@pytest.mark.parametrize(
    "arguments", [("--help",), ("plan", "--help"), ("verify", "--help"), ("run", "--help"), ("--version",)]
)
def test_help_loads_no_torch(arguments):
    assert loaded(command(*arguments)).isdisjoint(HEAVY)


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_explain_loads_no_torch(plan_file, arguments):
    assert loaded(command("explain", plan_file, *arguments)).isdisjoint(
        {*HEAVY, "autopart.compat.torch_internals"} - {"jsonschema"}
    )


def test_diff_loads_no_torch(plan_file):
    assert loaded(command("diff", plan_file, plan_file)).isdisjoint({*HEAVY} - {"jsonschema"})


@pytest.mark.large
def test_public_functions_load_no_compiler():
    """What `import autopart` and the first use of its functions add to `import torch`."""
    modules = loaded("import autopart; autopart.parallelize, autopart.plan, autopart.verify")
    assert "autopart.runtime.module" in modules and modules.isdisjoint(COMPILER)


PLAN = """
import autopart, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
plan = autopart.plan(model, "{mesh}", example_args=(torch.randn(4, 8),), microbatches=2{options})
str(plan), plan.why("dp_sync"), plan.cost.parts, autopart.ParallelModule, autopart.search
"""


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options", "extra"), [
    ("dp2", "", None), ("pp2", ', schedule="1f1b"', None), ("dp2", ', dp_sync="all_reduce"', None),
    ("dp2", ', dp_sync="top_k:0.5"', "dp_sync"), ("pp2", ', schedule="1f1b_2bw"', "pipedream_2bw"),
])  # fmt: skip
def test_extras_are_loaded_on_use(mesh, options, extra):
    """Plans and modules load only the extra that an option needs, and of that extra nothing that runs."""
    modules = loaded(PLAN.format(mesh=mesh, options=options))
    assert {name.split(".")[2] for name in modules if name.startswith("autopart.extras.")} == ({extra} - {None})
    assert not [name for name in modules if name.endswith((".data_sync", ".batches_in_flight"))]


@pytest.mark.large
def test_loaded_can_fail():
    assert not loaded("import torch").isdisjoint(HEAVY)
    with pytest.raises(AssertionError):
        loaded("import no_such_module")


# Public names


def test_every_public_name_is_there():
    for name in autopart.__all__:
        assert getattr(autopart, name).__name__ == name
    assert set(autopart.__all__) <= set(dir(autopart)) and "__version__" in dir(autopart)


@pytest.mark.large
def test_a_function_is_no_module_whatever_is_imported_first():
    code = """
import autopart.proof.verify, autopart.tuning.search, autopart.extras.calibrate.calibrate_machine, autopart.plans.plan
import autopart, types
from autopart import plan, search, verify, calibrate
for name in ("plan", "search", "verify", "calibrate"):
    assert isinstance(getattr(autopart, name), types.FunctionType), name
    assert globals()[name] is getattr(autopart, name), name
"""
    loaded(code)


def test_modules_are_attributes():
    loaded("import autopart; autopart.errors.LayoutError; autopart.show; autopart.cost")


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'autopart' has no attribute 'paralellize'"):
        _ = autopart.paralellize
    with pytest.raises(ImportError, match="cannot import name 'paralellize'"):
        from autopart import paralellize  # noqa: F401


# What was registered by an import


@pytest.mark.large
def test_a_plan_has_its_formulas_whatever_is_imported(plan_file):
    code = f"""
from autopart.plans.plan import Plan
plan = Plan.load({plan_file!r})
assert plan.cost.at(tp=4).step_time_s > 0 and plan.cost.parts and plan.cost.latex()
"""
    assert "sympy" in loaded(code)


@pytest.mark.large
def test_a_plan_writes_its_report_whatever_is_imported(plan_file, tmp_path):
    page = str(tmp_path / "plan.html")
    loaded(f"from autopart.plans.plan import Plan; Plan.load({plan_file!r}).report({page!r})")
    assert "<html" in Path(page).read_text()


@pytest.mark.large
def test_collectives_are_operators_wherever_programs_are_written():
    loaded("import autopart.passes.write.lower, torch; torch.ops.autopart.all_reduce")

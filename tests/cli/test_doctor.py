"""`autopart doctor`, of the machine and of a model; and how an error is reported where several processes meet it."""

import inspect
import json
import os
import platform
import subprocess
import sys

import custom_ops  # noqa: F401  (registers an operator)
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import autopart
from autopart.cli import machine
from autopart.cli.console import WIDTH, wrapped
from autopart.cli.doctor import Outcome
from autopart.cli.main import main
from autopart.errors import InputError


def test_doctor_on_this_machine():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    for name, value in (
        ("torch", torch.__version__),
        ("gloo", "available"),
        ("cores", "process"),
        ("memory", "GB free"),
    ):
        assert any(line.startswith(f"ok       {name} ") and value in line for line in result.output.splitlines()), name
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert found["ok"] and {"name": "gloo", "value": "available", "ok": True, "hint": ""} in found["findings"]


def test_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "MISSING  torch         2.4.1+cu121 is too old\n" in result.output
    assert "pip install 'torch>=2.11'" in result.output and "MISSING  gloo" in result.output
    assert "ok       transformers  not installed: --hf-config needs it" in result.output


# --- a model ---------------------------------------------------------------------------------------------------------

VERSIONS = f"autopart {autopart.__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"


class Small(nn.Module):
    def __init__(self, features=8, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x, y):
        return (self.down(self.up(x).relu()) - y).square().mean()


class Recurrent(Small):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x, y):
        return (self.down(self.lstm(self.up(x))[0]) - y).square().mean()


class Deciding(Small):
    def forward(self, x, y):
        hidden = self.up(x)
        while hidden.sum() > 0:
            hidden = hidden - 1
        return (self.down(hidden) - y).square().mean()


class Product(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, size))

    def forward(self, x):
        return torch.ops.autopart_test.scaled_mm(x, self.weight)


class Unruled(Small):
    """An operator without a rule in more modules than are listed, twice in each."""

    def __init__(self, *names):
        super().__init__()
        self.products = nn.ModuleDict({name: Product(2 * size) for size, name in enumerate(names, 1)})

    def forward(self, x, y):
        hidden = self.up(x)
        sums = [product(hidden).sum() + product(hidden[:, None]).sum() for product in self.products.values()]
        return (self.down(hidden) - y).square().mean() + sum(sums)


def rows(*shape):
    return {"x": torch.randn(shape), "y": torch.randn(shape)}


def small():
    return Small(), rows(8, 8)


def recurrent():
    return Recurrent(), rows(8, 5, 8)


def deciding():
    return Deciding(), rows(8, 8)


def uneven():
    return Small(7, 15), rows(8, 7)


def page(model, *arguments, exit_code=0):
    result = CliRunner().invoke(main, ["doctor", f"test_doctor:{model}", *arguments])
    assert result.exit_code == exit_code, result.output
    assert max(map(len, result.stdout.splitlines())) <= WIDTH or "--json" in arguments
    return result.stdout


SMALL = """\
Small: 280 parameters, in train mode
inputs: x float32[8,8], y float32[8,8]

it can be traced: 9 operators, 4.1 kFLOP in matrix products

tp2 works: tp shards 100 % of the matrix FLOPs
dp2 works: dp shards 100 % of the matrix FLOPs
pp2 works: the largest of 2 stages has 50.7 % of the FLOPs

"""


def test_a_model_that_works():
    assert page("small") == SMALL + VERSIONS


def test_the_model_is_named_as_elsewhere():
    assert CliRunner().invoke(main, ["doctor", "--model", "test_doctor:small"]).stdout == SMALL + VERSIONS
    both = CliRunner().invoke(main, ["doctor", "test_doctor:small", "--model", "test_doctor:small"])
    assert both.exit_code == 2
    assert (
        both.output
        == "a model is named twice: as an argument and by --model\n  try    autopart doctor test_doctor:small\n"
    )


RECURRENT = """\
Recurrent: 2,456 parameters, in train mode
inputs: x float32[8,5,8], y float32[8,5,8]

it can be traced: 9 operators, 184 kFLOP in matrix products

tp2 works: tp shards 11.1 % of the matrix FLOPs, 1 operator runs in full
  full   1 aten::lstm in lstm, 88.9 % of the work: its sharding rule does not
         shard the dims of its weights
  try    dp in place of tp: it shards the batch
dp2 works: dp shards 100 % of the matrix FLOPs
pp2 works: the largest of 2 stages has 94 % of the FLOPs

"""


@pytest.mark.large
def test_a_model_of_which_a_layer_runs_whole():
    assert page("recurrent") == RECURRENT + VERSIONS
    model, batch = recurrent()
    result = autopart.verify(model, "tp2", example_kwargs=batch)
    assert result.ok
    assert "note: run in full on every rank: 1 aten::lstm in lstm, 88" in str(result)
    assert autopart.verify(model, "dp2", example_kwargs=batch).notes == ()


DECIDING = """\
Deciding: 280 parameters, in train mode
inputs: x float32[8,8], y float32[8,8]

it is refused: Deciding cannot be traced
  why    this line decides what to run by the values in a tensor, which a graph cannot hold; they come from the \
output of up; a graph cannot compute both sides of the branch either: the number of branches depends on the outcome of \
another one, as in a loop
  where  {path}:7: while hidden.sum() > 0:
  try    torch.where(condition, a, b); or the decision outside of forward(); or parallelize the modules on either \
side of it, e.g. parallelize(model.up, mesh)

"""


def test_a_model_that_is_refused(tmp_path, monkeypatch):
    parts = "import torch\nfrom torch import nn\nfrom test_doctor import Small, rows\n"
    path = tmp_path / "deciding.py"
    path.write_text(parts + inspect.getsource(Deciding) + "def build():\n    return Deciding(), rows(8, 8)\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["doctor", "deciding:build"])
    assert result.exit_code == 1
    assert result.stdout == wrapped(DECIDING.format(path=path)) + "\n" + VERSIONS


def test_a_mesh_that_is_refused():
    said = page("uneven", exit_code=1)
    assert "tp2 is refused: tp=2 divides no weight of the model\n  why    the weights of its matrix products" in said
    assert "  try    leave tp out of the mesh\ndp2 works: " in said


def test_the_mesh_that_is_named():
    said = page("recurrent", "--mesh", "dp2,pp2,tp2")
    assert "pp2,dp2,tp2 works: dp shards 100 % and tp shards 11.1 % of the matrix FLOPs, the\n  largest of 2" in said
    assert said.count(" works: ") == 1


def test_a_page_as_json():
    found = json.loads(page("uneven", "--json", exit_code=1))
    assert not found["ok"] and found["refused"] == "" and found["versions"]["torch"] == torch.__version__
    assert [(row["mesh"], bool(row["refused"])) for row in found["meshes"]] == [("tp2", 1), ("dp2", 0), ("pp2", 0)]
    (tp,) = json.loads(page("recurrent", "--json", "--mesh", "tp2"))["meshes"]
    assert tp["divided"] == {"tp": 0.111111}
    assert [(row["operator"], row["count"], row["share"]) for row in tp["whole"]] == [
        ("aten::lstm", 1, pytest.approx(8 / 9))
    ]


def test_operators_without_a_rule():
    """The line that would shard the largest; kinds beyond the first few are counted."""
    found = autopart.doctor(Unruled("a", "b", "c", "d", "e", "f"), "tp2", example_kwargs=rows(8, 8))
    assert found.ok
    assert str(found.meshes[0]).splitlines() == [
        "tp2 works: tp shards 100 % of the known matrix FLOPs, 12 operators run in full",
        "  full   2 autopart_test::scaled_mm in products.f, 3.33 kB in and out: it has no sharding rule",
        "  full   2 autopart_test::scaled_mm in products.e, 2.94 kB in and out: it has no sharding rule",
        "  full   2 autopart_test::scaled_mm in products.d, 2.56 kB in and out: it has no sharding rule",
        "  full   2 autopart_test::scaled_mm in products.c, 2.18 kB in and out: it has no sharding rule",
        "  full   4 more, of 2 kinds: see autopart explain",
        '  try    autopart.rule("autopart_test::scaled_mm", "b a, a c -> b c", sum="a"), guessed from the '
        "shapes: autopart.check_rule proves or refutes it",
    ]


def test_a_loss_of_ones_own():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), torch.randn(8, 8)
    found = autopart.doctor(model, example_args=(x,), loss_fn=nn.functional.mse_loss, target=x)
    assert found.ok and found.model == "Sequential" and dict(found.inputs) == {"input": "float32[8,8]"}
    assert len(found.meshes) == 3 and found.meshes[0].divided == {"tp": 1.0}


def test_a_model_without_matrix_work():
    found = autopart.doctor(nn.LayerNorm(8), "dp2", example_args=(torch.randn(8, 8),))
    assert "it can be traced: 1 operator, 0 FLOP in matrix products\n" in str(found)
    assert str(found.meshes[0]) == "dp2 works: the model has no matrix products"


def test_matrix_work_of_weights_alone():
    class Merged(Small):
        def forward(self, x):
            return (x @ (self.up.weight.T @ self.down.weight.T)).square().mean()

    found = autopart.doctor(Merged(8, 8), "dp2", example_args=(torch.randn(8, 8),))
    assert str(found.meshes[0]) == (
        "dp2 works: dp shards 50 % of the matrix FLOPs\n"
        "  note   50 % of the matrix FLOPs cannot be sharded over dp: these products use weights alone, or need the "
        "full batch"
    )


def test_notes_beyond_the_first_are_counted():
    said = str(Outcome("dp2", divided={"dp": 1.0}, notes=("one", "two", "three", "four")))
    assert said.splitlines()[1:] == ["  note   one", "  note   two", "  note   2 more: see autopart explain"]


def test_a_page_needs_an_example():
    with pytest.raises(InputError) as raised:
        autopart.doctor(nn.Linear(8, 8))
    assert str(raised.value) == (
        "doctor() needs an example call\n"
        "  why    the model is traced on it\n"
        "  try    doctor(model, example_kwargs={'input_ids': ids, 'labels': labels})"
    )


@pytest.mark.large
@pytest.mark.timeout(400)
def test_under_torchrun_one_rank_tells_the_error():
    """Both meet it; torchrun's own lines are beside it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "autopart", "run", "--hf-config", "gpt2", "--mesh", "tp3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("mesh tp3 needs 3 processes") == 1, done.stderr
    assert "autopart.errors" not in done.stderr and "rank 1:" not in done.stderr

"""Recipes in examples/launch, and the text on nodes: every recipe starts as many processes as its mesh has ranks."""

import ast
import math
import re
from pathlib import Path

import pytest
import yaml

import autopart
from autopart.show.nodes import crossing_axes

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


def counts(text):
    """Return (nodes, processes per node) that a torchrun command names; None for a value of a variable."""
    found = (re.search(rf"--{name}[= ]\"?(\S+?)\"?(\s|$)", text) for name in ("nnodes", "nproc-per-node"))
    return [int(one[1]) if one and one[1].isdigit() else None for one in found]


def command(container):
    return " ".join([*container["command"], *container["args"]])


def of_shell(name, text):
    nodes, devices = counts(text)
    slurm = dict(re.findall(r"^#SBATCH --(nodes|gpus-per-node)=(\d+)", text, re.MULTILINE))
    if slurm:
        assert int(slurm["gpus-per-node"]) == devices and "--ntasks-per-node=1" in text
    return nodes or int(slurm["nodes"]), devices, text


def of_jobset(text):
    data = yaml.safe_load(text)
    (job,) = data["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    nodes, devices = counts(command(container))
    assert nodes == job["replicas"] * spec["parallelism"] == spec["completions"]
    assert devices == container["resources"]["limits"]["nvidia.com/gpu"]
    name = data["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:" in command(container)
    return nodes, devices, command(container)


def of_pytorchjob(text):
    spec = yaml.safe_load(text)["spec"]
    workers = spec["pytorchReplicaSpecs"]["Worker"]
    (container,) = workers["template"]["spec"]["containers"]
    nodes, devices = spec["elasticPolicy"]["minReplicas"], int(spec["nprocPerNode"])
    assert nodes == workers["replicas"] and devices == container["resources"]["limits"]["nvidia.com/gpu"]
    return nodes, devices, command(container)


def of_skypilot(text):
    data = yaml.safe_load(text)
    assert counts(data["run"])[1] == int(data["resources"]["accelerators"].partition(":")[2])
    return data["num_nodes"], counts(data["run"])[1], data["run"]


def of_ray(text):
    values = {node.targets[0]: node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)}
    ((names, constants),) = values.items()
    mesh, workers = ast.literal_eval(constants)
    assert [name.id for name in names.elts] == ["MESH", "NUM_WORKERS"]
    return 1, workers, f"--mesh {mesh}"


READERS = {
    "torchrun.sh": lambda text: of_shell("torchrun.sh", text), "slurm.sbatch": lambda text: of_shell("slurm", text),
    "jobset.yaml": of_jobset, "pytorchjob.yaml": of_pytorchjob, "skypilot.yaml": of_skypilot, "ray_train.py": of_ray,
}  # fmt: skip


def test_every_recipe_is_read_and_listed():
    assert READERS.keys() | {"README.md"} == {path.name for path in LAUNCH.iterdir() if path.is_file()}
    readme = (LAUNCH / "README.md").read_text()
    assert all(f"[{name}]({name})" in readme for name in READERS)


@pytest.mark.parametrize("name", READERS)
def test_processes_fit_the_mesh(name):
    nodes, devices, text = READERS[name]((LAUNCH / name).read_text())
    mesh = autopart.Mesh.parse(re.search(r"--mesh[= ](\S+)", text)[1])
    assert nodes * devices == mesh.num_ranks == 8
    assert name == "ray_train.py" or crossing_axes(mesh, devices) == ["dp"]


@pytest.mark.parametrize(("mesh", "per_node", "expected"), [
    ("dp2,tp8", 8, ["dp"]), ("tp16", 8, ["tp"]), ("pp2,dp2,tp4", 8, ["pp"]), ("dp4,tp2", 8, []),
    ("dp8,tp3", 8, ["dp", "tp"]),
])  # fmt: skip
def test_axes_between_nodes(mesh, per_node, expected):
    mesh = autopart.Mesh.parse(mesh)
    assert crossing_axes(mesh, per_node) == expected
    ranks = range(mesh.num_ranks)  # by the definition: a group of ranks along the axis with two nodes
    for axis, size in mesh.sizes.items():
        others = [{k: v for k, v in mesh.coordinates(rank).items() if k != axis} for rank in ranks]
        nodes = [{r // per_node for r in ranks if others[r] == others[rank]} for rank in ranks]
        assert (axis in expected) == any(len(one) > 1 for one in nodes), (axis, size, math.prod(mesh.sizes.values()))

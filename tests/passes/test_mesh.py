"""A mesh is read from many forms, and counts ranks in one order: pp outermost, tp innermost."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.errors import MeshError
from autopart.ir.mesh import AXES, Mesh

SIZES = st.dictionaries(st.sampled_from([axis.name for axis in AXES]), st.integers(1, 4), min_size=1)


def device_mesh(names: tuple[str, ...] | None, shape: tuple[int, ...]) -> SimpleNamespace:
    """What autopart reads of a DeviceMesh."""
    return SimpleNamespace(mesh_dim_names=names, shape=shape)


@pytest.mark.parametrize("form", [
    {"dp": 2, "pp": 4, "tp": 8}, {"tp": 8, "dp": 2, "pp": 4}, "dp2,pp4,tp8", "tp8,pp4,dp2", " tp = 8 , pp:4,dp2 ",
    Mesh({"pp": 4, "dp": 2, "tp": 8}), device_mesh(("pp", "dp", "tp"), (4, 2, 8)), {"dp": 2, "pp": 4, "tp": 8, "cp": 1},
], ids=str)  # fmt: skip
def test_every_form_gives_the_same_mesh(form):
    mesh = Mesh.parse(form)
    assert [mesh.size(axis.name) for axis in AXES] == [4, 1, 2, 1, 1, 8]
    assert mesh.num_ranks == 64
    assert [axis for axis in mesh.sizes if mesh.size(axis) > 1] == ["pp", "dp", "tp"]


@given(SIZES)
def test_a_mesh_parses_back(sizes):
    mesh = Mesh.parse(sizes)
    assert Mesh.parse(str(mesh)) == Mesh.parse(dict(mesh.sizes)) == Mesh.parse(mesh) == mesh


def test_one_device():
    assert str(Mesh({})) == "one device"
    assert Mesh({}).num_ranks == 1
    assert Mesh({}).coordinates(0) == {}


def test_tp_is_innermost_and_pp_outermost():
    ranks = list(Mesh.parse("tp2,dp2,pp2").ranks())
    assert [(r["pp"], r["dp"], r["tp"]) for r in ranks] == list(itertools.product((0, 1), repeat=3))
    assert all(list(r) == ["pp", "dp", "tp"] for r in ranks)


@given(SIZES)
def test_coordinates_are_the_ranks_in_order(sizes):
    mesh = Mesh.parse(sizes)
    ordered = [axis.name for axis in AXES if axis.name in sizes]
    expected = itertools.product(*(range(sizes[axis]) for axis in ordered))
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.num_ranks)] == list(expected)


@given(SIZES)
def test_a_stride_is_the_distance_of_neighbours(sizes):
    mesh = Mesh.parse(sizes)
    ranks = {tuple(at.items()): rank for rank, at in enumerate(mesh.ranks())}
    for axis in (axis for axis in sizes if sizes[axis] > 1):
        for at, rank in ranks.items():
            if dict(at)[axis] + 1 < sizes[axis]:
                next_one = {**dict(at), axis: dict(at)[axis] + 1}
                assert ranks[tuple(next_one.items())] - rank == mesh.stride(axis)


def test_ranks_are_those_of_a_device_mesh():
    import torch

    grid = torch.arange(24).reshape(2, 3, 4)
    mesh = Mesh.parse("pp2,dp3,tp4")
    for rank in range(24):
        at = mesh.coordinates(rank)
        assert grid[at["pp"], at["dp"], at["tp"]] == rank


@pytest.mark.parametrize(("mesh", "text"), [
    (device_mesh(("tp", "dp"), (2, 2)), "the DeviceMesh has its dims in the order ('tp', 'dp')\n  why    ranks are "
     "numbered with "
     "pp outermost, then dp, cp, ep, and tp innermost\n  try    pass the dims in this order"),
    (device_mesh(None, (2, 2)), "the DeviceMesh has no named dims\n  why    autopart finds its axes by name\n"
     "  try    init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))"),
    (device_mesh(("dp", "model"), (2, 2)), "unknown mesh axis 'model'\n  why    the axes are pp, dpr, dp, cp, ep, tp\n"
     "  try    mesh={'dp': 2, 'tp': 2}"),
    ("dp2;tp2",
     "mesh='dp2;tp2' cannot be read\n  why    'dp2;tp2' is not an axis name followed by a size\n"
     "  try    mesh='dp2,tp2'"),
    ("", "mesh='' cannot be read\n  why    '' is not an axis name followed by a size\n  try    mesh='dp2,tp2'"),
    ({"tp": True}, "mesh axis 'tp' has size True\n  why    a size is an integer from 1"),
    ({"tp": -2}, "mesh axis 'tp' has size -2\n  why    a size is an integer from 1"),
], ids=str)  # fmt: skip
def test_what_is_no_mesh_is_told(mesh, text):
    with pytest.raises(MeshError) as error:
        Mesh.parse(mesh)
    assert str(error.value) == text

"""Random graphs in random legal layouts on random meshes are exact: every rank's outputs and gradients, to 1e-10.

100 graphs run with the suite, always the same ones; `make fuzz` runs 2,000 others and prints its seed. A failure is
shrunk, and printed as text: paste it into FOUND.
"""

import pytest
import torch
from fuzz import WIDER, cases
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from torch import nn

import autopart
from autopart.errors import LayoutError
from autopart.ir.layout import CONVERSIONS
from autopart.passes.facts.strategies import ANY_KIND, strategies
from autopart.proof.comparison import weights_like
from autopart.proof.localize.subgraph import Subgraph
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES

TOLERANCE = 1e-10
PER_CHUNK = 25
OPTIONS = settings(
    max_examples=PER_CHUNK, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
)  # fmt: skip


def uneven_parts(values):
    """Where a whole value becomes a partial sum, every rank gets a part that is not zero: a sum of which the first rank
    holds everything passes through functions that are not linear. Parts of zero add up to zero exactly."""
    if not values[0].is_floating_point():
        return [values[0].clone(), *(torch.zeros_like(value) for value in values[1:])]
    rest = [((rank + 1) * 300 * weights_like(value).sin()).round() / 1024 for rank, value in enumerate(values[1:])]
    return [values[0] - sum(rest), *rest]


@pytest.fixture(autouse=True)
def _uneven_partial_sums(monkeypatch):
    monkeypatch.setitem(LIST_PRIMITIVES, "own", uneven_parts)


class Failure(AssertionError):
    """A graph that is wrong, and how to write it down."""


def assert_exact(case: Subgraph) -> None:
    try:
        errors = case.errors()
    except LayoutError:
        reject()
    except Exception as error:
        raise Failure(f"the run raises an error: {type(error).__name__}\n{case}") from error
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        raise Failure(f"wrong: {wrong}\n{case}")


def pytest_generate_tests(metafunc):
    """One test a chunk, so that several workers can share them."""
    if "chunk_seed" in metafunc.fixturenames:
        number, first = metafunc.config.getoption("--fuzz"), metafunc.config.getoption("--fuzz-seed")
        metafunc.parametrize("chunk_seed", range(first, first + -(-number // PER_CHUNK)))


@pytest.mark.few
def test_random_graphs_in_random_layouts(chunk_seed):
    print(f"--fuzz-seed {chunk_seed}")
    seed(chunk_seed)(OPTIONS(given(cases())(assert_exact)))()


# --- the property itself can fail -----------------------------------------------------------------------------------

PLANTED = {
    "a collective": ("all_reduce", lambda values: [values[0].clone() for _ in values]),
    "a shard": ("all_gather", lambda values, cut: [cut.join(values[::-1]) for _ in values]),
}


@pytest.mark.large
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found_and_shrunk(plant, monkeypatch):
    monkeypatch.setitem(LIST_PRIMITIVES, *PLANTED[plant])
    with pytest.raises(Failure) as failure:
        seed(0)(OPTIONS(given(cases())(assert_exact)))()
    print(failure.value)
    shrunk = Subgraph.parse(str(failure.value).partition("\n")[2], WIDER)
    assert len(shrunk.operators) <= 4, shrunk
    with pytest.raises(Failure):
        assert_exact(shrunk)


@pytest.mark.large
def test_every_conversion_is_drawn():
    """In a hundred graphs: a generator that only draws what needs nothing would prove nothing."""
    missing = {f"autopart.{c.operator}.default" for c in CONVERSIONS.values()}

    @seed(0)
    @settings(OPTIONS, max_examples=100, phases=[Phase.generate])
    @given(cases())
    def collect(case):
        if not missing:
            return
        try:
            programs = [case.subject.step(case.arrangement.decisions)]
        except LayoutError:
            reject()
        for stage in programs[0].stages:
            missing.difference_update(str(node.target) for node in stage.graph.graph.nodes)

    collect()
    assert not missing


# --- found, and repaired --------------------------------------------------------------------------------------------

FOUND = {
    "a loss that is the same for all rows counts once": """
        mesh dp2 | microbatches 2
        w0 = weight f64[6,4]
        y = aten.mul.Tensor(w0, w0) | batch R(grad P), R(grad P) -> R(grad P)
        z = aten.sum.default(y) | batch R(grad P) -> R(grad P)
        return z | loss z
    """,
    "what is the same for all rows is added to a sum over them": """
        mesh dp2 | microbatches 2
        x = input f64[4,6]
        w = weight f64[6,6]
        y = aten.linear.default(x, w) | batch S(0), R(grad P) -> S(0)
        s = aten.sum.default(y) | batch S(0) -> P
        r = aten.sum.default(w) | batch R(grad P) -> R(grad P)
        z = aten.add.Tensor(s, r) | batch P, P -> P
        return z | loss z
    """,
    "a split into one part": """
        mesh dp2
        x = input f64[4,6]
        w = weight f64[6]
        y = aten.mul.Tensor(x, w) | batch S(0), R(grad P) -> S(0)
        s = aten.split_with_sizes.default(y, [6], 1) | batch S(0) -> S(0)
        z = getitem(s, 0)
        return z
    """,
    "gradients that are all zero but for rounding": """
        mesh dp2
        x = input f64[2,4]
        w = weight f64[4]
        y = aten.add.Tensor(x, w) | batch S(0), R(grad P) -> S(0)
        t = aten.transpose.int(y, 0, 1) | batch S(0) -> S(1)
        labels = input i64[4] below 2
        z = aten.cross_entropy_loss.default(t, labels, None, 0) | batch S(1), R -> R
        s = aten.sum.default(z) | batch P -> P
        return s | loss s
    """,
    "an output with rows in sections, put together from microbatches": """
        mesh pp2,dp2 | microbatches 2 | stages 2
        x = input f64[4,6]
        w = weight f64[3,6]
        y = aten.linear.default(x, w) | stage 0 | batch S(0), R(grad P) -> S(0)
        t = aten.transpose.int(y, 0, 1) | stage 1 | batch S(0) -> S(1)
        z = aten.reshape.default(t, [12]) | stage 1 | batch S(1) -> S(0; sections=3)
        return z
    """,
    "an output that is a weight of an earlier stage": """
        mesh pp2,tp2 | stages 2
        w = weight f64[6,4] | tp S(1)
        y = aten.tanh.default(w) | stage 0 | tp S(1) -> S(1)
        z = aten.tanh.default(y) | stage 1 | tp R -> R
        return z, w
    """,
}


def test_a_table_is_not_cut_in_sections():
    """Classes that are merged of four dims could be cut within each; a rank knows its classes by the first one."""
    case = Subgraph.parse("""
        mesh tp2
        x = weight f64[2,4,6]
        y = aten.reshape.default(x, [2,24]) | tp S(2) -> S(1; sections=4)
        t = input i64[2] below 24
        z = aten.cross_entropy_loss.default(y, t, None, 0) | tp S(1), R -> R
        return z
    """)
    (node,) = [n for n in case.operators if "cross_entropy" in n.name or n.name == "z"]
    assert not any("sections" in str(strategy) for strategy in strategies(node, 2, ANY_KIND))
    assert_exact(case)


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    assert_exact(Subgraph.parse(FOUND[name]))


class Squeezed(nn.Module):
    """One row a rank: a shard's dim of size 1 must not go."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        y = self.linear(x)
        return torch.tanh(y.squeeze(0)) + y.unsqueeze(1).squeeze()


class Regularised(nn.Module):
    """A loss of two terms, one of which no row of the batch has a part in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh().mean() + 0.1 * self.linear.weight.square().sum()


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        (Squeezed, "dp2", {}), (Squeezed, "tp2", {}), (Regularised, "dp2", {}), (Regularised, "pp2", {}),
        (Regularised, "dp2", {"microbatches": 2}),
    ],
)  # fmt: skip
def test_found_in_models(model, mesh, options):
    torch.manual_seed(0)
    rows = 4 if model is Regularised else 2
    found = autopart.verify(model(), mesh, example_kwargs={"x": torch.randn(rows, 4)}, **options)
    assert found.ok, found

"""Models that do not run in float64: they run as they are, and the graph that is compared with them is float64."""

import functools

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.ir.facts import facts
from autopart.ir.graph import operators
from autopart.proof.reference import NOT_DOUBLE, NOT_FINITE_IN_DOUBLE
from autopart.recipe.make_plan import LIFTED, LIFTED_HALF, prepare

WIDTH = 8


class Scattered(nn.Module):
    """Adds what it computes to zeros that it makes in float32."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.zeros(4, WIDTH).index_add(0, torch.arange(len(x)) % 4, self.inner(x)))


class Lowered(nn.Module):
    """Autocast inside, and a product outside of it."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.inner(x).tanh()
        return self.out(hidden.float())


class HalfWeights(nn.Module):
    """Some weights are bfloat16, others float32."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.bfloat16()).float())


@functools.cache
def mask() -> Tensor:
    return torch.ones(WIDTH, WIDTH).tril()


class Cached(nn.Module):
    """Multiplies by a float32 tensor that outlives the call, and has a statistic that it moves."""

    def __init__(self):
        super().__init__()
        mask()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x) @ mask())


class Dropped(Scattered):
    """Draws random numbers, of which the stream depends on the precision."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.bernoulli(x.sigmoid()) + torch.rand_like(x)
        return nn.functional.dropout(super().forward(x * noise), 0.3)


class Bits(Scattered):
    """Reads the sign of a number off its bits."""

    def forward(self, x: Tensor) -> Tensor:
        sign = x.view(torch.int32) >> 31
        return super().forward(x * (1 + sign))


MIXED = (Lowered, HalfWeights)
MODELS = (Scattered, Cached, Dropped, Bits, *MIXED)


def rows(number: int = 8) -> Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_does_not_run_in_float64_is_verified(kind, mesh):
    torch.manual_seed(0)
    found = autopart.verify(kind(), mesh, example_args=(rows(),))
    assert found.ok and found.max_error < 1e-10, str(found)
    assert NOT_DOUBLE in found.notes and LIFTED not in found.notes
    assert (LIFTED_HALF in found.notes) == (kind in MIXED)


@pytest.mark.few
@pytest.mark.parametrize("kind", MODELS)
def test_a_fault_of_its_program_is_found(kind):
    def tamper(program, shards):
        shards[1]["inner.weight"].data.view(-1)[0] += 1e-6

    torch.manual_seed(0)
    assert not autopart.verify(kind(), "tp2", example_args=(rows(),), tamper=tamper).ok


class TracedOtherwise(nn.Module):
    """What is traced is not what runs."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return made * 1.1 if torch.compiler.is_exporting() else made


@pytest.mark.few
@pytest.mark.parametrize("kind", [Scattered, *MIXED])
def test_a_fault_of_its_trace_is_found(kind):
    torch.manual_seed(0)
    found = autopart.verify(TracedOtherwise(kind()), "tp2", example_args=(rows(),))
    assert not found.ok and found.errors["trace against model"] == pytest.approx(0.1, rel=0.5)


class Decided(HalfWeights):
    """Rounding decides what counts: 1.001 is not above 1 in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (x.bfloat16() > 1))


def test_what_rounding_decides_is_compared_as_it_is_rounded():
    torch.manual_seed(0)
    found = autopart.verify(Decided(), "tp2", example_args=(torch.full((8, WIDTH), 1.001),))
    assert found.ok and LIFTED_HALF in found.notes, str(found)


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.few
@pytest.mark.parametrize("kind", [Scattered, Cached, HalfWeights])
def test_its_training_steps_are_verified(kind):
    """The trace is trained on one device, in float64; a batch of other shapes is traced as the model is."""
    torch.manual_seed(0)
    model = kind()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    target = torch.ones(())
    batches = [{"x": rows(), "target": target}, {"x": rows(12), "target": target}, {"x": rows(), "target": target}]
    found = autopart.verify(
        model, "dp2", example_kwargs={"x": rows()}, steps=3, loss_fn=distance, target=target, batches=batches
    )  # fmt: skip
    assert found.ok and len(found.steps) == 3, str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Complex(nn.Module):
    """Complex weights, which `double()` leaves as they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(x) @ self.weight)


def test_complex_weights_are_doubled():
    found = autopart.verify(Complex(), "dp2", example_args=(rows(),))
    assert found.ok and found.max_error < 1e-10 and not found.notes, str(found)


class CastsBesideOthers(nn.Module):
    """A batch norm, a norm in float32, and casts of integers beside casts of numbers."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.out = nn.Conv2d(4, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x)).mean((2, 3))
        hidden = hidden / hidden.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        chosen = torch.topk(hidden.float(), 2).indices
        weight = torch.zeros(len(x), WIDTH, dtype=torch.long).scatter(1, chosen, 1).to(x.dtype)
        return self.out(hidden * weight).float().square().mean()


@pytest.mark.large
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_operators_are_named_alike_in_any_precision(dtype):
    model, x = CastsBesideOthers().to(dtype), torch.randn(4, 4, 5, 5, dtype=dtype)
    names = []
    for double in (False, True):
        keys = [facts(node)["key"] for node in operators(prepare(model, {"x": x}, double=double).graph)]
        names.append([key for key in keys if "/cast" not in key])
    assert names[0] == names[1]
    plan = autopart.plan(model, "tp2", example_kwargs={"x": x})
    assert "S(" in str(plan.parameters["inner.weight"])
    assert autopart.verify(model, "tp2", example_kwargs={"x": x}, plan=plan).ok


class LeastNumbers(nn.Module):
    """Attention written out, with a mask of the least number: of a row that sees nothing every key is seen alike. In
    float64 the softmax, which is in float32, makes minus infinity of it."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2)
        scores = scores + x.new_zeros(3, 3).masked_fill(~seen, torch.finfo(x.dtype).min)
        return self.out(scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ x).square().mean()


@pytest.mark.few
@pytest.mark.parametrize(("dtype", "ok"), [(torch.float32, True), (torch.float64, False)])
def test_numbers_that_are_finite_in_its_own_precision_are_compared(dtype, ok):
    batch = {"x": torch.randn(4, 3, WIDTH, dtype=dtype), "seen": torch.ones(4, 3, 3, dtype=torch.bool).tril(-1)}
    report = autopart.verify(LeastNumbers().to(dtype), "dp2,tp2", example_kwargs=batch)
    assert report.ok == ok and report.max_error < 1e-12
    assert (NOT_FINITE_IN_DOUBLE in report.notes) == ok and ("not finite: nothing is proven" in str(report)) != ok


class Normalised(nn.Module):
    """Begins with a norm in float32, as blocks do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return x + self.inner((wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype))


def test_stages_may_begin_with_a_cast():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Normalised() for _ in range(4)]).bfloat16()
    call = {"example_args": (rows().bfloat16(),), "microbatches": 2}
    plan = autopart.plan(model, "pp2", pins={"stages": {"cut_before": ["3/cast"]}}, **call)
    assert plan.cuts == ("3/cast",)
    assert autopart.verify(model, "pp2", plan=plan, **call).ok

"""Ranks that begin differently, or are called on other data: found, in one error that is the same on every rank."""

import copy
import json
import math
import warnings

import dist
import pytest
import torch
import torch.distributed as td
from torch import nn

import autopart
from autopart.errors import InputError, RuntimeSetupError
from autopart.runtime.consistency.checksums import WEIGHTED_WORDS, checksum
from autopart.runtime.consistency.same_call import ComparedCall, _projections

WIDTH, ROWS = 8, 4


class Model(nn.Module):
    """`shift` comes as floats, `ids` as whole numbers."""

    def __init__(self, num_blocks=2):
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids, shift):
        x = self.table(ids) * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x - shift).pow(2).mean()


def make_model(num_blocks=2, seed=0):
    torch.manual_seed(seed)
    return Model(num_blocks)


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, (ROWS, 3), generator=generator)
    return {"ids": ids, "shift": torch.randn(ROWS, 3, WIDTH, generator=generator)}


def begin(case, lazy):
    """What is said on rank 1 (and every other) where its `case` differs from the others'."""
    other = td.get_rank() == 1
    model, mesh, options = make_model(), "dp2", {}
    if case == "blocks" and other:
        model = make_model(3)
    if case == "mesh" and other:
        mesh = "tp2"
    if case == "ranks" and other:
        mesh = "dp2,tp2"
    if case == "frozen" and other:
        model.blocks[0].weight.requires_grad_(False)
    if case == "dtype" and other:
        model.scale = model.scale.double()
    if case == "option" and other:
        options = {"microbatches": 2}
    if case == "version" and other:
        autopart.__version__ = "0.0.9"
    if case == "plan":
        data = json.loads(autopart.plan(model, mesh, example_kwargs=make_batch()).to_json())
        if other:
            data["recompute"] = "full"
        options = {"plan": autopart.Plan.from_json(json.dumps(data))}
    if case == "code" and other:
        model.forward = lambda ids, shift: (model.blocks[0](model.table(ids)) - shift).pow(2).mean()
    try:
        pm = autopart.parallelize(model, mesh, **options, **({} if lazy else {"example_kwargs": make_batch()}))
        pm.step(**make_batch())
    except RuntimeSetupError as error:
        return str(error)
    finally:
        autopart.__version__ = "0.1.0"
    return "nothing"


BEGINNINGS = {
    "blocks": ("parameters and buffers", "rank 1: 'blocks.2.weight' f32[8,8]"),
    "mesh": ("mesh", "mesh: rank 0: dp2; rank 1: tp2"),
    "ranks": ("mesh", "mesh: rank 0: dp2; rank 1: dp2,tp2"),
    "frozen": ("parameters and buffers", "rank 1: 'blocks.0.weight' f32[8,8] frozen"),
    "dtype": ("parameters and buffers", "rank 1: 'scale' f64[8] buffer"),
    "option": ("option microbatches", "rank 0: None; rank 1: 2"),
    "version": ("version", "autopart 0.0.9"),
    "plan": ("the plan's recompute", "rank 0: none; rank 1: full"),
    "code": ("the traced program", "rank 1: "),
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("case", "lazy"), [*((case, False) for case in BEGINNINGS), ("plan", True), ("code", True), ("blocks", True)]
)
def test_ranks_that_begin_differently(case, lazy):
    first, second = dist.run_ranks(begin, 2, case, lazy, timeout_s=60)
    subject, told = BEGINNINGS[case]
    assert first == second
    assert f"differ in {subject}\n" in first and told in first


def begin_with_weights(case, lazy, mesh):
    """The losses of two steps, and what was warned."""
    model = make_model()
    if td.get_rank() == 1:
        with torch.no_grad():
            if case == "seed":
                model = make_model(seed=1)
            elif case == "one":
                model.blocks[1].bias[3] += 1e-6
            elif case == "nan":
                model.blocks[1].bias[3] = float("nan")
            elif case == "buffer":
                model.scale[0] = 2
    model.double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm = autopart.parallelize(model, mesh, **({} if lazy else {"example_kwargs": double(make_batch())}))
        loss = pm.step(**double(make_batch())).item()
    said = [str(w.message) for w in caught if "begin with different weights" in str(w.message)]
    full = pm.full_state_dict()
    wanted = make_model().double()
    assert all(torch.equal(value, wanted.state_dict()[name]) for name, value in full.items())
    assert abs(loss - wanted(**double(make_batch())).item()) < 1e-12
    return said


def double(batch):
    return {**batch, "shift": batch["shift"].double()}


@pytest.mark.parametrize(
    ("case", "mesh", "lazy"),
    [
        ("seed", "dp2", False),
        ("one", "tp2", True),
        ("nan", "pp2", False),
        ("buffer", "tp2", False),
        ("same", "dp2", True),
    ],
)
def test_the_first_ranks_weights_are_taken(case, mesh, lazy):
    first, second = dist.run_ranks(begin_with_weights, 2, case, lazy, mesh)
    assert second == []
    if case == "same":
        assert first == []
        return
    (said,) = first
    name = {"seed": "table.weight", "buffer": "scale"}.get(case, "blocks.1.bias")
    assert f"'{name}' of rank 1 differs from that of rank 0" in said
    assert (", and " in said) == (case == "seed")


def step_on(case, at, purpose):
    """What each rank is told at step `at`, where rank 1 differs."""
    pm = autopart.parallelize(make_model(), "dp2", example_kwargs=make_batch())
    for number in range(1, 5):
        batch = make_batch(seed=number)
        if number == at and td.get_rank() == 1:
            batch = changed(case, batch)
        try:
            if purpose == "step":
                pm.step(**batch)
            else:
                pm(**batch).backward()
        except InputError as error:
            return number, str(error)
    return 0, "nothing"


def changed(case, batch):
    ids, shift = batch["ids"], batch["shift"]
    if case == "token":
        ids[2, 1] = (ids[2, 1] + 1) % 16
    elif case == "next":
        return make_batch(seed=9)
    elif case == "floats":
        shift = make_batch(seed=9)["shift"]
    elif case == "scaled":
        shift = shift * 1.001
    elif case == "not finite":
        shift[0, 0, 0] = float("nan")
    elif case == "rounding":
        shift = shift * (1 + torch.finfo(torch.float32).eps)
    elif case == "shape":
        ids, shift = ids[:2], shift[:2]
    return {"ids": ids, "shift": shift}


CALLS = {"token": "ids", "next": "ids, shift", "floats": "shift", "scaled": "shift", "not finite": "shift"}


@pytest.mark.few
@pytest.mark.parametrize(("case", "purpose"), [*((case, "step") for case in CALLS), ("next", "forward")])
def test_other_data_in_a_later_step(case, purpose):
    first, second = dist.run_ranks(step_on, 2, case, 3, purpose)
    number, text = first
    assert first == second and number == 3
    assert text.startswith(f"the ranks are called with different values of {CALLS[case]}\n")
    assert f"where  {purpose} 3: rank 1 unlike rank 0" in text


def test_another_shape_in_a_later_step():
    first, second = dist.run_ranks(step_on, 2, "shape", 3, "step")
    assert first == second and first[0] == 3
    assert "different inputs" in first[1] and "where  step 3" in first[1] and "rank 1: step(ids i64[2,3]" in first[1]


def test_other_roundings_are_no_other_data():
    assert dist.run_ranks(step_on, 2, "rounding", 3, "step") == [(0, "nothing")] * 2


def test_the_lowest_number_of_a_mask_is_compared():
    lowest = torch.finfo(torch.float64).min
    mask = torch.tensor([[0, lowest, lowest], [0, 0, lowest]], dtype=torch.float64)
    numbers = _projections(mask, 0)
    assert all(map(math.isfinite, numbers)) and numbers == _projections(mask.clone(), 0)
    assert numbers != _projections(mask.flip(1), 0)


def catch_an_error_alone():
    pm = autopart.parallelize(make_model(), "dp2", example_kwargs=make_batch())
    pm.step(**make_batch())
    if td.get_rank() == 1:
        with pytest.raises(InputError):
            pm.step(**make_batch(), num_tokens=0)
    try:
        pm.step(**make_batch())
    except InputError as error:
        return str(error)


def test_ranks_at_different_steps():
    first, second = dist.run_ranks(catch_an_error_alone, 2)
    assert first == second and "not at the same step" in first and "rank 0: step 2; rank 1: step 3" in first


def marks_of(tensor):
    return ComparedCall("step", 1, "", {"x": tensor}).numbers()[3:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (64, 33), (300, 200)])
def test_rounding_is_told_from_other_data(dtype, shape):
    """Over many draws: the last bit of every element never, another batch always."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        noise = 1 + torch.finfo(dtype).eps * (torch.rand(shape, generator=generator) - 0.5)
        rounded = marks_of((values * noise).to(dtype))
        other = marks_of(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype))
        mine = marks_of(values.to(dtype))
        assert max(abs(a - b) for a, b in zip(mine, rounded, strict=True)) < 1.5, seed
        assert max(abs(a - b) for a, b in zip(mine, other, strict=True)) > 1.5, seed


def test_a_sample_moves_with_the_step():
    values = torch.zeros(10_000)
    values[5000] = 1
    seen = [any(ComparedCall("step", number, "", {"x": values}).floats["x"][:4]) for number in range(40)]
    assert any(seen) and not all(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [1, 5, 1000, 2 * WEIGHTED_WORDS, 5 * WEIGHTED_WORDS + 3])
def test_a_checksum_sees_one_bit(dtype, size):
    values = (torch.randn(size) * 10).to(dtype)
    number = checksum(values)
    assert checksum(values.clone()) == number
    assert checksum(torch.stack([values, values], 1)[:, 0]) == number
    for place in (0, size // 2, size - 1):
        other = copy.deepcopy(values).view(torch.uint8)
        other[place * values.itemsize] ^= 1
        assert checksum(other.view(dtype)) != number
    swapped = values.flip(0)
    assert torch.equal(swapped, values) or checksum(swapped) != number

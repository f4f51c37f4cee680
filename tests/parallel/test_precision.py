"""Mixed precision: parameters are stored as they are and cast where they are read, gradients are summed in float32."""

from __future__ import annotations

import copy
import json
import math
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist import run_ranks
from held import saved_on_a_rank, states_on_a_rank
from precision_models import EPS, apart, build, loss_of, on_one_device
from torch import nn

import autopart
from autopart.ir.collective_nodes import autopart_operator
from autopart.plans.plan import Plan

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "regions", "tied", "in_bfloat16", "in_float64")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# --- one device ------------------------------------------------------------------------------------------------------


def on_one_rank(name):
    """The relative difference of the loss, and the names of gradients that are not equal in bits."""
    model, batch = build(name)
    loss, grads = on_one_device(model, batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pm = autopart.parallelize(model, "tp1", example_kwargs=batch, precision="bf16")
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) and value.dtype == after[key].dtype for key, value in before.items())
    own = pm.step(**batch)
    assert own.dtype == torch.float32
    full = pm.full_grads()
    assert full.keys() == grads.keys()
    return (own / loss - 1).abs().item(), [key for key in grads if not torch.equal(full[key], grads[key])]


@pytest.mark.large
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_equal_in_bits(name):
    ((difference, unequal),) = run_ranks(on_one_rank, 1, name, timeout_s=120)
    # T5's tables of relative positions: their gradients are sums over the batch, taken in another order. Experts whose
    # matrices the model looks up for every row: theirs are sums over the rows, in one product and not one by one.
    summed = ("relative_attention_bias", ".experts.")
    assert [key for key in unequal if not any(part in key for part in summed)] == []
    # a mean is a sum divided later, in what the model makes its loss in
    assert difference < (1e-6 if name in ("llama", "mixtral", "regions", "tied") else EPS)


# --- processes -------------------------------------------------------------------------------------------------------

MESHES = [
    ("gpt2", "dp2", {}), ("llama", "dp2", {"zero": 3}), ("gpt2", "tp2", {"sequence_parallel": True}),
    ("bert", "tp2", {}), ("tied", "pp2", {"microbatches": 2}), ("llama", "dp2,tp2", {"zero": 3, "recompute": "full"}),
    ("mixtral", "dp2", {"zero": 3, "reduce_dtype": "bf16"}), ("gpt2", "pp2,tp2", {"microbatches": 4}),
]  # fmt: skip


def over_processes(name, mesh, options):
    """How far gradients of `step`, and of the user's own backward, are from one device."""
    model, batch = build(name)
    loss, grads = on_one_device(model, batch)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, precision="bf16", **options)
    own = pm.step(**batch)
    stored = {p.dtype for p in model.parameters() if p.requires_grad}
    assert {p.grad.dtype for p in pm.parameters() if p.grad is not None} <= stored
    found = [(own - loss).abs().item() / loss.item(), apart(pm.full_grads(), grads)]
    if "pp" not in mesh:
        pm.zero_grad()
        outputs = pm(**batch)
        leaves = outputs.values() if hasattr(outputs, "values") else [outputs]
        assert {o.dtype for o in leaves if isinstance(o, torch.Tensor) and o.is_floating_point()} == {torch.float32}
        loss_of(outputs).backward()
        found.append(apart(pm.full_grads(), grads))
    return found


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh", "options"), MESHES, ids=str)
def test_processes_are_as_near_as_rounding(name, mesh, options):
    ranks = 4 if "," in mesh else 2
    for found in run_ranks(over_processes, ranks, name, mesh, options, timeout_s=120):
        assert max(found) < 3 * EPS


def summed_over_data(zero, reduce_dtype):
    """Whether gradients are in bits the sum, in this dtype, of those of the two halves of the batch."""
    model, batch = build("regions")
    halves = [on_one_device(model, {k: v[rows] for k, v in batch.items()}, share=0.5)[1]
              for rows in (slice(0, 4), slice(4, 8))]  # fmt: skip
    pm = autopart.parallelize(
        model, "dp2", example_kwargs=batch, precision="bf16", zero=zero, reduce_dtype=reduce_dtype
    )
    pm.step(**batch)
    full, dtype = pm.full_grads(), {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce_dtype]
    sums = {name: (halves[0][name].to(dtype) + halves[1][name].to(dtype)).float() for name in full}
    return {name: torch.equal(full[name], sums[name]) for name in full}


@pytest.mark.few
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_gradients_are_cast_before_they_are_summed(zero, reduce_dtype):
    for equal in run_ranks(summed_over_data, 2, zero, reduce_dtype):
        assert equal and all(equal.values())


def at_levels(mesh, options, own_backward):
    """The largest difference of gradients from those of `zero=0`, relative to the largest."""
    model, batch = build("llama")
    found = []
    for zero in (0, options["zero"]):
        asked = {**options, "zero": zero}
        pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, precision="bf16", **asked)
        pm(**batch).loss.backward() if own_backward else pm.step(**batch)
        found.append(pm.full_grads())
    most = max(grad.abs().max() for grad in found[0].values())
    return max(((found[0][name] - found[1][name]).abs().max() / most).item() for name in found[0])


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options", "own_backward"), [
    *(("dp2", {"zero": zero}, own) for zero in (1, 2, 3) for own in (False, True)),
    *(("dp2", {"zero": zero, "microbatches": 4}, own) for zero in (2, 3) for own in (False, True)),
    ("dp2", {"zero": 1, "microbatches": 4}, True),
    pytest.param("dp2", {"zero": 1, "microbatches": 4}, False, marks=pytest.mark.whole),
    ("pp2,dp2", {"zero": 1}, False), ("dp2,tp2", {"zero": 2, "microbatches": 2}, False),
    ("dpr2,dp2", {"zero": 3}, False),
])  # fmt: skip
def test_levels_of_zero_compute_the_same(mesh, options, own_backward):
    """In bits; the parts of microbatches are added up in float32, in another order with 2 and 3."""
    several = options.get("microbatches", 1) > 1 and options["zero"] > 1
    ranks = math.prod(int(size) for size in re.findall(r"\d", mesh))
    for apart_by in run_ranks(at_levels, ranks, mesh, options, own_backward, timeout_s=120):
        assert apart_by <= (1e-7 if several or own_backward else 0.0)


@pytest.mark.large
@pytest.mark.parametrize("zero", [1, 2])
def test_wholes_are_gathered_in_two_bytes(zero):
    """And hold two: the parts, gradients and optimizer are in float32."""
    model, batch = build("llama")
    rows = [autopart.plan(model, "dp2", example_kwargs=batch, zero=zero, precision=precision).memory[0]
            for precision in (None, "bf16")]  # fmt: skip
    assert rows[1]["parameters"] == rows[0]["parameters"] and rows[1]["optimizer"] == rows[0]["optimizer"]
    assert rows[1]["gathered"] < rows[0]["gathered"]


def accumulated():
    """The difference between two calls of a step and twice one: nothing is rounded to 16 bits in between."""
    model, batch = build("llama")
    pm = autopart.parallelize(model, "tp1", example_kwargs=batch, precision="bf16")
    pm.step(**batch)
    once = pm.full_grads()
    pm.step(**batch)
    return apart(pm.full_grads(), {name: 2 * grad for name, grad in once.items()})


def test_gradients_accumulate_as_they_are_stored():
    assert run_ranks(accumulated, 1) == [0.0]


# --- the program -----------------------------------------------------------------------------------------------------


def gathered_dtypes(mesh, **options):
    """What each gather of a parameter in the first stage's graph casts to, and sums in."""
    model, batch = build("gpt2")
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, precision="bf16", **options)
    nodes = [
        n for n in pm.graph().graph.nodes if autopart_operator(n) == "all_gather_sum" and n.args[0].op == "get_attr"
    ]
    return [(str(n.kwargs["dtype"]), str(n.kwargs["grad_dtype"])) for n in nodes]


@pytest.mark.large
def test_what_is_gathered_has_two_bytes():
    for found in run_ranks(gathered_dtypes, 2, "dp2", zero=3):
        assert set(found) == {("torch.bfloat16", "torch.float32")}


@pytest.mark.large
def test_collectives_follow_from_the_dtypes_that_travel():
    model, batch = build("gpt2")
    plans = {name: autopart.plan(model, "dp2,tp2", example_kwargs=batch, zero=3, precision=name)
             for name in (None, "bf16", "fp32")}  # fmt: skip
    sent = {name: plan.cost["bytes_per_microbatch"] for name, plan in plans.items()}
    assert sent["fp32"] == sent[None] and sent[None] / 2 < sent["bf16"] < sent[None]  # scattered in float32
    assert all(plan.cost["bytes_per_step"] == plans[None].cost["bytes_per_step"] for plan in plans.values())
    halved = autopart.plan(model, "dp2", example_kwargs=batch, zero=0, precision="bf16", reduce_dtype="bf16")
    whole = autopart.plan(model, "dp2", example_kwargs=batch, zero=0, precision="bf16")
    assert halved.cost["bytes_per_step"] * 2 == whole.cost["bytes_per_step"]


@pytest.mark.large
def test_products_run_at_the_rate_of_what_is_computed_in():
    model, batch = build("gpt2")
    peaks = {name: autopart.plan(model, "dp1", example_kwargs=batch, precision=name).timing["peak_dtype"]
             for name in ("bf16", "fp16")}  # fmt: skip
    assert peaks == {"bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "dp2,tp2"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plan_and_its_file_predict_the_same(mesh, zero):
    model, batch = build("llama")
    plan = autopart.plan(model, mesh, example_kwargs=batch, precision="bf16", zero=zero)
    assert plan.cost.at(b=plan.cost.table.b).step_time_s == pytest.approx(plan.cost["step_time_s"], rel=1e-6)
    again = Plan.from_json(plan.to_json())
    assert (again.precision, again.reduce_dtype) == ("bf16", "fp32")
    assert autopart.simulate(again).step_time_s == pytest.approx(plan.cost["step_time_s"], rel=1e-9)
    assert "precision    computed in bf16; gradients reduced in fp32" in str(again.explain())
    assert autopart.verify(model, mesh, example_kwargs=batch, plan=again).rounded.ok


@pytest.mark.large
def test_a_plan_without_a_precision_computes_in_the_models_own():
    model, batch = build("llama")
    data = json.loads(autopart.plan(model, "dp2", example_kwargs=batch).to_json())
    del data["precision"], data["reduce_dtype"]
    old = Plan.from_json(json.dumps(data))
    assert old.precision is None and autopart.verify(model, "dp2", example_kwargs=batch, plan=old).rounded is None


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh", "options"), [
    ("gpt2", "dp2", {}), ("llama", "dp2", {"zero": 3}), ("llama", "tp2", {"sequence_parallel": True}),
    ("gpt2", "pp2", {}),
])  # fmt: skip
def test_activations_are_those_that_autograd_saves(name, mesh, options):
    """To the byte: no cast or gathered copy of a weight is among them."""
    for rank in run_ranks(saved_on_a_rank, 2, name, mesh, 0.0, {**options, "precision": "bf16"}):
        for stage, held, estimated in rank:
            assert held == estimated > 0, f"stage {stage}"


@pytest.mark.large
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_as_parameters_are_stored(zero):
    model, batch = build("gpt2")
    options = {"zero": zero, "precision": "bf16"}
    row = autopart.plan(model.double(), "dp2", example_kwargs=batch, **options).memory[0]
    for found in run_ranks(states_on_a_rank, 2, "gpt2", "dp2", options):
        assert all(found[kind] == row[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert row["optimizer"] == 2 * row["parameters"]


@pytest.mark.large
def test_a_search_follows_precision():
    model, batch = build("llama")
    found = autopart.search(model, 4, example_kwargs=batch, precision="bf16", reduce_dtype="bf16", count=1)
    assert (found[0].precision, found[0].reduce_dtype) == ("bf16", "bf16")


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(("name", "mesh", "options"), [
    ("bert", "dp2", {"zero": 3}), ("t5", "pp2", {}), ("vit", "dp2,tp2", {"zero": 3}), ("mixtral", "tp2", {}),
    ("regions", "dp2", {}), ("tied", "pp2", {}), ("in_float64", "tp2", {}),
])  # fmt: skip
def test_verify_proves_the_partition_and_the_casts(name, mesh, options):
    model, batch = build(name)
    found = autopart.verify(model, mesh, example_kwargs=batch, precision="bf16", **options)
    assert found.ok and found.max_error < 1e-10, str(found)
    assert found.rounded.max_error <= (2 * EPS if name != "t5" else 0.1) and found.rounded.tolerance < 0.35
    assert "agrees with one device in bf16" in str(found)


def test_verify_finds_a_wrong_cast():
    def tamper(program, shards):
        """Where what is computed in is cast, three bits more are lost."""
        for stage in program.stages:
            for node in list(stage.graph.graph.nodes):
                if autopart_operator(node) == "cast":
                    with stage.graph.graph.inserting_after(node):
                        coarse = stage.graph.graph.call_function(_coarse, (node,))
                    node.replace_all_uses_with(coarse, delete_user_cb=lambda user, own=coarse: user is not own)
            stage.graph.recompile()

    model, batch = build("gpt2")
    found = autopart.verify(model, "tp2", example_kwargs=batch, precision="bf16", tamper=tamper)
    assert not found.ok and found.max_error < 1e-10 and "DISAGREES with one device" in str(found)


def _coarse(weight):
    return weight.float().to(torch.float8_e5m2).to(weight.dtype)


# --- float16 ---------------------------------------------------------------------------------------------------------


class Overflows(nn.Module):
    """Of a row that is large the gradient of the first layer is infinite in float16, that of the second is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).sum() * 1e-3


def scaled_steps(mesh, options, path):
    """What steps in float16 leave, on every rank."""
    model, batch = build("llama")
    loss, grads = on_one_device(model, batch, torch.float16)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, precision="fp16", **options)
    assert (pm.loss_scale, pm.skipped_steps) == (2.0**16, 0)
    own = pm.step(**batch)
    once = pm.full_grads()
    difference = apart(once, grads)
    pm.step(**batch, loss_scale=0.5)  # which multiplies what is added
    assert apart(pm.full_grads(), {name: 1.5 * grad for name, grad in once.items()}) < 1e-3
    pm._loss_scaling.scale = 2.0**40
    assert torch.equal(pm.step(**batch), own)
    assert all(p.grad is None for p in pm.parameters())
    assert (pm.loss_scale, pm.skipped_steps) == (2.0**39, 1)
    dcp.save({"model": pm.state_dict()}, checkpoint_id=path)
    other = autopart.parallelize(build("llama")[0], mesh, example_kwargs=batch, precision="fp16", **options)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    assert (other.loss_scale, other.skipped_steps) == (2.0**39, 1)
    plain = autopart.parallelize(build("llama")[0], mesh, example_kwargs=batch, **options)
    plain.load_state_dict(state["model"])
    assert plain.loss_scale == 1.0
    return (own - loss).abs().item(), difference


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "options"), [("dp2", {"zero": 3}), ("tp2", {}), ("pp2", {"microbatches": 2})], ids=str
)
def test_steps_in_float16(mesh, options, tmp_path):
    for loss, grads in run_ranks(scaled_steps, 2, mesh, options, tmp_path / "step", timeout_s=120):
        assert loss < 1e-3 and grads < 4 * torch.finfo(torch.float16).eps


def overflow_of_one(mesh):
    """Whether gradients are left, after a batch of which one part overflows, and after the next."""
    model, x = Overflows(), torch.full((4, 4), 1e-3)
    x[3] = 60000.0
    pm = autopart.parallelize(model, mesh, example_kwargs={"x": x}, precision="fp16", microbatches=1)
    pm._loss_scaling.growth_interval = 2
    pm.step(x=x)
    found = [all(p.grad is None for p in pm.parameters()), pm.loss_scale]
    for _ in range(2):
        pm.step(x=torch.ones(4, 4) * 1e-3)
    return [*found, all(p.grad is not None for p in pm.parameters()), pm.loss_scale, pm.skipped_steps]


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_what_overflows_on_one_rank_is_every_ranks(mesh):
    for found in run_ranks(overflow_of_one, 2, mesh):
        assert found == [True, 2.0**15, True, 2.0**16, 1]


def scaled_outside():
    model, batch = build("llama")
    pm = autopart.parallelize(model, "dp2", example_kwargs=batch, precision="fp16")
    optimizer, scaler = torch.optim.SGD(pm.parameters(), lr=0.1), autopart.GradScaler()
    scaler.scale(loss_of(pm(**batch))).backward()
    scaler.unscale_(optimizer)
    norm = pm.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    return norm.item(), scaler.get_scale()


@pytest.mark.large
def test_the_users_own_backward_takes_a_scaler():
    model, batch = build("llama")
    _, grads = on_one_device(model, batch, torch.float16)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    for found, scale in run_ranks(scaled_outside, 2):
        assert found == pytest.approx(norm, rel=5e-3) and scale == 2.0**16


class Distances(nn.Module):
    """An operator that CPUs do not have in 16 bits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cdist(self.linear(x), self.linear(x)).mean()


def without_an_operator():
    pm = autopart.parallelize(Distances(), "dp1", example_kwargs={"x": torch.randn(4, 8)}, precision="fp16")
    try:
        pm.step(x=torch.randn(4, 8))
    except autopart.AutopartError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_operator_that_the_device_does_not_have_is_named():
    assert run_ranks(without_an_operator, 1) == [
        "RuntimeSetupError: this device has no operator 'cdist' in fp16\n"
        "  why    precision='fp16' makes the model compute it in this dtype\n"
        "  try    precision='bf16', a GPU, or x.float() before it in the model"
    ]

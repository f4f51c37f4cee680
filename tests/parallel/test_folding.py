"""Experts cut over several axes: exact wherever rows go, said by the plan, priced, and sent as the plan says."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from unittest import mock

import dist
import expert_models
import pytest
import torch
import zoo
from context_models import DISPATCHED as SHARES
from expert_models import Mixture, mixture, small

import autopart
from autopart.compat.torch_internals import resolve_group
from autopart.errors import AutopartError, LayoutError, PlanError
from autopart.ir.layout import ON_EXPERT_RANK, Placement, flattened_shards, local_shape
from autopart.ir.mesh import Mesh
from autopart.passes.choose.plan_codec import decode
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import find_loss, prepare
from autopart.runtime.comm import collectives
from autopart.tracing.trace_model import bind_call

STACKS = ("up", "up_bias", "down")


def folded(axes, sent=(), stacks=STACKS, rows=8):
    """Pins that cut experts over some axes, and send their rows, of so many rows of the batch, over some of them."""
    pins = {name: dict.fromkeys(axes, "S(0)") for name in stacks}
    own = {"ep": "S(0)", **dict.fromkeys(("cp", "tp"), f"S(0; sections={rows})")}  # how these cut tokens
    if sent:
        pins["*/to_experts*"] = {axis: f"{own[axis]}, {own[axis]} -> E(0; sent)" for axis in sent}
        pins["*/from_experts*"] = {axis: f"E(0; sent), {own[axis]} -> {own[axis]}" for axis in sent}
    return pins


def of_experts(count, towards=()):
    return mixture(experts=count, towards=(*(0.0,) * (count - len(towards)), *towards))


def assert_exact(model, batch, mesh, **options):
    report = autopart.verify(model, mesh, example_kwargs=batch, **options)
    assert report.ok, report


# --- exact -----------------------------------------------------------------------------------------------------------

WAYS = [  # mesh, axes that cut experts, axes that send rows
    ("ep2,tp2", "ep tp", ""), ("ep2,tp2", "ep tp", "ep"), ("ep2,tp2", "tp", "ep tp"), ("cp2,ep2", "cp", ""),
    ("cp2,ep2", "cp ep", "cp ep"), ("cp2,ep2", "cp", "ep"), ("cp2,ep2", "cp", "cp"), ("cp2,tp2", "cp tp", "cp"),
    ("cp2,ep2,tp2", "cp ep tp", ""), ("cp2,ep2,tp2", "cp tp", "ep"), ("cp2,ep2,tp2", "cp tp", "ep tp"),
    ("cp2,ep2,tp2", "tp", ""), ("tp2", "tp", ""), ("cp2", "cp", ""),
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "axes", "sent"), WAYS)
def test_every_way_is_exact(mesh, axes, sent):
    assert_exact(*of_experts(8), mesh, pins=folded(axes.split(), sent.split()))


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options"), [
    ("dp2,ep2,tp2", {"zero": 1}), ("dp2,ep2,tp2", {"zero": 3, "recompute": "full"}), ("pp2,ep2,tp2", {"zero": 2}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("sent", ["", "ep"])
def test_beside_other_options(mesh, options, sent):
    assert_exact(*mixture(form="matrix first"), mesh, pins=folded(["ep", "tp"], sent.split()), **options)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["cp2,ep2", "ep2,tp2", "dp2,pp2,cp2,ep2"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_mixtures_of_transformers_are_exact(name, mesh):
    model, batch = small(name)
    pins = {"*.experts.*": dict.fromkeys(set(mesh.replace("2", "").split(",")) & {"cp", "ep", "tp"}, "S(0)")}
    report = autopart.verify(model, mesh, example_kwargs=batch, pins=pins)
    assert report.ok, report


@pytest.mark.large
def test_with_positions_in_zigzag_and_all_axes():
    model, batch = small("qwen3_moe")
    own = {"cp": "S(0; zigzag sections=8)", "ep": "S(0)"}
    pins = {"*.experts.*": {"cp": "S(0)", "tp": "S(0)"},
            "*/to_experts*": {axis: f"{place}, {place} -> E(0; sent)" for axis, place in own.items()},
            "*/from_experts*": {axis: f"E(0; sent), {place} -> {place}" for axis, place in own.items()}}  # fmt: skip
    assert_exact(model, batch, "cp2,ep2,tp2", pins=pins)


@pytest.mark.few
@pytest.mark.parametrize("towards", [(), (50.0,), (50.0, *(0.0,) * 9)], ids=["spread", "last", "first"])
@pytest.mark.parametrize(("mesh", "sent"), [("cp2,ep2", ""), ("cp2,ep2", "cp ep"), ("ep2,tp2", "ep"), ("cp2,tp2", "")])
def test_experts_need_not_divide(mesh, sent, towards):
    """Of ten experts on four ranks these have three, three, three and one."""
    axes = [axis for axis in ("cp", "ep", "tp") if axis in mesh]
    assert_exact(*of_experts(10, towards), mesh, pins=folded(axes, sent.split()))


def test_two_axes_may_cut_the_tokens_that_they_send():
    """Each of six positions is on one of six ranks: where the outer axis cuts, the inner one cuts anew."""
    assert_exact(*of_experts(24), "cp2,ep2,tp3", pins=folded(["cp", "tp"], ["cp", "ep", "tp"]))


# --- what the plan says ----------------------------------------------------------------------------------------------


def test_the_plan_says_it_and_is_read_back():
    model, batch = of_experts(8)
    plan = autopart.plan(model, "cp2,ep2,tp2", example_kwargs=batch, pins=folded(["cp", "tp"]))
    assert plan.parameters["up"] == {"cp": "S(0)", "ep": "S(0)", "tp": "S(0)"}
    assert plan.operators["/to_experts"] == dict.fromkeys(("cp", "ep", "tp"), "R(grad P), R -> E(0)")
    assert plan.operators["/from_experts"] == dict.fromkeys(("cp", "ep", "tp"), "E(0), R -> P")
    assert plan.parameters["router.weight"]["ep"] == "R(grad P)"
    again = Plan.from_json(plan.to_json())
    assert again.parameters == plan.parameters and again.operators == plan.operators
    assert_exact(model, batch, "cp2,ep2,tp2", plan=again)


@pytest.mark.large
def test_why_names_what_it_would_cost_otherwise():
    model, batch = of_experts(8)
    plan = autopart.plan(model, "ep2,tp2", example_kwargs=batch, pins=folded(["tp"]))
    assert str(plan.why("up")).startswith("up: S(0)\n  because  there is no other option on tp=2 that the pins leave")
    assert "R(grad P), R -> E(0)" in str(plan.why("/to_experts"))
    plain = autopart.plan(model, "ep2,tp2", example_kwargs=batch)
    other = plain.why_not("up", {"tp": "S(0)"})
    assert (
        other.reason == "experts are sharded over tp only if a pin requests it"
        and "down " in other.others["S(0) on tp"]
    )
    few = autopart.plan(*mixture()[:1], "ep4,tp2", example_kwargs=mixture()[1]).why_not("up", {"tp": "S(0)"})
    assert few.reason.startswith("experts cannot be sharded over ep=4 x tp=2; why    there are 4 for 8 ranks")


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "axes", "zero", "layout", "summed"), [
    ("dp2,cp2,ep2,tp2", ["cp", "tp"], 0, {}, ("dp",)), ("dp2,cp2,ep2", ["ep"], 0, {}, ("dp", "cp")),
    ("dp2,cp2,ep2", ["cp"], 3, {"dp": "S(1)"}, ()), ("cp2,ep2,tp2", ["tp"], 3, {"dp_cp": "S(1)"}, ()),
    ("cp2,ep2", ["cp"], 3, {}, ()),
])  # fmt: skip
def test_gradients_are_summed_over_what_does_not_cut_experts(mesh, axes, zero, layout, summed):
    """And with ZeRO stored in parts over as much, no more."""
    model, batch = of_experts(8)
    plan = autopart.plan(model, mesh, example_kwargs=batch, pins=folded(axes), zero=zero)
    stored = {axis: place for axis, place in plan.parameters["up"].items() if axis.startswith("dp")}
    assert stored == layout
    traced = prepare(model, bind_call(model, (), batch))
    program = lower(traced, decode(traced, plan, Mesh.parse(mesh)), [find_loss(traced)], whole_outputs=False)
    assert all(program.parameters[name].grad_axes == summed for name in ("up", "down"))


@pytest.fixture
def wide(monkeypatch):
    """Plans of a mixture of eight experts of 512 x 1536 and back, for 64 rows of 64 tokens with two experts each."""
    model, batch = expert_models.wide_mixture(monkeypatch)
    return lambda mesh, axes, sent=(), **options: autopart.plan(
        model, mesh, example_kwargs=batch, pins=folded(axes, sent, rows=64), **options
    )


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "axes", "over", "ranks"), [
    ("cp2,ep4", ["cp"], "cp_ep", 8), ("ep4,tp2", ["tp"], "ep", 4), ("ep2,tp2", ["tp"], "ep", 2),
])  # fmt: skip
def test_rows_are_sent_once_over_all_axes_that_send(wide, mesh, axes, over, ranks):
    """Of 4,096 x 2 rows of 512 float32 each rank sends its share there and back, and the gradients again; not those
    that stay. Over tp, on which tokens are whole, a rank keeps the rows of its experts before they are sent."""
    plan = wide(mesh, axes, over.split("_"))
    moved = sum(c.bytes for c in plan.collectives if c.axis == over and c.forward == c.backward == "all_to_all")
    rows = 4096 * 2 / Mesh.parse(mesh).num_ranks * (ranks - 1) / ranks
    assert moved == pytest.approx(4 * rows * 512 * 4 + 2 * rows * 4, rel=0.02)  # there may be scores of the router too


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "axes", "sizes"), [
    ("ep2,tp2", ["tp"], {"tp": 4}), ("cp2,ep2", ["cp"], {"cp": 4}), ("tp2", ["tp"], {"tp": 4}),
    ("cp2,ep2", ["cp"], {"ep": 4}),
])  # fmt: skip
def test_one_plan_prices_another(wide, mesh, axes, sizes):
    plan = wide(mesh, axes)
    other = wide(str(Mesh.parse({**plan.mesh, **sizes})), axes)
    assert plan.cost.at().step_time_s == autopart.simulate(plan).step_time_s == plan.cost["step_time_s"]
    assert max(row["total"] for row in plan.memory) == pytest.approx(plan.cost.at().memory_bytes, rel=1e-9)
    if plan.operators["/to_experts"] == other.operators["/to_experts"]:
        assert plan.cost.at(**sizes).step_time_s == pytest.approx(other.cost["step_time_s"], rel=0.06)


@pytest.mark.large
def test_a_rank_that_has_all_rows_is_of_all_axes(wide):
    plan, *fuller = (wide("ep2,tp2", ["tp"], sent=["ep"], balance=times) for times in (1, 2, 4))
    most = [max(row["total"] for row in one.memory) for one in (plan, *fuller)]
    assert most[0] < most[1] < most[2] == pytest.approx(plan.cost["worst_memory_bytes"], rel=1e-5)
    assert "with all tokens it needs" in " ".join(plan.explain().split())


def test_axes_that_cut_experts_cut_as_one():
    """Ten experts over two by two ranks: three, three, three and one, not three, two, three and two."""
    experts = {"cp": Placement.parse("S(0)"), "ep": Placement.parse("S(0)")}
    assert list(flattened_shards(experts)) == ["cp_ep"]
    tokens = {"cp": Placement.parse("S(0; sections=8)"), "ep": Placement.parse("S(0)")}
    assert list(flattened_shards(tokens)) == ["cp", "ep"]
    rows = dict.fromkeys(("cp", "ep"), ON_EXPERT_RANK)
    assert local_shape((48, 8), rows, {"cp": 2, "ep": 2}, 1.5) == [18, 8]
    assert local_shape((48, 8), rows, {"cp": 2, "ep": 2}, 9.0) == [48, 8]


# --- on processes ----------------------------------------------------------------------------------------------------


def step_of(mesh, axes, sent, experts, options):
    """A step on processes against one device; what each rank holds, and the bytes it sends by kind and group."""
    model, batch = of_experts(experts)
    loss, expected = zoo.reference(model, batch)[1:]
    found, communicate = Counter(), collectives.communicate

    def counted(collective, x, *arguments):
        kind, share = SHARES[collective.__name__.split(".")[0]]
        found[kind] += x.numel() * x.element_size() * share(resolve_group(arguments[-1]).size())
        return communicate(collective, x, *arguments)

    pins = folded(axes.split(), sent.split())
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, pins=pins, **options)
    with mock.patch.object(collectives, "communicate", counted):
        made = pm.step(**batch)
    zoo.assert_close_outputs(made, loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), {name: grad for name, grad in expected.items() if grad is not None})
    zoo.assert_close_outputs(pm.full_state_dict()["up"], model.state_dict()["up"], where="up")
    norm = torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm()
    zoo.assert_close_outputs(pm.grad_norm(), norm, where="norm")
    planned = Counter()
    for row in (row for stage in pm.plan.timing["stages"] for row in stage["collectives"]):
        planned[row["kind"]] += row["bytes"]
    return dict(pm.named_parameters())["up"].to_local().size(0), dict(found), dict(planned)


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "axes", "sent", "experts", "options"), [
    ("ep2,tp2", "tp", "", 4, {}), ("cp2,ep2", "cp", "", 8, {"zero": 3}), ("ep2,tp2", "tp", "ep", 10, {}),
    ("cp2,ep2", "cp", "cp ep", 8, {}), ("cp2,tp2", "cp tp", "", 8, {}),
], ids=str)  # fmt: skip
def test_on_processes(mesh, axes, sent, experts, options):
    ranks = dist.run_ranks(step_of, 4, mesh, axes, sent, experts, options, timeout_s=120.0)
    assert [held for held, *_ in ranks] == ([3, 3, 3, 1] if experts == 10 else [experts // 4] * 4)
    if "zero" in options:  # weights that are gathered are sent beside what is counted here
        return
    every = Counter[str]()
    for _, found, planned in ranks:
        every.update(found)
        assert sent or found == pytest.approx(planned, rel=1e-9, abs=8), (found, planned)
    planned = {kind: 4 * size for kind, size in ranks[0][2].items()}  # what a rank sends is data; all send as much
    assert every == pytest.approx(planned, rel=1e-9, abs=128), (every, planned)  # but for how many rows there are


# --- what cannot be --------------------------------------------------------------------------------------------------

EXPERTS = "where  expert_linear at expert_models.py:LINE\n"
REFUSED = {
    "too many ranks": ("cp2,ep2,tp2", folded(["cp", "tp"]), {},
        "LayoutError: experts cannot be sharded over cp=2 x ep=2 x tp=2\n"
        "  why    there are 4 experts for 8 ranks; unequal shards need at least two experts per rank on average, "
        "and one on the last rank\n"
        f"  {EXPERTS}"
        "  try    pins that shard them over cp and ep alone"),
    "no rank left": ("ep4,tp2", folded(["tp"]), {},
        "LayoutError: experts cannot be sharded over ep=4 x tp=2\n"
        "  why    there are 4 experts for 8 ranks; unequal shards need at least two experts per rank on average, "
        "and one on the last rank\n"
        f"  {EXPERTS}"
        "  try    pins that shard them over ep alone"),
    "dp": ("dp2,ep2", folded(["dp", "ep"], stacks=["up"]), {},
        "LayoutError: cannot pin 'up' as S(0) on dp\n"
        "  why    up: ep shards dim 0 already; over dp a weight is stored sharded and used unsharded\n"
        "  try    S(1), S(2) or R; experts themselves are sharded over cp, ep, tp"),
    "pp": ("pp2,ep2", folded(["pp"], stacks=["up"]), {},
        "OptionError: the pin 'up' as S(0) on pp is impossible\n"
        "  why    stages are not layouts\n"
        "  try    'stages': {'cut_before': [...]}"),
    "compiled": ("tp2", folded(["tp"]), {"compile": True},
        "OptionError: compile=True is not supported on tp2\n"
        "  why    a compiled stage has fixed sizes, and the number of tokens of a rank's experts is known only at "
        "run time\n"
        "  try    leave compile out, or use a plan without pins that shard experts"),
    "balance": ("ep2,tp2", folded(["tp"]), {"balance": 5},
        "OptionError: balance=5 is too large for ep2,tp2\n"
        "  why    the most loaded of 4 ranks can have at most 4 times the mean number of tokens\n"
        "  try    balance=4, or less"),
}  # fmt: skip


@pytest.mark.parametrize(("mesh", "pins", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_told(mesh, pins, options, text):
    model, batch = mixture()
    with pytest.raises(AutopartError) as error:
        autopart.plan(model, mesh, example_kwargs=batch, pins=pins, **options)
    assert re.sub(r"\.py:\d+", ".py:LINE", f"{type(error.value).__name__}: {error.value}") == text


class Penalised(Mixture):
    """Experts whose weights are read by what is not a product with rows."""

    def forward(self, ids, labels):
        return super().forward(ids, labels) + 0.1 * self.up.square().sum()


@pytest.mark.few
@pytest.mark.parametrize("experts", [8, 10])
def test_weights_that_something_else_reads_are_gathered_where_they_divide(experts):
    torch.manual_seed(0)
    model = Penalised(experts=experts, towards=(0.0,) * experts).double()
    model.towards = model.towards.double()
    batch = {name: torch.randint(0, 32, (8, 6)) for name in ("ids", "labels")}
    if experts == 8:
        assert_exact(model, batch, "cp2,ep2", pins=folded(["cp"]))
        return
    with pytest.raises(LayoutError) as error:
        autopart.plan(model, "cp2,ep2", example_kwargs=batch, pins=folded(["cp"]))
    assert str(error.value) == (
        "ep cannot shard or gather dim 0 of up\n"
        "  why    its 10 experts are sharded unevenly over cp, and an operator other than the experts' matrix "
        "products reads this dim\n"
        "  try    remove the pins that shard them over ep, or use axis sizes whose product divides their number"
    )


@pytest.mark.large
def test_a_plan_that_cuts_another_weight_twice_is_refused():
    model, batch = mixture()
    data = json.loads(autopart.plan(model, "ep2,tp2", example_kwargs=batch, pins=folded(["tp"])).to_json())
    data["parameters"]["head.weight"] = {"ep": "S(0)", "tp": "S(0)"}
    with pytest.raises(PlanError) as error:
        autopart.verify(model, "ep2,tp2", example_kwargs=batch, plan=Plan.from_json(json.dumps(data)))
    assert str(error.value) == (
        "the plan's layout S(0) of 'head.weight' on ep is not possible\n"
        "  why    tp shards dim 0 already; several axes can only shard the dim of experts, and only if there are "
        "enough experts\n"
        "  where  line 1\n  try    R"
    )


def test_without_pins_experts_stay_on_their_own_axis():
    model, batch = of_experts(8)
    plan = autopart.plan(model, "cp2,ep2,tp2", example_kwargs=batch)
    assert plan.axes_by_expert == ("ep",) and plan.parameters["up"]["cp"] == "R(grad P)"

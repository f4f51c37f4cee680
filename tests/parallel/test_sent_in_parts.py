"""What ranks of `tp` hold alike crosses slow links between stages in parts (Narayanan et al. 2021, section 4.1): the
program is exact, parts are chosen where they are faster, and plans count what is sent."""

import copy
import json
import math
from dataclasses import replace

import dist
import pytest
import torch
import zoo
from cost_models import profile
from held import saved_on_a_rank
from process_checks import same_grads, same_training
from torch import nn
from traced import plan_of, run_of, verified

import autopart
from autopart.cost.count.tabulate import tabulate
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import time_s
from autopart.cost.predict.send_costs import BoundaryBytes, scatter_is_cheaper
from autopart.cost.predict.table import RunSetting, predict
from autopart.errors import PlanError
from autopart.ir.collective_nodes import autopart_operator
from autopart.ir.layout import R_GRAD_P, P, R, shard
from autopart.ir.mesh import Mesh
from autopart.ir.run.scatter_gather_sends import scatter_layout
from autopart.options import Options
from autopart.passes.choose.plan_codec import decode
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.plans.rank_digest import DECIDING
from autopart.proof.localize.subgraph import Subgraph
from autopart.recipe.make_plan import drafted, plan_outputs
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES

BUILDERS = {"gpt2": zoo.gpt2, "llama": zoo.llama, "t5": zoo.t5}
MODELS = BUILDERS | {"skip_mlp": zoo.skip_mlp}
WHOLE_STREAM = {"sequence_parallel": False}
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2,
    "looped_bfs": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Nodes of two devices, with a slow link between nodes."""
    numbers = {"devices_per_node": 2, "link_bytes_per_s": 1e11, "node_link_bytes_per_s": 1e9}
    return profile(tmp_path_factory.mktemp("profiles"), **numbers)


def planned(name, mesh, slow, **options):
    """A model, and its plan where links between nodes are slow."""
    run = run_of(MODELS[name])
    return run, plan_of(run, mesh, **{"hardware": slow, **WHOLE_STREAM, **options})


def program(run, mesh, plan, **changed):
    decisions = replace(decode(run.traced, plan, Mesh.parse(mesh)), **changed)
    return lower(run.traced, decisions, plan_outputs(run.traced), whole_outputs=False)


def assert_exact(run, mesh, plan):
    assert plan.scatter_sends
    found = verified(run, mesh, plan)
    assert found.ok and found.max_error < 1e-12, found


# --- The program ---------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("mesh", ["pp2,tp2", "pp4,tp2", "pp2,tp4"])
@pytest.mark.parametrize("name", BUILDERS)
def test_exact_in_one_process(name, mesh, recompute, slow):
    run, plan = planned(name, mesh, slow, recompute=recompute)
    assert_exact(run, mesh, plan)


@pytest.mark.few
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BUILDERS)
def test_exact_with_every_schedule(name, schedule, slow):
    run, plan = planned(name, "pp2,tp2", slow, schedule=schedule, microbatches=4, virtual_stages=SCHEDULES[schedule])
    assert_exact(run, "pp2,tp2", plan)


@pytest.mark.large
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", BUILDERS)
def test_exact_with_what_is_cut_over_dp(name, zero, slow):
    mesh = "pp2,dp2,tp2"
    run, plan = planned(name, mesh, slow, zero=zero)
    assert_exact(run, mesh, plan)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["pp2,tp2", "pp4,tp2"])
@pytest.mark.parametrize("name", BUILDERS)
def test_stages_send_a_part_of_what_they_hold_alike(name, mesh, slow):
    run, plan = planned(name, mesh, slow)
    traced = {node.name: node for node in run.traced.graph.nodes}
    parts, whole = program(run, mesh, plan), program(run, mesh, plan, scatter_sends=False)
    cut = 0
    for one, other in zip(parts.stages, whole.stages, strict=True):
        assert {b.name for b in one.receives} == {b.name for b in other.receives}
        of_whole = {b.name: b for b in other.receives}
        for sent in one.receives:
            before = of_whole[sent.name]
            if before.layout["tp"] == R and scatter_layout(traced[sent.name], before.layout, parts.mesh):
                assert sent.size_bytes * 2 == before.size_bytes and sent.layout["tp"].is_shard
                cut += 1
            else:
                assert sent == before
    assert cut
    for one, following in zip(parts.stages, parts.stages[1:], strict=False):
        assert [(b.name, b.shape, b.layout) for b in one.sends] == [
            (b.name, b.shape, b.layout) for b in following.receives
        ]


@pytest.mark.large
@pytest.mark.parametrize("reads", [True, False])
def test_a_value_that_travels_on_stays_in_parts(reads, slow):
    """Whether or not a stage on the way reads it: then it gathers it for itself."""
    name, mesh = ("t5", "pp4,tp2") if reads else ("skip_mlp", "pp4,tp2")
    run, plan = planned(name, mesh, slow)
    assert_exact(run, mesh, plan)
    kinds = [
        {autopart_operator(user) or user.op for user in node.users}
        for stage in program(run, mesh, plan).stages[1:-1]
        for node in stage.graph.graph.find_nodes(op="placeholder")
        if "layout" in node.meta and node.meta["layout"].get("tp", R).is_shard
    ]
    assert ({"all_gather", "output"} if reads else {"output"}) in kinds


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_value_is_put_together_once(recompute, slow):
    """For the backward too: a region that is run again does not gather what it reads again."""
    run, plan = planned("llama", "pp2,tp2", slow, recompute=recompute)
    received = {node for stage in program(run, "pp2,tp2", plan).stages for node in stage.graph.graph.nodes
                if node.meta.get("received")}  # fmt: skip
    assert received and not any("region" in node.meta for node in received)
    assert {autopart_operator(node) for node in received} == {"all_gather"}
    assert len({node.args[0] for node in received}) == len(received)


def test_sequence_parallel_values_are_cut_already(slow):
    pins = {"stages": {"cut_before": ["transformer.h.1.attn"]}}
    run, plan = planned("gpt2", "pp2,tp2", slow, sequence_parallel=True, pins=pins)
    assert not plan.scatter_sends
    parts, whole = (program(run, "pp2,tp2", plan, scatter_sends=scatters) for scatters in (True, False))
    sent = [[b for stage in one.stages for b in stage.receives if b.layout["tp"].is_shard] for one in (parts, whole)]
    assert sent[0] == sent[1] != []


def test_which_values_are_cut():
    run = run_of(zoo.gpt2)
    node = next(n for n in run.traced.graph.nodes if tuple(getattr(n.meta.get("val"), "shape", ())) == (8, 12, 64))
    rows, last = {"dp": shard(0)}, 2
    two, odd = Mesh.parse("pp2,dp2,tp2"), Mesh.parse("pp2,dp2,tp5")
    assert scatter_layout(node, {**rows, "tp": R}, two) == {"dp": shard(0), "tp": shard(last)}
    for place in (R_GRAD_P, P, shard(1)):
        assert scatter_layout(node, {**rows, "tp": place}, two) is None
    assert scatter_layout(node, {**rows, "tp": R}, odd) is None  # 8 rows, 12 tokens, 64 features
    assert scatter_layout(node, {**rows, "tp": R}, Mesh.parse("pp2,dp2")) is None
    assert scatter_layout(node, {"dp": shard(last), "tp": R}, two) == {"dp": shard(last), "tp": shard(last - 1)}


def test_parts_in_a_wrong_order_are_found(slow, monkeypatch):
    """What the other tests would see, if the parts were put together wrongly."""
    run, plan = planned("gpt2", "pp2,tp2", slow)
    monkeypatch.setitem(
        LIST_PRIMITIVES, "slice", lambda values, cut: [cut.take(v, 1 - i) for i, v in enumerate(values)]
    )
    assert not verified(run, "pp2,tp2", plan).ok


# --- On processes --------------------------------------------------------------------------------------------------


def same_steps(name, mesh, path, options):
    """Outputs, losses, gradients and weights after training of one device; and of a call with other rows."""
    model, batch = BUILDERS[name]()
    outputs, loss, grads = zoo.reference(model, batch)
    fewer = {key: tensor[:6] for key, tensor in batch.items()}
    _, loss_of_fewer, grads_of_fewer = zoo.reference(model, fewer)
    pm = autopart.parallelize(
        copy.deepcopy(model), mesh, example_kwargs=batch, hardware=path, **WHOLE_STREAM, **options
    )
    assert pm.plan.scatter_sends
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    same_grads(pm, grads)
    pm.zero_grad()
    zoo.assert_close_outputs(pm.step(**fewer), loss_of_fewer, where="loss of 6 rows")
    same_grads(pm, grads_of_fewer)
    zoo.assert_close_outputs(pm(**batch), outputs)
    pm.zero_grad()
    same_training(pm, model, batch)


@pytest.mark.large
@pytest.mark.parametrize("options", [{"recompute": "full"}, {"schedule": "gpipe", "microbatches": 2}, {}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.large) for name in ("llama", "t5"))])
def test_processes_send_parts(name, options, slow):
    dist.run_ranks(same_steps, 4, name, "pp2,tp2", slow, options, timeout_s=240.0)


@pytest.mark.large
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_processes_send_parts_with_several_stages_a_rank(schedule, slow):
    options = {"schedule": schedule, "microbatches": 4, "virtual_stages": 2}
    dist.run_ranks(same_steps, 4, "gpt2", "pp2,tp2", slow, options, timeout_s=240.0)


def step_of_a_file(path, batch_of):
    model, batch = BUILDERS[batch_of]()
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(model, "pp2,tp2", example_kwargs=batch, plan=path)
    zoo.assert_close_outputs(pm.step(**batch), loss)
    same_grads(pm, grads)
    shapes = [tuple(n.meta["val"].shape) for n in pm.graph(1).graph.find_nodes(op="placeholder")]
    return pm.plan.scatter_sends, shapes[0]


@pytest.mark.large
def test_a_plan_from_a_file_runs_the_same_program(slow, tmp_path):
    _, plan = planned("gpt2", "pp2,tp2", slow, microbatches=4)
    plan.save(tmp_path / "parts.json")
    data = json.loads(plan.to_json())
    del data["scatter_sends"]  # as plans were before
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert not Plan.load(tmp_path / "old.json").scatter_sends
    for name, expected in (("parts", (True, (2, 12, 32))), ("old", (False, (2, 12, 64)))):
        found = dist.run_ranks(step_of_a_file, 4, str(tmp_path / f"{name}.json"), "gpt2", timeout_s=120.0)
        assert found == [expected] * 4


@pytest.mark.large
@pytest.mark.parametrize("name", BUILDERS)
def test_memory_is_what_autograd_holds(name, slow):
    options = {"hardware": slow, **WHOLE_STREAM, "microbatches": 2}
    for rank in dist.run_ranks(saved_on_a_rank, 4, name, "pp2,tp2", 0.0, options, timeout_s=120.0):
        assert all(saved == estimated for _, saved, estimated in rank), rank


# --- The choice, and what plans say of it --------------------------------------------------------------------------


def test_the_price_is_that_of_the_links(slow):
    mesh, hardware = Mesh.parse("pp2,tp2"), Hardware.load(slow)
    crossing = BoundaryBytes(3e6, 2e6)
    whole, parts = (crossing.time_s(mesh, hardware, scatters) for scatters in (False, True))
    assert whole == pytest.approx(3e6 / 1e9)
    assert parts == pytest.approx((1e6 + 2e6 / 2) / 1e9 + (2e6 / 2) / 1e11)
    assert parts == time_s("send", 2, 2e6, hardware, 2) + time_s("all_gather", 2, 2e6, hardware)
    assert scatter_is_cheaper([crossing], mesh, hardware)
    assert not scatter_is_cheaper([BoundaryBytes(3e6, 0.0)], mesh, hardware)  # nothing is alike
    assert not scatter_is_cheaper([crossing], Mesh.parse("pp2"), hardware)
    assert not scatter_is_cheaper([], Mesh.parse("tp2"), hardware)


@pytest.mark.parametrize(("link", "expected"), [(1e11, True), (1.1e9, True), (0.9e9, False), (1e8, False)])
def test_parts_are_chosen_where_they_are_faster(link, expected, tmp_path):
    """With two ranks half of the bytes cross each link: parts pay where the link in a node is the faster one."""
    path = profile(tmp_path, devices_per_node=2, link_bytes_per_s=link, node_link_bytes_per_s=1e9)
    run, plan = planned("gpt2", "pp2,tp2", path)
    assert plan.scatter_sends is expected
    draft = drafted(run.traced, Mesh.parse("pp2,tp2"), Options(hardware=path, **WHOLE_STREAM))
    table = tabulate(run.traced, *(draft.whole or (draft.program, draft.walks)), {})
    setting, hardware = RunSetting(Mesh.parse("pp2,tp2"), plan.schedule, 8), Hardware.load(path)
    times = [predict(table, replace(setting, scatter_sends=how), hardware).step_time_s for how in (None, True, False)]
    assert times[0] == min(times[1:]) and times[1] != times[2]
    assert times[0] == pytest.approx(autopart.simulate(plan).step_time_s, rel=1e-9)


class Wide(nn.Module):
    """Enough work that what crosses is worth cutting."""

    def __init__(self, width=4096, layers=4):
        super().__init__()
        pairs = [nn.ModuleList([nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]) for _ in range(layers)]
        self.layers, self.norm = nn.ModuleList(pairs), nn.LayerNorm(width)

    def forward(self, x):
        for up, down in self.layers:
            x = self.norm(x + down(torch.tanh(up(x))))
        return x.float().mean()


@pytest.mark.parametrize(("mesh", "expected"), [("pp2,tp2", False), ("pp2,tp4", False), ("pp2,tp8", True)])
def test_on_a100s_parts_are_sent_between_nodes_alone(mesh, expected):
    with torch.device("meta"):
        model, x = Wide(), torch.empty(8, 2048, 4096)
    plan = autopart.plan(model, mesh, example_args=(x,), hardware="a100-80gb-sxm", **WHOLE_STREAM)
    assert plan.scatter_sends is expected


@pytest.mark.few
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "zbv", "virtual_stages": 2}], ids=str)
@pytest.mark.parametrize("mesh", ["pp2,tp2", "pp2,dp2,tp2"])
@pytest.mark.parametrize("name", BUILDERS)
def test_all_sources_say_the_same(name, mesh, options, slow):
    _, plan = planned(name, mesh, slow, **options)
    step = autopart.simulate(plan)
    assert plan.scatter_sends
    assert plan.cost.at().step_time_s == pytest.approx(step.step_time_s, rel=1e-9)
    assert float(plan.cost["step_time_s"]) == pytest.approx(step.step_time_s, rel=1e-9)
    assert plan.cost.at().memory_bytes == pytest.approx(max(row["total"] for row in plan.memory), rel=1e-9)
    received = {row["stage"]: row["receives_bytes"] for row in plan.timing["stages"]}
    sent = {int(c.where.rpartition(" ")[2]): c.bytes for c in plan.collectives if c.axis == "pp"}
    assert {stage: 2 * size for stage, size in received.items() if size} == sent
    loaded = Plan.from_json(plan.to_json())
    assert loaded.cost.at().step_time_s == plan.cost.at().step_time_s
    assert set(map(str, plan.cost.free_symbols)) >= {"tp", "pp"}


@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_gathered_is_counted(name, slow):
    """The collectives of the program are those that the step is simulated with."""
    _, plan = planned(name, "pp2,tp2", slow)
    planned_bytes = sum(c.bytes for c in plan.collectives if c.per == "microbatch" and c.axis == "tp")
    rows = [row for stage in plan.timing["stages"] for row in stage["collectives"] if row["axis"] == "tp"]
    assert sum(row["bytes"] for row in rows) == pytest.approx(planned_bytes, rel=1e-6)
    gathers = [row for row in rows if row["kind"] == "all_gather"]
    assert len(gathers) == 2 and all(row["count"] and row["seconds"] > 0 for row in gathers)


def test_a_slow_link_costs_less_with_parts(slow):
    _, plan = planned("gpt2", "pp2,tp2", slow)
    table, hardware = plan.cost.table, Hardware.load(slow)
    setting = RunSetting(Mesh.parse("pp2,tp2"), plan.schedule, 8, scatter_sends=False)
    whole = predict(table, setting, hardware)
    assert autopart.simulate(plan).step_time_s < whole.step_time_s
    assert math.isfinite(float(plan.cost.at(tp=4, pp=2)))


def test_the_plan_says_it(slow):
    _, plan = planned("gpt2", "pp2,tp2", slow)
    _, near = planned("gpt2", "pp2,tp2", "a100-80gb-sxm")
    said = " ".join(str(plan.explain()).split())
    assert "sends sharded: each rank of tp sends a shard, the next stage all-gathers" in said
    assert "sends sharded" not in " ".join(str(near.explain()).split())
    row = next(row for row in plan.diff(replace(plan, scatter_sends=False)).rows)
    assert (row.part, row.what, row.first, row.second) == ("scatter_sends", "between stages", "sharded", "in full")
    assert "scatter_sends" in DECIDING and Plan.from_json(plan.to_json()).scatter_sends
    text = json.dumps(json.loads(plan.to_json()) | {"scatter_sends": "tp"})
    with pytest.raises(PlanError, match="scatter_sends: 'tp' is not of type 'boolean'"):
        Plan.from_json(text)


def test_a_fault_is_found_in_a_graph_that_says_how_it_sends():
    text = """
        mesh pp2,tp2 | stages 2 | sends in parts
        x = input f64[4,6]
        w = weight f64[6,6]
        y = aten.mm.default(x, w) | stage 0 | tp R, R -> R
        z = aten.tanh.default(y) | stage 1 | tp R -> R
        return z
    """
    found = Subgraph.parse(text)
    assert found.arrangement.decisions.scatter_sends and found.max_error() < 1e-12
    assert str(found).splitlines()[0] == "mesh pp2,tp2 | stages 2 | sends in parts"
    assert Subgraph.parse(str(found)).arrangement.decisions.scatter_sends

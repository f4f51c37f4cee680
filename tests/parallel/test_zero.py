"""Parameters that are stored in parts over `dp` and gathered where they are read: exact, a part on every rank, and
what is moved for it is in the plan."""

from __future__ import annotations

import copy
import json
import math
import time
from contextlib import contextmanager
from typing import Any
from unittest import mock

import buffer_models
import dist
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from traced import plan_of, run_of, verified
from transformers import MixtralConfig, MixtralForCausalLM

import autopart
from autopart.ir.layout import R
from autopart.ir.mesh import Mesh
from autopart.passes.choose.plan_codec import decode, encode
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import prepare
from autopart.runtime import lockstep
from autopart.runtime.gradients import shard_collectives, unshard_blocks
from autopart.runtime.sharded_tensor.sharded_tensor import ShardedTensor
from autopart.runtime.shards.shard_state import join, shard_parameters
from autopart.tracing.trace_model import bind_call

Built = tuple[nn.Module, dict[str, Tensor]]
EVERYTHING = {"*": {"dp": "S(0)"}}
"""As pins: vectors too."""


def bert_with_dropout() -> Built:
    model, batch = zoo.bert(num_layers=1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return model, batch


def batch_norms() -> Built:
    return buffer_models.build("batch norm"), buffer_models.batch("batch norm")


def adapters() -> Built:
    peft = pytest.importorskip("peft")
    model, batch = zoo.llama(num_layers=1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, config).double(), batch


def experts() -> Built:
    torch.manual_seed(0)
    sizes = zoo._sizes(1, 32, 4, 64, 12) | {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, experts_implementation="batched_mm", **zoo.TOKENS)
    return zoo._finish(MixtralForCausalLM(config)), zoo.causal_batch(8, 12, 64)


class Awkward(nn.Module):
    """A weight read twice as it is and once through a view, one that no row has a part in, a table, a vector, one that
    is not read, one of odd size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.table = nn.Linear(8, 8), nn.Embedding(10, 8)
        self.alone, self.scale = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(8))
        self.unread, self.odd = nn.Parameter(torch.randn(4, 4)), nn.Linear(8, 3)
        self.odd.weight = nn.Parameter(torch.randn(3, 8)[:, :7].clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(self.table(ids)))) @ self.twice.weight
        return (
            self.odd((x * self.scale)[..., :7]).square().mean() + self.alone.square().sum() + self.alone.t().sin().sum()
        )


def awkward() -> Built:
    return Awkward().double(), {"ids": torch.arange(16).reshape(8, 2) % 10}


# --- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(("build", "mesh"), [
    (zoo.t5, "dp2,pp2"), (zoo.phi3, "dp2,tp2"), (bert_with_dropout, "dp2,pp2,tp2"), (batch_norms, "dp2,tp2"),
    (adapters, "dp2,pp2,tp2"),
    (experts, "dp2,tp2"), (awkward, "dp2,tp2"), (awkward, "dp2,pp2"),
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_what_is_gathered_is_exact(build, mesh):
    found = verified(run_of(build), mesh, zero=3)
    assert found.ok and found.max_error < 1e-12, str(found)


@pytest.mark.large
def test_every_parameter_that_divides_can_be_cut():
    """Vectors by pins; widths that do not divide into unequal parts."""
    model, batch = zoo.gpt2(num_layers=1, vocab=97, hidden=24, heads=4)
    found = autopart.verify(model, "dp4,pp2", example_kwargs=batch, pins=EVERYTHING, microbatches=2)
    assert found.ok, str(found)
    plan = autopart.plan(model, "dp4,pp2", example_kwargs=batch, pins=EVERYTHING)
    assert {entry["dp"] for entry in plan.parameters.values()} == {"S(0)"}


@pytest.mark.large
def test_rows_that_do_not_divide_are_computed_by_every_rank():
    """The gradient is then the same on every rank, not a part of a sum."""
    model, batch = zoo.llama(num_layers=1)
    plan = autopart.plan(model, "dp2,tp2", example_kwargs=batch, zero=3)
    fewer = {name: value[:3] for name, value in batch.items()}
    assert autopart.verify(model, "dp2,tp2", example_kwargs=fewer, plan=plan).ok


def test_a_gather_of_the_wrong_part_is_found(monkeypatch):
    model, batch = zoo.skip_mlp(num_layers=2)
    gathered = lockstep.LIST_PRIMITIVES["all_gather"]
    broken = {**lockstep.LIST_PRIMITIVES, "all_gather": lambda values, cut: gathered(values[::-1], cut)}
    monkeypatch.setattr(lockstep, "LIST_PRIMITIVES", broken)
    found = autopart.verify(model, "dp2", example_kwargs=batch, zero=3, shrink=True)
    assert not found.ok and found.first_mismatch.name == "layers.0.weight"
    assert found.smallest is not None and "| dp S(0)" in str(found.smallest)
    monkeypatch.undo()
    assert autopart.proof.localize.subgraph.Subgraph.parse(str(found.smallest)).max_error() < 1e-10


# --- what the plan says ----------------------------------------------------------------------------------------------


def test_the_plan_says_where_and_what_is_moved():
    run = run_of(zoo.llama)
    plan = plan_of(run, "dp2,tp2", zero=3)
    assert plan.parameters["model.layers.*.self_attn.q_proj.weight"] == {"dp": "S(1)", "tp": "S(0)"}
    assert plan.parameters["model.layers.*.mlp.down_proj.weight"] == {"dp": "S(0)", "tp": "S(1)"}
    assert plan.parameters["model.norm.weight"]["tp"] == "R" and "dp" not in plan.parameters["model.norm.weight"]
    rows = {c.where: c for c in plan.collectives if c.axis == "dp" and c.forward == "all_gather"}
    down = rows["model.layers.*.mlp.down_proj"]
    whole = 32 * 64 * 8 // 2  # a rank's part of it on tp, in bytes
    assert (down.backward, down.count, down.bytes, down.per) == ("reduce_scatter", 2, 2 * whole, "microbatch")
    (summed,) = [c for c in plan.collectives if c.where == "gradients of parameters" and c.axis == "dp"]
    assert summed.bytes == sum(p.nbytes for p in run.model.parameters() if p.dim() == 1)
    text = plan.explain()
    assert "dp:S(0) tp:S(1)" in text and "dp all_gather" in text and "dp reduce_scatter" in text
    again = Plan.from_json(plan.to_json())
    assert again == plan and verified(run, "dp2,tp2", again, zero=3).ok


def test_a_weight_is_gathered_once():
    """However many operators of a stage read it, in one layout or in two that differ on tp alone."""
    plan = plan_of(run_of(awkward), "dp2", zero=3)
    moved = {c.where: c.count for c in plan.collectives if c.forward == "all_gather"}
    assert moved == {"twice": 1, "table": 1, "model": 1}
    assert any("odd.weight: [3, 7] stays replicated on dp=2" in note for note in plan.notes)
    plan = plan_of(run_of(zoo.gpt2, num_layers=1), "dp2,pp2", zero=3)
    table = [(c.forward, c.backward, c.count) for c in plan.collectives if c.where == "transformer.wte"]
    assert table == [("all_gather", "reduce_scatter", 2), ("", "all_gather", 1)]  # two stages; the head's backward


@pytest.mark.large
def test_frozen_weights_have_no_backward():
    model, batch = adapters()
    plan = autopart.plan(model, "dp2", example_kwargs=batch, zero=3)
    ways = {c.where: c.backward for c in plan.collectives if c.forward == "all_gather" and c.axis == "dp"}
    assert ways["base_model.model.model.layers.*.mlp.down_proj.base_layer"] == ""
    assert ways["base_model.model.model.layers.*.mlp.down_proj.lora_A.default"] == "reduce_scatter"


def test_formats_of_tensor_parallelism_say_that_they_leave_it_out():
    model, batch = zoo.llama(num_layers=1)
    plan = autopart.plan(model, "dp2,tp2", example_kwargs=batch, zero=3)
    with pytest.warns(UserWarning, match="no ZeRO sharding over dp"):
        plan.export("transformers", model)


def test_plans_are_read_as_they_are_written():
    model, batch = zoo.skip_mlp(num_layers=3)
    mesh = Mesh.parse("dp2,tp2")
    pins = {"layers.1.weight": {"dp": "R"}, "*.bias": {"dp": "R"}}
    plan = autopart.plan(model, mesh, example_kwargs=batch, zero=3, pins=pins)
    assert plan.placement_text("layers.0.weight", "dp") != "R" == plan.placement_text("layers.1.weight", "dp")
    trace = prepare(model, bind_call(model, (), batch))
    decisions = decode(trace, plan, mesh)
    assert encode(trace, decisions)["parameters"] == plan.parameters
    assert "dp" not in decisions.stored["layers.1.weight"] and "dp" in decisions.stored["layers.2.weight"]


def test_an_edited_plan_runs_as_it_says():
    run = run_of(zoo.skip_mlp, num_layers=2)
    data = json.loads(plan_of(run, "dp2").to_json())
    assert data["parameters"] == {"layers.*.weight": {}, "layers.*.bias": {}, "head.weight": {}, "head.bias": {}}
    data["parameters"] |= {"layers.*.weight": {"dp": "S(1)"}, "layers.1.weight": {}, "head.bias": {"dp": "S(0)"}}
    plan = Plan.from_json(json.dumps(data))
    assert verified(run, "dp2", plan).ok
    assert "dp:S(1)" in plan.explain()


def test_a_rank_holds_its_part():
    run, mesh = run_of(zoo.gpt2), Mesh.parse("dp4")
    model, trace, plan = run.model, run.traced, plan_of(run, "dp4", zero=3)
    loss = trace.graph.output_node().args[0][0]
    program = lower(trace, decode(trace, plan, mesh), [loss], whole_outputs=False)
    local = {rank: shard_parameters(model, program, mesh.coordinates(rank)) for rank in range(4)}
    for name, parameter in model.named_parameters():
        parts = 1 if program.parameters[name].layout.get("dp", R) == R else 4
        assert parts == (4 if parameter.dim() > 1 else 1)
        assert all(shards[name].numel() * parts == parameter.numel() for shards in local.values())
    full = join(local, program)
    assert all(torch.equal(full[name], parameter) for name, parameter in model.named_parameters())


# --- over processes --------------------------------------------------------------------------------------------------


def trains(build: str, mesh: str, options: dict[str, Any]) -> tuple[int, int]:
    """Two AdamW steps end where one device ends; the bytes that this rank stores, and those of the model."""
    model, batch = BUILDERS[build]()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, zero=3, **options)
    _, loss, grads = zoo.reference(model, batch)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    trained = {name: grad for name, grad in grads.items() if grad is not None}
    zoo.assert_same_grads(pm.full_grads(), trained)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (pm, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        pm.step(**batch)
        out = model(**batch, **zoo.no_cache(model))
        (out if isinstance(out, Tensor) else out.loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = pm.full_state_dict()
    for name, value in model.state_dict().items():
        zoo.assert_close_outputs(found[name], value, where=name)
    local = {id(p): (p.to_local() if isinstance(p, ShardedTensor) else p).nbytes for p in pm.parameters()}
    return sum(local.values()), sum(p.nbytes for p in model.parameters())


def calls() -> None:
    """The user's own loop, a call without gradients, other numbers of rows, weights written back."""
    model, batch = zoo.llama(num_layers=1)
    pm = autopart.parallelize(model, "dp2,tp2", example_kwargs=batch, zero=3)
    outputs, _, grads = zoo.reference(model, batch)
    for times in (1, 2):
        pm(**batch).loss.backward()
        zoo.assert_same_grads(pm.full_grads(), {name: grad * times for name, grad in grads.items()})
    with torch.no_grad():
        zoo.assert_close_outputs(pm.eval()(**batch), outputs)
    pm.train().zero_grad()
    fewer = {name: value[:3] for name, value in batch.items()}
    _, loss, grads = zoo.reference(model, fewer)
    with pytest.warns(UserWarning, match="rows"):
        zoo.assert_close_outputs(pm.step(**fewer), loss)
    zoo.assert_same_grads(pm.full_grads(), grads)
    saved = copy.deepcopy(pm.state_dict())
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.mul_(2)
    pm.load_state_dict(saved)
    zoo.assert_close_outputs(pm.step(**fewer), loss)


@contextmanager
def noted_gathers():
    """Inside, every gathered weight is noted: its name, and its memory."""
    found: list[tuple[str, StorageWeakRef]] = []
    gather = shard_collectives.ShardCollectives.gather

    def noted(self, *given):
        wait = gather(self, *given)

        def wholes():
            weights = wait()
            found.extend(
                (name, StorageWeakRef(w.untyped_storage())) for name, w in zip(self.names, weights, strict=True)
            )
            return weights

        return wholes

    with mock.patch.object(shard_collectives.ShardCollectives, "gather", noted):
        yield found


def still_there(found: list[tuple[str, StorageWeakRef]], tries: int = 100) -> set[str]:
    """Which weights are not let go of. A thread of gloo may hold what it has sent a moment longer."""
    for _ in range(tries):
        there = {name for name, memory in found if not memory.expired()}
        if not there:
            break
        time.sleep(0.05)
    return there


def gathers(mesh: str, keep: bool) -> tuple[set[str], int, int]:
    """The gathered weights that are there between a forward and its backward, how often weights are gathered in both,
    and how often by the plan. `keep`: autograd saves what it is given."""
    model, batch = zoo.llama()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, zero=3, microbatches=1)
    pack = (lambda self, saved: saved) if keep else unshard_blocks.UnshardBlocks._pack
    with mock.patch.object(unshard_blocks.UnshardBlocks, "_pack", pack), noted_gathers() as found:
        loss = pm(**batch).loss
        there = still_there(found, 1 if keep else 100)
        loss.backward()
    planned = [c for c in pm.plan.collectives if c.axis == "dp" and "all_gather" in (c.forward, c.backward)]
    return there, len(found), sum(c.count for c in planned)


def lets_go() -> tuple[int, set[str]]:
    """How many forwards begin in a step of two microbatches, and which weights of a backward they begin with."""
    model, batch = adapters()  # of frozen weights no gradient is scattered, which lets go of them too
    pm = autopart.parallelize(model, "dp2", example_kwargs=batch, zero=3, microbatches=2)
    take, begun, there = unshard_blocks.UnshardBlocks.take, [], set[str]()

    def taken(self, index):
        if index == 0:
            begun.append(index)
            there.update(still_there(found))
        return take(self, index)

    with noted_gathers() as found, mock.patch.object(unshard_blocks.UnshardBlocks, "take", taken):
        pm.step(**batch)
    return len(begun), there


def changed_in_between(mesh: str) -> None:
    model, batch = zoo.skip_mlp(num_layers=2)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, zero=3)
    loss = pm(**batch)
    with torch.no_grad():
        pm.get_parameter("head.weight").mul_(2)
    loss.backward()


BUILDERS = {"gpt2": zoo.gpt2, "adapters": adapters, "awkward": awkward}
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "dp2", {}), ("adapters", "dp2", {}), ("awkward", "dp2", {"microbatches": 2}), ("gpt2", "dp2,tp2", {}),
    ("gpt2", "dp2,pp2", {}), ("gpt2", "dp2,pp2", {"schedule": "interleaved_zero_bubble"}),
    ("awkward", "dp2,pp2", {"schedule": "zbv"}),
]  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize(("build", "mesh", "options"), RUNS)
def test_training_over_processes(build, mesh, options):
    found = dist.run_ranks(trains, Mesh.parse(mesh).num_ranks, build, mesh, options, timeout_s=120)
    model, _ = BUILDERS[build]()
    vectors = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    if build == "gpt2" and mesh == "dp2":
        assert all(here == (whole - vectors) // 2 + vectors for here, whole in found)
    assert all(math.ceil(here * 0.9) < whole for here, whole in found)


@pytest.mark.large
def test_calls_over_processes():
    dist.run_ranks(calls, 4, timeout_s=120)


@pytest.mark.large
def test_gathered_weights_are_not_kept_for_the_backward():
    for there, times, planned in dist.run_ranks(gathers, 2, "dp2", False):
        assert there == set() and times == planned
    for there, times, planned in dist.run_ranks(gathers, 2, "dp2", True):
        assert "model.layers.0.mlp.down_proj.weight" in there and times < planned


def test_a_forward_begins_without_what_the_backward_before_has_gathered():
    for forwards, there in dist.run_ranks(lets_go, 2):
        assert forwards == 2 and there == set()


def test_weights_that_change_before_their_backward_are_noticed():
    with pytest.raises(
        dist.RankError, match=r"StageError: 'head.weight' was changed between a forward and its backward"
    ):
        dist.run_ranks(changed_in_between, 2, "dp2")

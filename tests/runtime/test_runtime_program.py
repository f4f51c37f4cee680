"""A small program written by hand, run by all runtimes, against the plain model."""

import itertools
import operator
import time
import types

import dist
import pytest
import torch
import torch.distributed as td
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

from autopart.compat.pipelining_internals import schedule_class
from autopart.compat.torch_internals import tree_flatten
from autopart.errors import RuntimeSetupError, StageError, TraceError
from autopart.ir.layout import R_GRAD_P, P, R, shard
from autopart.ir.mesh import Mesh
from autopart.ir.program import Boundary, Output, Program, Stage, StageInput, StoredTensor
from autopart.ir.run.schedules import MULTI_STAGE, SCHEDULES, V_SHAPED, check_schedule
from autopart.runtime.comm.collectives import bind
from autopart.runtime.comm.stage_ranks import stage_coordinate, stage_style_of, stages_at
from autopart.runtime.gradients.step_reduction import AllReduceGroup, axis_buckets, sync_gradients_lockstep
from autopart.runtime.lockstep import run_lockstep
from autopart.runtime.module import ParallelModule
from autopart.runtime.shards.shard_state import join, shard_parameters

WIDTH, HIDDEN, BATCH = 6, 7, 16
OPS = torch.ops.autopart


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        # One parameter is read twice, one use upstream of the other: a split backward must not count it double.
        return x + torch.tanh(self.down(torch.tanh(self.up(x * self.gain)))) + self.down.bias


class Model(nn.Module):
    """Residual blocks between two uses of one tied parameter; returns the loss and the last hidden state."""

    def __init__(self, num_blocks):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("offset", torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.out_scale = self.scale

    def forward(self, x, target):
        x = (x + self.offset) * self.scale
        for block in self.blocks:
            x = block(x)
        y = x * self.out_scale
        return {"loss": ((y - target) ** 2).sum() / target.numel(), "y": y}


def make_model(num_blocks, frozen=()):
    """`frozen`: parts of parameter names that are not trained."""
    torch.manual_seed(1)
    model = Model(num_blocks).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def make_batch():
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator))


# --- The program: one block per stage; tp cuts HIDDEN (unevenly), dp and microbatches cut the batch.


def make_program(model, mesh, microbatches=1, purpose="step"):
    num_stages = len(model.blocks)
    rows = BATCH // mesh.size("dp") // microbatches
    hidden = Boundary("hidden", (rows, WIDTH), torch.float64, {"dp": shard(0), "mb": shard(0)})
    loss = Boundary("loss", (), torch.float64, {"dp": P, "mb": P})
    output = Boundary("y", (BATCH // microbatches, WIDTH), torch.float64, {"mb": shard(0)})
    last = (loss,) if purpose == "step" else (loss, output)
    stages = []
    for index in range(num_stages):
        is_first, is_last = index == 0, index == num_stages - 1
        graph = make_graph(model, mesh, index, is_first, is_last, purpose, rows)
        stages.append(
            Stage(
                index,
                make_prologue(is_first, is_last),
                stage_inputs(is_first, is_last),
                graph,
                receives=() if is_first else (hidden,),
                sends=last if is_last else (hidden,),
                parameters=tuple(block_names(index)) + (("scale",) if is_first or is_last else ()),
                buffers=("offset",) if is_first else (),
            )
        )
    reduced = {"mb": P} if purpose == "forward" else {"dp": P, "mb": P}
    outputs = [Output(0, reduced)] + ([Output(1, {"mb": shard(0)}), Output(None, {}, "text")] * (purpose != "step"))
    structure = {"loss": 0, "y": 0, "note": 0} if purpose == "forward" else 0
    return Program(
        mesh,
        microbatches,
        ("x", "target"),
        tuple(stages),
        stored_tensors(num_stages),
        tuple(outputs),
        tree_flatten(structure)[1],
    )


def block_names(index):
    return [f"blocks.{index}.{n}" for n in ("gain", "up.weight", "up.bias", "down.weight", "down.bias")]


def stored_tensors(num_stages):
    stored = {}
    for index in range(num_stages):
        shapes = [(WIDTH,), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]
        layouts = [{"tp": R_GRAD_P}, {"tp": shard(0)}, {"tp": shard(0)}, {"tp": shard(1)}, {"tp": R}]
        for name, shape, layout in zip(block_names(index), shapes, layouts, strict=True):
            axes = ("dp", "tp") if name.endswith("gain") else ("dp",)
            stored[name] = StoredTensor(name, shape, layout, (index,), axes)
    ends = tuple(dict.fromkeys((0, num_stages - 1)))
    stored["scale"] = StoredTensor("scale", (WIDTH,), {}, ends, ("dp",), aliases=("out_scale",))
    return stored


def stage_inputs(is_first, is_last):
    return (StageInput("x", 0),) * is_first + (StageInput("target", 0), StageInput("count", None)) * is_last


def make_prologue(is_first, is_last):
    graph = fx.Graph()
    x, target = graph.placeholder("x"), graph.placeholder("target")
    results = [x] if is_first else []
    if is_last:
        ones = graph.call_function(torch.ops.aten.ones_like.default, (target,), {"device": torch.device("meta")})
        results += [target, graph.call_function(torch.ops.aten.sum.default, (ones,))]
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def make_graph(model, mesh, index, is_first, is_last, purpose, rows):
    graph = fx.Graph()

    def call(op, *args):
        return graph.call_function(op, args)

    def attribute(name):
        return graph.create_node("get_attr", name)

    x = graph.placeholder("x" if is_first else "received")
    if is_last:
        target, count = graph.placeholder("target"), graph.placeholder("count")
    if is_first:
        x = call(operator.mul, call(operator.add, x, attribute("offset")), attribute("scale"))
    gain, up, up_bias, down, down_bias = (attribute(name) for name in block_names(index))
    h = call(operator.mul, call(OPS.sum_grad.default, x, "tp"), gain)
    h = call(torch.tanh, call(nn.functional.linear, h, up, up_bias))
    h = call(OPS.all_reduce.default, call(nn.functional.linear, h, down), "tp")
    h = call(torch.tanh, call(operator.add, h, down_bias))
    x = call(operator.add, call(operator.add, x, h), down_bias)
    if is_last:
        y = call(operator.mul, x, attribute("scale"))
        error = call(torch.pow, call(operator.sub, y, target), 2)
        loss = call(operator.truediv, call(torch.sum, error), count)
        if purpose == "forward":
            loss = call(OPS.all_reduce.default, loss, "dp")
            y = call(OPS.all_gather.default, y, "dp", 0, rows * mesh.size("dp"), [])
        graph.output((loss,) if purpose == "step" else (loss, y))
    else:
        graph.output((x,))
    names = [node.target for node in graph.nodes if node.op == "get_attr"]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return fx.GraphModule({name: tensors[name] for name in names}, graph)


class HandCompiler:
    """The Compiler protocol over hand-made programs."""

    plan = "a plan"
    written = ()
    changed_values = ""

    def __init__(self, model, mesh, microbatches, traced=True):
        self.model, self.mesh, self.microbatches, self.traced = model, mesh, microbatches, traced
        self.programs = {}

    def program(self, args, kwargs, *, purpose, training, settings=(), loss_fn=None, target=None):
        if purpose not in self.programs:
            self.programs[purpose] = make_program(self.model, self.mesh, self.microbatches, purpose)
        return self.programs[purpose], tuple(args) + tuple(kwargs.values())

    def ready(self):
        return self.program((), {}, purpose="step", training=True)[0] if self.traced else None

    def agreed(self):
        return {"plan": self.plan}


# --- Against the plain model.


def plain(num_blocks, num_steps=1, frozen=()):
    model = make_model(num_blocks, frozen)
    for _ in range(num_steps):
        result = model(*make_batch())
        result["loss"].backward()
    return result, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_near(got, want, what=""):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")


def assert_grads_near(got, want):
    assert list(got) == list(want)
    for name in want:
        assert_near(got[name], want[name], name)


MESHES = ["tp1", "tp2", "tp3", "dp2", "pp2", "dp2,tp2", "pp2,tp2", "dp2,pp2", "dp2,pp2,tp2"]


@pytest.mark.parametrize("purpose", ["step", "forward"])
@pytest.mark.parametrize(
    ("mesh", "microbatches", "num_blocks", "stage_style"),
    [(m, mb, 2, "loop") for m in MESHES for mb in (1, 4)] + [("pp2,tp2", 2, 4, p) for p in ("loop", "V")],
)
def test_lockstep(mesh, microbatches, num_blocks, stage_style, purpose):
    mesh = Mesh.parse(mesh)
    model = make_model(num_blocks)
    program = make_program(model, mesh, microbatches, purpose)
    parameters = {}
    for rank in range(mesh.num_ranks):
        stages = stages_at(program, mesh.coordinates(rank).get("pp", 0), stage_style)
        parameters[rank] = shard_parameters(model, program, mesh.coordinates(rank), stages=stages)
    outputs = run_lockstep(program, parameters, dict(model.named_buffers()), make_batch(), stage_style=stage_style)
    losses = [out[0] for microbatches in outputs.values() for out in microbatches]
    (want, want_grads) = plain(num_blocks)
    if purpose == "forward":
        for per_microbatch in outputs.values():
            assert_near(sum(loss for loss, _ in per_microbatch), want["loss"])
        return
    assert_near(sum(losses) / mesh.size("tp"), want["loss"])
    torch.autograd.backward(losses)
    sync_gradients_lockstep(parameters, program, stage_style=stage_style, bucket_bytes=200)
    grads = {rank: {name: p.grad for name, p in local.items()} for rank, local in parameters.items()}
    joined = join(grads, program, stage_style=stage_style)
    assert_grads_near({name: joined[name] for name in want_grads}, want_grads)
    for rank in range(mesh.num_ranks):  # tied and replicated gradients are whole on every rank
        if "scale" in grads[rank]:
            assert_near(grads[rank]["scale"], want_grads["scale"])


def test_lockstep_tells_every_value():
    mesh = Mesh.parse("pp2,tp2")
    model = make_model(2)
    program = make_program(model, mesh, 2)
    parameters = {rank: shard_parameters(model, program, mesh.coordinates(rank)) for rank in range(4)}
    seen = []
    with torch.no_grad():
        run_lockstep(
            program,
            parameters,
            dict(model.named_buffers()),
            make_batch(),
            on_value=lambda stage, microbatch, node, values: seen.append((stage, microbatch, node.name, list(values))),
        )
    nodes = [[n.name for n in s.graph.graph.nodes if n.op != "output"] for s in program.stages]
    expected = [(s, m, n, [2 * s, 2 * s + 1]) for m in range(2) for s in range(2) for n in nodes[s]]
    assert seen == expected


def test_join_is_the_inverse_of_shard():
    mesh = Mesh.parse("dp2,tp3")
    model = make_model(2)
    program = make_program(model, mesh)
    local = {rank: shard_parameters(model, program, mesh.coordinates(rank)) for rank in range(6)}
    assert {tuple(local[rank]["blocks.0.up.weight"].shape) for rank in range(3)} == {(3, WIDTH), (1, WIDTH)}
    for name, full in join(local, program).items():
        assert torch.equal(full, model.get_parameter(name))
    local[0]["scale"].data.zero_()
    assert model.scale.abs().sum() > 0, "a shard is a copy"


# --- On processes.


def run_module(mesh, num_blocks, cases, frozen=(), num_steps=2):
    """Each (schedule, microbatches): steps, full gradients, state and forward, compared on every rank."""
    mesh = Mesh.parse(mesh)
    result, grads = plain(num_blocks, num_steps, frozen)
    for schedule, microbatches in cases:
        model = make_model(num_blocks, frozen)
        pm = ParallelModule(model, mesh, HandCompiler(model, mesh, microbatches), schedule=schedule)
        for _ in range(num_steps):
            loss = pm.step(*make_batch())
            assert_near(loss, result["loss"], schedule)
            assert not loss.requires_grad and loss.shape == ()
        assert_grads_near(pm.full_grads(), grads)
        state = pm.full_state_dict()
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        with torch.no_grad():
            output = pm(*make_batch())
        assert output["note"] == "text"
        assert_near(output["loss"], result["loss"], schedule)
        assert_near(output["y"], result["y"], schedule)
    return [name for name, _ in pm.named_parameters()]


PIPELINES = [
    ("pp2,tp2", 2, [("gpipe", 1), ("gpipe", 4), ("1f1b", 2), ("1f1b", 8), (None, 1)]),
    ("pp2,dp2", 4, [(s, 4) for s in ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zbv", "dualpipev")]),
    ("pp2,tp2", 4, [(s, 8) for s in ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zbv", "dualpipev")]),
    ("pp4", 4, [("1f1b", 4)]),
    ("pp2,dp2", 4, [(None, 4)]),
    ("pp4", 8, [("interleaved_zero_bubble", 8), ("zbv", 8)]),
]


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "num_blocks", "cases"), PIPELINES)
def test_pipelines(mesh, num_blocks, cases):
    names = dist.run_ranks(run_module, 4, mesh, num_blocks, cases)
    assert names[0] != names[-1]


@pytest.mark.large
@pytest.mark.parametrize("frozen", [("blocks.0.", "scale"), ("blocks",), ("blocks.1.", "gain")])
def test_frozen_parameters(frozen):
    """The first stage trains nothing; all but the tied ends; a stage in the middle."""
    dist.run_ranks(run_module, 2, "pp2", 2, [("gpipe", 2), ("1f1b", 2)], frozen)
    dist.run_ranks(run_module, 2, "pp2", 4, [("zbv", 4), ("interleaved_zero_bubble", 4)], frozen)


def fail_on(rank, schedule):
    model = make_model(2)
    mesh = Mesh.parse("pp2")
    pm = ParallelModule(model, mesh, HandCompiler(model, mesh, 4), schedule=schedule)
    pm.step(*make_batch())
    if td.get_rank() == rank:
        for parameter in pm.parameters():
            parameter.data = parameter.data[:2]
    pm.step(*make_batch())


@pytest.mark.large
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all(rank, schedule):
    start = time.monotonic()
    with pytest.raises(dist.RankError, match=f"rank {rank} failed"):
        dist.run_ranks(fail_on, 2, rank, schedule)
    assert time.monotonic() - start < 30


def use_own_device_mesh():
    """A mesh of the caller's; a step on top of gradients that are there; a program that reads nothing new."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    mesh = Mesh.parse(device_mesh)
    model = make_model(2)
    pm = ParallelModule(model, mesh, HandCompiler(model, mesh, 2), device_mesh=device_mesh)
    for parameter in pm.parameters():
        parameter.grad = torch.ones_like(parameter)
    pm.step(*make_batch())
    _, want = plain(2)
    assert_grads_near(pm.full_grads(), {name: grad + 1 for name, grad in want.items()})
    with pytest.raises(RuntimeSetupError, match="needs 2 processes, there are 4"):
        ParallelModule(model, Mesh.parse("tp2"), HandCompiler(model, mesh, 2), device_mesh=device_mesh)


def test_own_device_mesh():
    dist.run_ranks(use_own_device_mesh, 4)


def compile_bound_graph():
    """A bound graph is an ordinary module: it compiles and exports, gradients included."""
    mesh = Mesh.parse("tp2")
    model = make_model(1)
    program = make_program(model, mesh)
    coordinates = {"tp": td.get_rank()}
    tensors = shard_parameters(model, program, coordinates)
    bound = bind(program.stages[0].graph, {"tp": td.group.WORLD}, coordinates, torch.device("cpu"), tensors)
    assert bound.get_parameter("blocks.0.up.weight") is tensors["blocks.0.up.weight"]
    x, target = make_batch()
    arguments = {"x": x, "target": target, "count": torch.tensor(float(target.numel()))}
    _, want = plain(1)
    compiled = torch.compile(bound, backend="aot_eager", fullgraph=True)
    (loss,) = compiled(**arguments)
    loss.backward()
    assert_near(tensors["blocks.0.down.bias"].grad, want["blocks.0.down.bias"])
    assert_near(tensors["blocks.0.up.weight"].grad, want["blocks.0.up.weight"].chunk(2)[td.get_rank()])
    exported = torch.export.export(bound, (), arguments)
    names = {str(node.target) for node in exported.graph.nodes}
    assert {"autopart.sum_grad.default", "autopart.all_reduce.default"} <= names
    assert_near(exported.module()(**arguments)[0], loss)


@pytest.mark.large
def test_bound_graph_compiles_and_exports():
    dist.run_ranks(compile_bound_graph, 2, timeout_s=120)


@pytest.mark.large
def test_no_pipeline():
    dist.run_ranks(run_module, 4, "dp2,tp2", 2, [(None, 1), (None, 4)])


def train_by_hand(mesh, microbatches):
    """The user's own loop: gradients are complete after backward, and accumulate over calls."""
    model = make_model(2)
    mesh = Mesh.parse(mesh)
    pm = ParallelModule(model, mesh, HandCompiler(model, mesh, microbatches))
    reference = make_model(2)
    for _ in range(2):
        for module in (reference, pm):
            output = module(*make_batch())
            (output["loss"] + output["y"].pow(2).mean()).backward()
    assert_grads_near(pm.full_grads(), {name: p.grad for name, p in reference.named_parameters()})
    assert pm.scale is pm.out_scale
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer.step()
    reference_optimizer.step()
    for name, value in pm.full_state_dict().items():
        assert_near(value, reference.state_dict()[name], name)
    return pm.graph().code


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp2,tp2", 1), ("dp2,tp2", 4), ("tp4", 1)])
def test_own_training_loop(mesh, microbatches):
    codes = dist.run_ranks(train_by_hand, 4, mesh, microbatches)
    assert len(set(codes)) == 1 and "'tp'" in codes[0]


def read_before_the_trace():
    model = make_model(2)
    mesh = Mesh.parse("tp2")
    pm = ParallelModule(model, mesh, HandCompiler(model, mesh, 1, traced=False))
    for read in (lambda: list(pm.parameters()), lambda: list(pm.buffers()), pm.state_dict, pm.full_grads, pm.graph):
        with pytest.raises(TraceError, match="example_kwargs"):
            read()
    pm.step(*make_batch())
    return sorted(name for name, _ in pm.named_parameters()), sorted(name for name, _ in pm.named_buffers())


def test_parameters_before_the_trace():
    for names, buffers in dist.run_ranks(read_before_the_trace, 2):
        assert names == sorted(name for name, _ in make_model(2).named_parameters())
        assert buffers == ["offset"]


def too_few_ranks():
    model = make_model(2)
    mesh = Mesh.parse("pp2,tp2")
    with pytest.raises(RuntimeSetupError) as error:
        ParallelModule(model, mesh, HandCompiler(model, mesh, 1))
    return str(error.value)


def test_wrong_world_size():
    (text, _) = dist.run_ranks(too_few_ranks, 2)
    assert text.splitlines()[0] == "mesh pp2,tp2 needs 4 processes, there are 2"


def test_no_torchrun():
    model = make_model(2)
    mesh = Mesh.parse("tp2")
    with pytest.raises(RuntimeSetupError, match="not started by torchrun"):
        ParallelModule(model, mesh, HandCompiler(model, mesh, 1))


def test_one_device_needs_no_process_group():
    model = make_model(2)
    mesh = Mesh.parse("tp1")
    pm = ParallelModule(model, mesh, HandCompiler(model, mesh, 2))
    result, grads = plain(2)
    assert_near(pm.step(*make_batch()), result["loss"])
    assert_grads_near(pm.full_grads(), grads)
    assert_near(pm(*make_batch())["y"], result["y"])


# --- Parts.


def make_schedule(schedule, pp, per_rank, microbatches):
    """The schedule as pipelining makes it, on stages that cannot run."""
    num_stages = pp * per_rank
    if schedule in V_SHAPED and per_rank != 2:
        raise ValueError("no V")
    stage_style = stage_style_of(schedule)
    here = [s for s in range(num_stages) if stage_coordinate(s, num_stages, pp, stage_style) == 0]
    stages = [
        types.SimpleNamespace(
            stage_index=s,
            num_stages=num_stages,
            group_size=pp,
            group_rank=0,
            is_first=s == 0,
            is_last=s == num_stages - 1,
            submod=nn.Identity(),
        )
        for s in here
    ]
    if schedule in MULTI_STAGE:
        return schedule_class(schedule)(stages, n_microbatches=microbatches, loss_fn=operator.add)
    if per_rank != 1:
        raise ValueError("one stage per rank")
    return schedule_class(schedule)(stages[0], n_microbatches=microbatches, loss_fn=operator.add)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_check_schedule_refuses_what_pipelining_refuses(schedule):
    for pp, per_rank, microbatches in itertools.product((2, 3, 4), (1, 2, 3), range(1, 10)):
        try:
            make_schedule(schedule, pp, per_rank, microbatches)
            possible = True
        except ValueError:
            possible = False
        try:
            check_schedule(schedule, pp * per_rank, pp, microbatches)
            allowed = True
        except StageError:
            allowed = False
        assert allowed == possible, (pp, per_rank, microbatches)


def test_what_check_schedule_proposes_is_possible():
    for schedule, microbatches in itertools.product(("1f1b", "dualpipev", "interleaved_1f1b"), range(1, 9)):
        num_stages = 3 if schedule == "1f1b" else 6
        try:
            check_schedule(schedule, num_stages, 3, microbatches)
        except StageError as error:
            proposed = int(str(error).split("microbatches=")[1])
            check_schedule(schedule, num_stages, 3, proposed)


def test_unknown_schedule():
    with pytest.raises(StageError, match="unknown schedule 'zb'"):
        check_schedule("zb", 2, 2, 2)
    with pytest.raises(StageError, match="the number of stages is not a multiple of pp=2"):
        check_schedule("gpipe", 5, 2, 2)


def test_buckets_hold_one_dtype_and_one_set_of_axes():
    program = make_program(make_model(2), Mesh.parse("dp2,tp2"))
    tensors = {name: torch.zeros(10) for name in program.parameters}
    tensors["blocks.1.up.bias"] = torch.zeros(10, dtype=torch.float64)
    buckets = axis_buckets(tensors, program, bucket_bytes=100)
    assert buckets[0] == AllReduceGroup(("blocks.0.gain", "blocks.1.gain"), ("dp", "tp"))
    assert AllReduceGroup(("blocks.1.up.bias",), ("dp",)) in buckets
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(program.parameters)
    assert all(len(bucket.names) <= 2 for bucket in buckets)


def test_meta_parameters_are_refused():
    with torch.device("meta"):
        model = Model(2)
    with pytest.raises(RuntimeSetupError, match="meta device"):
        shard_parameters(model, make_program(model, Mesh.parse("tp2")), {"tp": 0})

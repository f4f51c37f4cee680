"""`verify` can fail: each planted fault is found, and the first value that is wrong is named with its line of code."""

import inspect
import linecache
import operator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import zoo
from torch import nn
from traced import run_of

import autopart
from autopart.ir.facts import facts
from autopart.options import Options
from autopart.plans.pins import Pins

# --- Faults: each is planted in a program and its ranks' parameters, and planting it again changes nothing -----------


def nodes_of(program, name, key):
    """The nodes in all stages that call `autopart.<name>` and belong to the operator `key`."""
    for stage in program.stages:
        for node in stage.graph.graph.nodes:
            if str(node.target) == f"autopart.{name}.default" and facts(node).get("key") == key:
                yield stage, node


def bump(rank, name, index=0):
    """1e-3 more in one entry of one rank's shard."""

    def tamper(program, parameters):
        parameters[rank][name].data.view(-1)[index] += 1e-3

    return tamper


def leave_out(name, key):
    """A collective replaced by its input."""

    def tamper(program, parameters):
        for stage, node in list(nodes_of(program, name, key)):
            node.replace_all_uses_with(node.args[0])
            stage.graph.graph.erase_node(node)
            stage.graph.recompile()

    return tamper


def wrong_start(key):
    """Rank 1's shard begins one later than it should."""

    def tamper(program, parameters):
        for stage, node in nodes_of(program, "axis_index", key):
            (start,) = node.users
            assert start.target is operator.mul
            length = facts(start).setdefault("length", start.args[1])
            start.args = (node, length + 1)
            stage.graph.recompile()

    return tamper


def once(fault):
    """A fault that would undo itself if it were planted in the same program again."""
    done = []

    def tamper(program, parameters):
        if not any(program is other for other in done):
            done.append(program)
            fault(program)

    return tamper


def swap_graphs(first, second):
    def fault(program):
        a, b = program.stages[first], program.stages[second]
        graphs = a.graph, b.graph
        object.__setattr__(a, "graph", graphs[1])
        object.__setattr__(b, "graph", graphs[0])

    return once(fault)


def swap_sends(stage):
    """The first two values that a stage sends, in the wrong order."""

    def fault(program):
        graph = program.stages[stage].graph
        output = graph.graph.output_node()
        a, b, *rest = output.args[0]
        output.args = ((b, a, *rest),)
        graph.recompile()

    return once(fault)


def whole_batch(name):
    """Every rank and microbatch is given the first rows of the batch."""

    def fault(program):
        for stage in program.stages:
            for node in stage.graph.graph.nodes:
                if node.op == "placeholder" and facts(node).get("origin") == name:
                    rows = node.meta["val"].shape[0]
                    (entry,) = [i for i in stage.inputs if i.name == node.target]
                    object.__setattr__(entry, "batch_dim", None)
                    with stage.graph.graph.inserting_after(node):
                        cut = stage.graph.graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, 0, rows))
                    node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
                    cut.meta, node.meta = node.meta, {}
            stage.graph.recompile()

    return once(fault)


def unsynchronised(name):
    """One parameter's gradient is not summed over the ranks."""

    def tamper(program, parameters):
        object.__setattr__(program.parameters[name], "grad_axes", ())

    return tamper


def break_shape(key):
    """An operator that cannot run."""

    def tamper(program, parameters):
        for stage in program.stages:
            for node in stage.graph.graph.nodes:
                if facts(node).get("key") == key and node.target is torch.ops.aten.linear.default:
                    node.args = (node.args[0], node.args[0], *node.args[2:])
            stage.graph.recompile()

    return tamper


def only_in_calls(fault):
    """In the program of a call, not in that of a training step."""

    def tamper(program, parameters):
        if len(program.outputs) > 1:
            fault(program, parameters)

    return tamper


# --- What each must be found as --------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Four layers of one size, and no loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return x


def chain():
    torch.manual_seed(0)
    return Chain().double(), {"x": torch.randn(8, 16, dtype=torch.float64)}


class Fault(NamedTuple):
    """`name`: a part of the value's name; `line`: a part of the line of code that made it."""

    builder: object
    mesh: str
    tamper: object
    kind: str
    name: str
    module: str
    line: str
    options: tuple = ()


H1 = "transformer.h.1"
EMBED = "self.wte(input_ids)"
CONV1D = "torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)"
FAULTS = {
    "an entry of a column-parallel weight": Fault(
        zoo.gpt2, "tp2", bump(1, f"{H1}.mlp.c_fc.weight", 5),
        "value", f"{H1}.mlp.c_fc.weight", f"{H1}.mlp.c_fc", CONV1D,
    ),
    "an entry of a whole weight, on one rank": Fault(
        zoo.llama, "tp4", bump(3, "model.layers.1.input_layernorm.weight"),
        "value", "model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm", "self.weight *",
    ),
    "an entry of one data-parallel copy": Fault(
        zoo.conv_net, "dp2", bump(1, "conv2.weight", 7), "value", "conv2.weight", "conv2", "self.conv2(x)",
    ),
    "an entry of a tied weight, in the head's stage": Fault(
        zoo.gpt2, "pp2", bump(1, "transformer.wte.weight", 70),
        "value", "transformer.wte.weight", "transformer.wte", EMBED,
    ),
    "an entry on one rank of many": Fault(
        zoo.bert, "dp2,pp2,tp2", bump(6, "bert.encoder.layer.1.output.dense.weight", 3),
        "value", "bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer.1.output.dense", "self.dense(",
    ),
    "no all-reduce after attention": Fault(
        zoo.gpt2, "tp2", leave_out("all_reduce", f"{H1}.attn.c_proj/linear"),
        "value", "add", f"{H1}.attn.c_proj", CONV1D,
    ),
    "no all-reduce after the MLP": Fault(
        zoo.llama, "pp2,tp2", leave_out("all_reduce", "model.layers.0.mlp.down_proj/linear"),
        "value", "add", "model.layers.0", "residual + hidden_states",
    ),
    "no all-reduce of the embedding": Fault(
        zoo.llama, "dp2,tp2", leave_out("all_reduce", "model.embed_tokens/embedding"),
        "value", "", "model.layers.0.input_layernorm", "x.pow(2)",
    ),
    "no sum of the gradient before attention": Fault(
        zoo.gpt2, "tp2", leave_out("sum_grad", f"{H1}.ln_1/layer_norm"),
        "gradient", "layer_norm", f"{H1}.ln_1", "self.ln_1(hidden_states",
    ),
    "no sum of the gradient before the MLP": Fault(
        zoo.llama, "dp2,pp2,tp2", leave_out("sum_grad", "model.layers.0.post_attention_layernorm/mul#1"),
        "gradient", "mul", "model.layers.0.post_attention_layernorm", "self.weight *",
    ),
    "stages that run each other's graphs": Fault(
        chain, "pp4", swap_graphs(1, 2), "value", "tanh_1", "", "torch.tanh(layer(x))",
        (("microbatches", 2), ("schedule", "gpipe")),
    ),
    "values received in each other's place": Fault(
        zoo.skip_mlp, "pp4", swap_sends(1), "value", "", "", "layer(seen[-1])",
    ),
    "a vocabulary shard that begins too late": Fault(
        zoo.gpt2, "tp2", wrong_start("transformer.wte/embedding"), "value", "embedding", "transformer.wte", EMBED,
    ),
    "a class shard that begins too late": Fault(
        zoo.llama, "tp4", wrong_start("/cross_entropy_loss"), "value", "cross_entropy", "", "self.loss_function(",
    ),
    "the same rows on every rank": Fault(
        zoo.conv_net, "dp2", whole_batch("image"), "value", "image", "", "self.conv1(image)",
    ),
    "an operator that cannot run": Fault(
        zoo.bert, "tp2", break_shape("bert.encoder.layer.1.intermediate.dense/add"),
        "value", "", "bert.encoder.layer.1.intermediate.dense", "self.dense(hidden_states)",
    ),
    "a gradient that is not summed over ranks": Fault(
        zoo.gpt2, "dp2", unsynchronised(f"{H1}.ln_2.weight"),
        "gradient", f"{H1}.ln_2.weight", f"{H1}.ln_2", "self.ln_2(hidden_states",
    ),
    "a fault of calls alone": Fault(
        zoo.gpt2, "tp2", only_in_calls(leave_out("all_reduce", f"{H1}.mlp.c_proj/linear")),
        "value", "add", f"{H1}.mlp.c_proj", CONV1D,
    ),
    "no sum of the gradient, in a model without loss": Fault(
        chain, "tp2", leave_out("sum_grad", "/tanh#1"), "gradient", "tanh_1", "", "torch.tanh(layer(x))",
        options=(("pins", Pins.parse({f"{name}.weight": {"tp": "S(1)"} for name in "bd"})),),
    ),
}  # fmt: skip


def line_of(mismatch, model):
    """The text of the line that a mismatch names, in the file of that name that the model's code is in."""
    name, _, number = mismatch.source.partition(":")
    files = {inspect.getsourcefile(type(module)) for module in model.modules()} | {zoo.__file__, __file__}
    (file,) = [f for f in files if Path(f).name == name]
    return linecache.getline(file, int(number)).strip()


@pytest.mark.large
@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_found_and_named(case):
    fault = FAULTS[case]
    run, options = run_of(fault.builder), Options(rng="exact", **dict(fault.options))
    model = run.base
    assert run.check(run.arrange(fault.mesh, None, options)).ok
    found = run.check(run.arrange(fault.mesh, None, options, fault.tamper), shrink=True)
    assert not found.ok and found.max_error > 1e-6
    assert found.smallest is not None and len(found.smallest.operators) <= 2, str(found)
    first = found.first_mismatch
    assert first is not None, f"nothing is named\n{found}"
    print(first, line_of(first, model), sep="\n")
    assert (first.kind, first.module) == (fault.kind, fault.module), str(first)
    assert first.name.startswith(fault.name) and fault.line in line_of(first, model), str(first)
    assert first.error > 1e-6
    assert first.source in str(found) and first.name in str(found) and "WRONG" in str(found)


def test_only_gradients_differ_without_their_sum():
    model, batch = zoo.gpt2()
    tamper = leave_out("sum_grad", f"{H1}.ln_1/layer_norm")
    errors = autopart.verify(model, "tp2", example_kwargs=batch, tamper=tamper).errors
    wrong = {name for name, error in errors.items() if error > 1e-10}
    assert wrong and not {"loss", "output 0", "output 1"} & wrong
    assert all(name.startswith(("transformer.h.0", f"{H1}.ln_1", "transformer.w")) for name in wrong), wrong


@pytest.mark.few
@pytest.mark.parametrize("rank", range(4))
def test_any_rank_is_looked_at(rank):
    model, batch = zoo.skip_mlp()
    found = autopart.verify(model, "dp2,tp2", example_kwargs=batch, tamper=bump(rank, "layers.3.bias"))
    assert not found.ok and found.first_mismatch.name == "layers.3.bias"


@pytest.mark.large
def test_the_first_of_two_faults_is_named():
    model, batch = zoo.gpt2()
    late, early = bump(0, f"{H1}.mlp.c_proj.weight"), bump(1, "transformer.h.0.ln_2.bias")

    def tamper(program, parameters):
        late(program, parameters)
        early(program, parameters)

    found = autopart.verify(model, "tp2", example_kwargs=batch, tamper=tamper)
    assert found.first_mismatch.name == "transformer.h.0.ln_2.bias"
    assert found.first_mismatch.error == pytest.approx(1e-3, rel=10)


def test_tolerance_decides():
    model, batch = zoo.skip_mlp()

    def tamper(program, parameters):
        parameters[0]["layers.3.bias"].data[0] += 1e-7

    for tolerance, ok in ((1e-10, False), (1e-4, True)):
        found = autopart.verify(model, "dp2", example_kwargs=batch, tamper=tamper, tolerance=tolerance)
        assert found.ok is ok and 1e-10 < found.max_error < 1e-4


def test_the_user_s_model_is_left_alone():
    model, batch = zoo.gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    autopart.verify(model, "tp2", example_kwargs=batch, tamper=bump(0, f"{H1}.ln_1.bias"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and all(p.grad is None for p in model.parameters())


class WorksInFloat32(nn.Module):
    """As losses, norms and linear attention do: it casts down, and multiplies by what it makes in float32."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x):
        lower = torch.tril(torch.ones(4, 4, dtype=torch.float32)) + torch.eye(4, dtype=torch.float32)
        return (self.inner(x).float() @ lower).to(x.dtype)


def test_float32_made_from_nothing_is_lifted_with_what_it_meets():
    found = autopart.verify(WorksInFloat32(), "dp2", example_args=(torch.randn(8, 6),))
    assert found.ok and any("computed in float64" in note for note in found.notes), str(found)

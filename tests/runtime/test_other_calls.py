"""Calls other than the traced one: other lengths, numbers of rows, options, modes and losses, under the same plan."""

import copy
import gc
import warnings
import weakref
from unittest import mock

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from traced import plan_of, run_of, verified

import autopart
from autopart.errors import StageError
from autopart.ir.mesh import Mesh
from autopart.ir.program import StoredTensor
from autopart.ir.run.schedules import SCHEDULES, SINGLE_STAGE, Schedule, can_run, schedule_for
from autopart.options import Options
from autopart.passes.choose.plan_codec import decode
from autopart.passes.choose.solve.batch_axis import fit_batch
from autopart.passes.write.lower import lower
from autopart.recipe.compiler import Compiler
from autopart.recipe.make_plan import prepare
from autopart.runtime.lockstep import run_lockstep
from autopart.runtime.shards.shard_state import merge_stored, shard_parameters
from autopart.tracing.call_cache import MANY_CALLS, Recent, call_key
from autopart.tracing.trace_model import bind_call, flatten_call

BUILDERS = {"gpt2": zoo.gpt2, "llama": zoo.llama, "bert": zoo.bert, "t5": zoo.t5}
BUILDERS |= {"transformer_encoder": zoo.transformer_encoder}


def tokens(name, rows, seq):
    """A batch of a language model of the zoo with so many rows and tokens."""
    _, batch = BUILDERS[name](num_layers=1, rows=rows, seq=seq)
    return batch


def shaped(name, rows, seq):
    """A language model of the zoo, and a batch of this shape: the model's sizes are those of its own batch."""
    return BUILDERS[name]()[0], tokens(name, rows, seq)


# --- all ranks in one process --------------------------------------------------------------------------------------

SHAPES = [(8, 7), (16, 12), (6, 12), (5, 12), (1, 9), (3, 5), (2, 8)]


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "mesh"),
    [*(("gpt2", mesh) for mesh in ("dp2", "tp2", "pp2", "dp4,tp2")), *((name, "dp2,pp2,tp2") for name in BUILDERS)],
)
def test_a_plan_serves_other_shapes(name, mesh):
    plan = plan_of(run_of(BUILDERS[name]), mesh, microbatches=2)
    for rows, seq in SHAPES if mesh == "dp2,pp2,tp2" and name == "gpt2" else SHAPES[::3]:
        found = verified(run_of(shaped, name=name, rows=rows, seq=seq), mesh, plan)
        assert found.ok and found.max_error < 1e-12, f"{rows} x {seq}: {found}"


@pytest.mark.large
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_rows_runs(schedule):
    virtual = 1 if schedule in SINGLE_STAGE else 2
    model, batch = zoo.skip_mlp()
    plan = autopart.plan(model, "pp2", example_kwargs=batch, schedule=schedule, microbatches=4, virtual_stages=virtual)
    for rows in (1, 2, 3, 5, 7, 12):
        _, other = zoo.skip_mlp(rows=rows)
        assert autopart.verify(model, "pp2", plan=plan, example_kwargs=other).ok


def rows_of(rows, mesh, **schedule):
    """(microbatches, whether every rank of dp computes all rows) for a batch of so many rows."""
    from autopart.recipe.make_plan import prepare

    model, batch = zoo.skip_mlp(num_layers=2, rows=rows)
    found = fit_batch(prepare(model, batch), Mesh.parse(mesh), Schedule(**schedule))
    return found.microbatches, found.copied


@pytest.mark.few
@pytest.mark.parametrize(
    ("rows", "mesh", "schedule", "expected"),
    [
        (16, "dp2", {"microbatches": 4}, (4, False)),
        (6, "dp2", {"microbatches": 4}, (3, False)),  # fewer microbatches
        (5, "dp2", {"microbatches": 4}, (5, True)),  # on every rank of dp
        (2, "dp2", {"microbatches": 4}, (1, False)),
        (1, "dp2", {"microbatches": 1}, (1, True)),
        (4, "dp2,pp2", {"name": "1f1b", "microbatches": 4}, (2, False)),
        (2, "dp2,pp2", {"name": "1f1b", "microbatches": 4}, (1, False)),
        (7, "pp4", {"name": "1f1b", "microbatches": 4}, (7, False)),
        (3, "pp4", {"name": "1f1b", "microbatches": 4}, (3, False)),
        (9, "pp4", {"name": "interleaved_1f1b", "microbatches": 4, "virtual_stages": 2}, (3, False)),
    ],
)
def test_rows_are_cut_as_they_divide(rows, mesh, schedule, expected):
    assert rows_of(rows, mesh, **schedule) == expected


def test_a_simpler_schedule_places_stages_the_same_way():
    from autopart.runtime.comm.stage_ranks import stage_style_of

    for schedule in SCHEDULES:
        virtual = 1 if schedule in SINGLE_STAGE else 2
        other = schedule_for(schedule, 2 * virtual, 2, 1)
        assert can_run(other, 2 * virtual, 2, 1) and stage_style_of(other) == stage_style_of(schedule)


class Contrast(nn.Module):
    """In-batch contrastive loss: every row is compared with every other, so the batch cannot be cut in microbatches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        z = self.linear(x)
        return F.cross_entropy(z @ z.t(), torch.arange(x.shape[0], device=x.device))


@pytest.mark.large
def test_rows_that_belong_together_stay_together():
    model = Contrast().double()
    plan = autopart.plan(model, "dp2", example_kwargs={"x": torch.randn(8, 4).double()})
    for rows in (4, 6, 5):
        found = autopart.verify(model, "dp2", plan=plan, example_kwargs={"x": torch.randn(rows, 4).double()})
        assert found.ok and found.max_error < 1e-12


# --- on processes --------------------------------------------------------------------------------------------------

LOOP = [(8, 12), (8, 7), (4, 9), (8, 12), (5, 12), (8, 7), (1, 3)]


def train_on(name, mesh, shapes):
    """Training steps and calls on batches of these shapes, beside the plain model; what was traced and solved."""
    model, batch = BUILDERS[name](num_layers=1)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = torch.optim.AdamW(pm.parameters(), **options), torch.optim.AdamW(model.parameters(), **options)
    tensors = {name: id(p) for name, p in pm.named_parameters()}
    with (
        mock.patch("autopart.recipe.make_plan.trace", wraps=autopart.recipe.make_plan.trace) as traces,
        mock.patch("autopart.passes.choose.plan_codec.fit_around", side_effect=AssertionError("solved again")),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for rows, seq in shapes:
            batch = tokens(name, rows, seq)
            for optimizer in optimizers:
                optimizer.zero_grad()
            outputs = model(**batch, **zoo.no_cache(model))
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
            loss.backward()
            zoo.assert_close_outputs(pm.step(**batch), loss.detach(), where=f"loss of {rows} x {seq}")
            zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})
            zoo.assert_close_outputs(pm(**batch), outputs)
            for optimizer in optimizers:
                optimizer.step()
        traced = traces.call_count
    for name, value in model.state_dict().items():
        zoo.assert_close_outputs(pm.full_state_dict()[name], value, where=name)
    assert {name: id(p) for name, p in pm.named_parameters()} == tensors, "parameters were made anew"
    return traced


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "dp2"), ("bert", "tp2"), ("gpt2", "pp2"), ("bert", "pp2")])
def test_a_loop_over_batches_of_other_shapes(name, mesh):
    traced = dist.run_ranks(train_on, 2, name, mesh, LOOP, timeout_s=120.0)
    assert traced == [len(set(LOOP)) - 1] * 2  # the first was traced at construction


@pytest.mark.large
def test_a_loop_on_all_axes():
    dist.run_ranks(train_on, 4, "llama", "pp2,tp2", LOOP[:4], timeout_s=120.0)
    dist.run_ranks(train_on, 4, "gpt2", "dp2,pp2", LOOP[3:], timeout_s=120.0)


def own_loop(mesh):
    """`pm(**batch).loss.backward()` with the last batch of an epoch smaller."""
    model, batch = zoo.gpt2(num_layers=1)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, microbatches=4)
    for rows in (8, 5, 6):
        batch = tokens("gpt2", rows, 12)
        model.zero_grad()
        pm.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pm(**batch).loss.backward()
        said = [str(w.message) for w in caught if "does not divide over dp=2" in str(w.message)]
        assert bool(said) == (rows == 5), said
        zoo.assert_same_grads(pm.full_grads(), {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.large
def test_the_users_own_loop_with_a_smaller_last_batch():
    dist.run_ranks(own_loop, 2, "dp2", timeout_s=120.0)


def generate(mesh):
    """A sequence that grows token by token, in eval mode and without labels, after training steps."""
    model, batch = zoo.gpt2(num_layers=1)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    pm.step(**batch)
    model.eval()
    pm.eval()
    ids = batch["input_ids"][:2, :1]
    for _ in range(3):
        expected = model(input_ids=ids, use_cache=False)
        with (
            torch.no_grad(),
            mock.patch("autopart.passes.choose.plan_codec.fit_around", side_effect=AssertionError("solved again")),
        ):
            found = pm(input_ids=ids)
        zoo.assert_close_outputs(found, expected)
        ids = torch.cat([ids, found.logits[:, -1:].argmax(-1)], 1)
    assert ids.shape == (2, 4)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_a_growing_sequence(mesh):
    dist.run_ranks(generate, 2, mesh, timeout_s=120.0)


def options_and_inputs(mesh):
    """Other options and other inputs are other calls."""
    model, batch = zoo.bert(num_layers=1)
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    zoo.assert_close_outputs(pm(**batch), model(**batch))
    zoo.assert_close_outputs(pm(**batch, return_dict=False), model(**batch, return_dict=False))
    ids = {"input_ids": batch["input_ids"]}
    zoo.assert_close_outputs(pm(**ids), model(**ids))
    hidden = model(**ids, output_hidden_states=True)
    zoo.assert_close_outputs(pm(**ids, output_hidden_states=True), hidden)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_other_options_and_inputs(mesh):
    dist.run_ranks(options_and_inputs, 2, mesh, timeout_s=120.0)


# --- which calls are the same --------------------------------------------------------------------------------------


def key(loss_fn=None, training=True, **arguments):
    return call_key(arguments, flatten_call(arguments), training, loss_fn)


X = torch.ones(2, 3)


def test_a_call_is_known_by_shape_dtype_mode_and_options():
    assert key(x=X) == key(x=X + 1)
    others = [
        key(x=torch.ones(3, 3)), key(x=X.double()), key(x=X, training=False), key(y=X), key(x=X, y=X),
        key(x=X, flag=True), key(x=X, flag=1), key(x=X, flag=1.0), key(x=X, flag=None), key(x=X, flag=()),
        key(x=[X]), key(x=X.clone().requires_grad_()), key(F.mse_loss, x=X),
    ]  # fmt: skip
    assert len({key(x=X), *others}) == 1 + len(others)


def test_a_lambda_made_anew_is_the_same_loss():
    def losses(weight, table=None):
        return lambda out, target, scale=2.0: weight * scale * F.mse_loss(out, target) + (0 if table is None else table)

    assert key(losses(1.0)) == key(losses(1.0))
    assert key(losses(1.0)) != key(losses(2.0)) != key(losses(2))
    table = torch.ones(())
    assert key(losses(1.0, table)) == key(losses(1.0, table)) != key(losses(1.0, table.clone()))
    assert key(lambda out, target: out.sum()) != key(lambda out, target: out.sum() * 2)
    module = nn.MSELoss()
    assert key(module) == key(module) != key(nn.MSELoss())


@pytest.mark.large
def test_a_loss_is_traced_once_for_every_closure():
    def loss(scale):
        return lambda out, target: scale * (out - target).sum()

    compiler = Compiler(nn.Linear(3, 3), Mesh.parse("tp1"), Options())
    for scale in (1.0, 2.0, 1.0, 2.0):
        compiler.program((X,), {}, purpose="step", training=True, loss_fn=loss(scale), target=X)
    assert compiler._num_traces == 2


@pytest.mark.large
def test_only_the_calls_used_last_are_kept():
    model = nn.Linear(3, 3)
    compiler = Compiler(model, Mesh.parse("tp1"), Options())

    def call(rows):
        return compiler.program((torch.ones(rows, 3),), {}, purpose="forward", training=True)[0]

    with mock.patch.object(compiler, "_traced", Recent(2)):
        first, second = call(2), call(3)
        assert call(2) is first
        gone = weakref.ref(second)
        del second
        call(4)
        gc.collect()
        assert gone() is None, "a dropped program is kept alive"
        assert call(2) is first and compiler._num_traces == 3


def test_a_later_call_does_not_walk_the_model():
    """A model may have thousands of modules, and a GPU waits meanwhile."""
    model, batch = zoo.gpt2()
    pm = autopart.parallelize(model, "dp1", example_kwargs=batch)
    pm.step(**batch)
    with mock.patch.object(
        nn.Module, "named_modules", autospec=True, side_effect=nn.Module.named_modules
    ) as liveness_of:
        pm.step(**batch)
    assert not any(call.args[0] is model for call in liveness_of.call_args_list)


def test_a_forward_that_is_replaced_is_called_as_it_is_now():
    """Its signature is read once for each."""

    class Scales(nn.Linear):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    model = Scales(3, 3).double()
    pm = autopart.parallelize(model, "dp1", example_args=(X.double(),))
    torch.testing.assert_close(pm(X.double()), model(X.double()))
    model.forward = lambda values: nn.Linear.forward(model, values) * 3
    torch.testing.assert_close(pm(values=X.double() + 1), model(X.double() + 1))
    with pytest.raises(autopart.AutopartError, match="its inputs are values"):
        pm(x=X.double())


def test_weights_have_names_that_are_free():
    """Dotted ones are found under one name in a stage's graph."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight_0 = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.inner(x) * self.weight_0

    model = Named().double()
    pm = autopart.parallelize(model, "dp1", example_args=(X.double(),))
    torch.testing.assert_close(pm(X.double()), model(X.double()), rtol=1e-12, atol=0)


@pytest.mark.large
def test_many_calls_are_warned_of_once():
    compiler = Compiler(nn.Linear(3, 3), Mesh.parse("tp1"), Options())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dims in range(1, MANY_CALLS + 3):  # another number of dims is never derived
            compiler.program((torch.ones(*[1] * dims, 3),), {}, purpose="forward", training=True)
    assert [str(w.message).startswith(f"autopart has traced {MANY_CALLS} calls") for w in caught] == [True]


def test_a_parameter_needed_where_it_is_not_is_an_error():
    known = {"w": StoredTensor("w", (2,), {}, (0, 1), ())}
    assert merge_stored({"w": StoredTensor("w", (2,), {}, (1,), ())}, known) == known
    with pytest.raises(StageError, match="on stage 2, which does not hold it"):
        merge_stored({"w": StoredTensor("w", (2,), {}, (0, 2), ())}, known)


@pytest.mark.large
def test_ids_beyond_a_cut_table_fail_as_in_the_whole_one():
    """And not as rows of zeros: token 64 of a vocabulary of 64."""
    model, batch = zoo.gpt2(num_layers=1)
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    assert plan.parameters["transformer.wpe.weight"]["tp"] == "S(0)"
    traced = prepare(model, bind_call(model, (), {"input_ids": torch.full((8, 12), 5)}))
    program = lower(traced, decode(traced, plan, Mesh.parse("tp2")), list(traced.graph.output_node().args[0]), True)
    local = {rank: shard_parameters(model, program, program.mesh.coordinates(rank)) for rank in range(2)}
    with pytest.raises(IndexError):
        run_lockstep(program, local, dict(model.named_buffers()), [torch.full((8, 12), 64)])

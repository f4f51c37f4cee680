"""Attention that drops weights is one operator under rng="fast": what it computes, draws and keeps, and where it is."""

import math

import pytest
import torch
import zoo
from compilers import counted
from held import Recorder, storages
from random_models import with_dropout

import autopart
from autopart.cost.count.saved_tensors import EFFECT_CACHE, TensorSpec
from autopart.ir.facts import facts
from autopart.ir.graph import argument, short_name
from autopart.ir.mesh import Mesh
from autopart.ops import attention_dropout
from autopart.ops.operators import autopart_ops
from autopart.ops.seeded_random import DropoutMasks, dropout_mask
from autopart.options import Options
from autopart.passes.write import stage_draft
from autopart.recipe.compiler import Compiler
from autopart.runtime.lockstep import run_lockstep
from autopart.runtime.shards.shard_state import shard_parameters

ROWS, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 5, 7, 8
P, SALT, SHARD = 0.3, 11, [1, 2]
SEED = torch.tensor([3])


def operands(dtype=torch.float64, heads=HEADS, queries=QUERIES, keys=KEYS):
    torch.manual_seed(0)
    sizes = (ROWS, HEADS, queries, WIDTH), (ROWS, heads, keys, WIDTH), (ROWS, heads, keys, WIDTH + 1)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def some_seen(rows=ROWS, heads=1):
    """A mask in which every query sees the first key."""
    mask = torch.rand(rows, heads, QUERIES, KEYS) < 0.6
    mask[..., 0] = True
    return mask


MASKS = {
    "none": lambda: None,
    "bool": some_seen,
    "bool of all rows": lambda: some_seen(1)[0, 0],
    "float": lambda: torch.randn(ROWS, 1, QUERIES, KEYS, dtype=torch.float64),
    "trained": lambda: torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64, requires_grad=True),
    "hides by -inf": lambda: torch.zeros(some_seen().shape, dtype=torch.float64).masked_fill(~some_seen(), -math.inf),
}


def formula(query, key, value, mask, p, seed, salt, shard, is_causal=False, scale=None, enable_gqa=False):
    """As `explicit_attention_dropout` writes it; a query that sees nothing gives zeros, as torch's attention does."""
    if enable_gqa:
        key, value = (x.repeat_interleave(HEADS // x.size(1), 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale or query.size(-1) ** -0.5)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.where(hidden, 0.0, weights)
    return autopart_ops.dropout(weights, p, seed, salt, shard) @ value


def results(function, tensors, *others, **options):
    """The output, and the gradients of all that have one."""
    output = function(*tensors, *others, **options)
    weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype).view(output.shape)
    read = [t for t in (*tensors, *others) if isinstance(t, torch.Tensor) and t.requires_grad]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), read)]


def assert_same(found, expected, atol=1e-10):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=atol, rtol=0)


# --- the operator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [HEADS, 2, 1])
@pytest.mark.parametrize("p", [0.0, P, 1.0])
def test_is_the_formula(mask, heads, p):
    tensors, made = operands(heads=heads), MASKS[mask]()
    for scale in (None, 0.7):
        call = (made, p, SEED, SALT, SHARD, False, scale, heads < HEADS)
        assert_same(results(autopart_ops.attention_dropout, tensors, *call), results(formula, tensors, *call))


@pytest.mark.parametrize("mask", ["none", "float", "trained"])
@pytest.mark.parametrize("heads", [HEADS, 2])
def test_a_kernel_that_a_compiler_does_not_see_has_its_own_gradients(mask, heads, monkeypatch):
    """As on a GPU: the opaque operator's backward records the kernel's forward, and goes back through that."""
    monkeypatch.setattr(attention_dropout, "_has_kernel", lambda query, dropout_p: dropout_p < 1)
    tensors, made = operands(heads=heads), MASKS[mask]()
    call = (made, P, SEED, SALT, SHARD, False, None, heads < HEADS)

    def opaque(*call):
        return autopart_ops.attention_dropout_forward(*call)[0]

    assert_same(results(opaque, tensors, *call), results(autopart_ops.attention_dropout, tensors, *call))
    key = torch._C.DispatchKey.AutogradFunctionality
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


@pytest.mark.parametrize("keys", [QUERIES, KEYS])
def test_is_causal(keys):
    tensors, call = operands(keys=keys), (None, P, SEED, SALT, SHARD, True)
    assert_same(results(autopart_ops.attention_dropout, tensors, *call), results(formula, tensors, *call))


@pytest.mark.parametrize("mask", ["none", "trained", "causal"])
def test_samples_are_those_of_the_formula(mask):
    made = MASKS["trained"]() if mask == "trained" else None
    tensors, call = operands(), (made, P, SEED, SALT, SHARD, mask == "causal")
    assert_same(results(autopart_ops.attention_dropout, tensors, *call), results(formula, tensors, *call))


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_mask_drawn_in_parts_is_that_of_the_whole(size):
    """Parts of an odd number of elements, too: random numbers are drawn two at a time."""
    expected = dropout_mask(torch.empty(5, 9), P, SEED, SALT, SHARD)
    masks, drawn = DropoutMasks(P, SEED, SALT, SHARD), torch.empty(45, dtype=torch.bool)
    for part in drawn.split(size):
        masks.draw(part)
    assert torch.equal(drawn, expected.flatten())


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_rank_without_rows_runs_it_too(is_causal):
    tensors = [t.detach()[:0].requires_grad_() for t in operands()]
    call = (None if is_causal else some_seen(rows=0), P, SEED, SALT, SHARD, is_causal)
    assert_same(
        results(autopart_ops.attention_dropout, tensors, *call),
        [torch.empty(0, HEADS, QUERIES, WIDTH + 1).double(), *tensors],
    )


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_query_that_sees_no_key_gives_zeros(form):
    mask, tensors = some_seen(), operands()
    mask[0, :, 2] = False
    made = mask if form == "bool" else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    call = (made, P, SEED, SALT, SHARD)
    found = results(autopart_ops.attention_dropout, tensors, *call)
    assert all(one.isfinite().all() for one in found)
    assert not found[0][0, :, 2].any() and not found[1][0, :, 2].any() and found[0][0, :, 1].any()
    plain = torch.nn.functional.scaled_dot_product_attention(*tensors, made)
    assert_same([autopart_ops.attention_dropout(*tensors, made, 0.0, *call[2:])], [plain])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_dtypes(dtype):
    tensors, call = operands(dtype), (some_seen(), P, SEED, SALT, SHARD)
    found = results(autopart_ops.attention_dropout, tensors, *call)
    expected = results(formula, [t.detach().double().requires_grad_() for t in tensors], *call)
    assert {one.dtype for one in found} == {dtype}
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max()


def weights_kept(seed=SEED, salt=SALT, shard=SHARD, keys=64):
    """Which weights are kept: values are the rows of the identity, and all scores are 0."""
    query, key = torch.zeros(2, 3, 64, 4), torch.zeros(2, 3, keys, 4)
    value = torch.eye(keys).expand(2, 3, keys, keys).contiguous()
    output = autopart_ops.attention_dropout(query, key, value, None, P, seed, salt, shard)
    assert set(output.unique().tolist()) <= {0.0, *(1 / keys * torch.tensor([1 / (1 - P)])).tolist()}
    return output != 0


def test_masks_are_those_of_seed_salt_and_shard():
    one, number = weights_kept(), 2 * 3 * 64 * 64
    assert torch.equal(one, weights_kept())
    assert abs(one.double().mean() - (1 - P)) < 4 * math.sqrt(P * (1 - P) / number)
    assert torch.equal(one, weights_kept(torch.tensor([3, SALT]), None))  # the salt beside the seed
    for other in (
        weights_kept(torch.tensor([4])),
        weights_kept(salt=12),
        weights_kept(shard=[1, 3]),
        weights_kept(shard=[]),
    ):
        both = torch.stack([one.double().flatten(), other.double().flatten()])
        assert abs(torch.corrcoef(both)[0, 1]) < 4 / math.sqrt(number)


def test_the_generator_is_left_as_it_was():
    before = torch.get_rng_state()
    torch.manual_seed(1)
    tensors, state = operands(), torch.get_rng_state()
    results(autopart_ops.attention_dropout, tensors, None, P, SEED, SALT, SHARD)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)


@pytest.mark.parametrize("heads", [HEADS, 2])
def test_keeps_what_the_fused_kernel_keeps(heads):
    """Operands, output and a number for every query; that is also what plans count, in the same order in memory."""
    tensors = operands(heads=heads)
    recorder = Recorder()
    with recorder:
        output = autopart_ops.attention_dropout(*tensors, None, P, SEED, SALT, SHARD, False, None, heads < HEADS)
    held = {address: size for address, size in storages(recorder.alive()).items() if address != SEED.data_ptr()}
    expected = storages([*tensors, output])
    assert {address for address in held if address in expected} == set(expected)
    assert sum(held.values()) - sum(expected.values()) == ROWS * HEADS * QUERIES * 8
    forms = [TensorSpec.of(t, True) for t in tensors]
    args = (*forms, None, P, TensorSpec.of(SEED), SALT, SHARD, False, None, heads < HEADS)
    effect = EFFECT_CACHE.effect(autopart_ops.attention_dropout.default, args, {})
    assert effect.kept == ((0, 1, 2, 3), (0,), ROWS * HEADS * QUERIES * 8)
    assert effect.forms[0].stride == output.stride() and output.transpose(1, 2).is_contiguous()
    assert effect.forward_bytes == output.numel() * 8 + ROWS * HEADS * QUERIES * 8


# --- models ----------------------------------------------------------------------------------------------------------


def compiled_with(model, batch, mesh, **options):
    compiler = Compiler(model, Mesh.parse(mesh), Options(**options))
    compiler.trace_example((), batch)
    compiler.reseed(1)
    return compiler


def program_of(model, batch, mesh, **options):
    compiler = compiled_with(model, batch, mesh, **options)
    return compiler.program((), batch, purpose="step", training=True)


def calls(program, name="attention_dropout"):
    return [n for s in program.stages for n in s.graph.graph.nodes if n.op == "call_function" and short_name(n) == name]


def gpt2():
    return with_dropout(*zoo.gpt2())


def bert():
    return with_dropout(*zoo.bert())


def grouped():
    """A Llama, whose heads of keys are shared, with dropout of attention."""
    model, batch = zoo.llama()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = P
    return model, batch


MESHES = ("dp1", "tp2", "dp2", "pp2", "cp2", "dp2,pp2,tp2")


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("build", [gpt2, bert, grouped])
def test_one_operator_a_layer(build, mesh):
    model, batch = build()
    layers = model.config.num_hidden_layers
    program, _ = program_of(model, batch, mesh)
    assert len(calls(program)) == layers
    assert not calls(program, "softmax")
    if build is not bert or mesh == "dp1":  # those around it draw as before
        assert bool(calls(program, "dropout")) == (build is not grouped)
    exact, _ = program_of(model, batch, mesh, rng="exact")
    assert not calls(exact) and len(calls(exact, "softmax")) == layers


def test_what_the_model_wrote_out_stays_so():
    model, batch = gpt2()
    model.config._attn_implementation = "eager"
    program, _ = program_of(model, batch, "tp2")
    assert not calls(program) and len(calls(program, "softmax")) == model.config.num_hidden_layers


def losses_and_gradients(build, mesh, **options):
    """Of a step in one process: every rank's loss, and its gradients."""
    model, batch = build()
    program, inputs = program_of(model, batch, mesh, **options)
    sizes = Mesh.parse(mesh)
    local = {rank: shard_parameters(model, program, sizes.coordinates(rank)) for rank in range(sizes.num_ranks)}
    outputs = run_lockstep(program, local, dict(model.named_buffers()), inputs)
    losses = [output[0] for microbatches in outputs.values() for output in microbatches]
    torch.autograd.backward([loss for loss in losses if loss.requires_grad])
    return [loss.detach() for loss in losses] + [
        parameter.grad for rank in local.values() for parameter in rank.values() if parameter.grad is not None
    ]


@pytest.fixture
def written_out(monkeypatch):
    """Leaves the formula as it is, once it is called."""

    def stays(graph):
        """Nothing is fused."""

    return lambda: monkeypatch.setattr(stage_draft, "fuse_attention_dropout", stays)


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("build", [gpt2, bert, grouped])
def test_a_step_is_that_of_the_formula(build, mesh, written_out):
    fused = losses_and_gradients(build, mesh)
    written_out()
    assert not calls(program_of(*build(), mesh)[0])
    assert_same(fused, losses_and_gradients(build, mesh))


@pytest.mark.few
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_draws_the_same(recompute):
    assert_same(losses_and_gradients(gpt2, "tp2", recompute=recompute), losses_and_gradients(gpt2, "tp2"))


def test_selective_recomputation_leaves_the_operator():
    """It keeps nothing between its products; the plan says so. Of the formula they are run again."""
    model, batch = gpt2()
    regions = {}
    for rng in ("fast", "exact"):
        program, _ = program_of(model, batch, "tp2", recompute="selective", rng=rng)
        regions[rng] = {facts(n)["region"] for s in program.stages for n in s.graph.graph.nodes if "region" in facts(n)}
    assert regions == {"fast": set(), "exact": {0, 1}}
    plan = autopart.plan(model, "tp2", example_kwargs=batch, recompute="selective")
    assert [note for note in plan.notes if "recompute" in note] == [
        "recompute='selective' changes nothing with rng='fast': attention is one operator (attention_dropout), which "
        "saves nothing between its products"
    ]


def test_seeds_and_layers_draw_apart():
    model, batch = gpt2()
    program, _ = program_of(model, batch, "tp2")
    salts = [argument(call, "salt") for call in calls(program)]
    assert len(set(salts)) == len(salts) > 1
    assert all(len(argument(call, "shard")) == 1 for call in calls(program))


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("build", [gpt2, bert])
def test_compiled_steps_are_the_same(build, options, monkeypatch):
    """A compiled step runs the same operator with the same masks. Its graphs: before the blocks, a block, and after."""
    counter = counted(monkeypatch)
    found = []
    for compiled in (False, True):
        model, batch = build()
        batch = batch | zoo.no_cache(model)
        torch.manual_seed(1)
        pm = autopart.parallelize(model, "dp1", example_kwargs=batch, compile=compiled, **options)
        losses = [pm.step(**batch).detach() for _ in range(2)]
        assert losses[0] != losses[1]
        found.append([*losses, *pm.full_grads().values()])
    torch._dynamo.reset()
    assert counter.frame_count == 3
    assert_same(*found, atol=1e-12)

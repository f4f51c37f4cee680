"""Plans in the formats of other tools: each tool runs with what is exported, and computes what the model computes."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
import zoo
from dist import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import autopart
from autopart.errors import AutopartError, LayoutError

LAYERS = {"stages": {"together": [["model.layers.*"]]}}
WITHIN = 1e-10


def llama(**sizes):
    return zoo.llama(**{"kv_heads": 4, "rows": 4, "seq": 6} | sizes)


def exported(to, mesh="tp2", build=llama, **options):
    model, batch = build()
    plan = autopart.plan(model, mesh, example_kwargs=batch, **options)
    return plan.export(to, model)


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def expected_of(model, batch):
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def compare(model, batch, logits, grads):
    """The largest error of outputs and gradients of a model that a tool has parallelized."""
    output = model(**batch)
    output.loss.backward()
    found = {name: full(p.grad) for name, p in model.named_parameters()}
    assert found.keys() == grads.keys()
    scale = max(float(g.abs().max()) for g in grads.values())
    worst = max(float((found[name] - grads[name]).abs().max()) / scale for name in grads)
    return max(relative(full(output.logits).detach(), logits), worst)


# --- parallelize_module --------------------------------------------------------------------------------------------


def with_parallelize_module(left_out=None):
    model, batch = llama()
    logits, grads = expected_of(copy.deepcopy(model), batch)
    plan = autopart.plan(model, "tp2", example_kwargs=batch).export("parallelize_module", model)
    plan.pop(left_out, None)
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return compare(model, batch, logits, grads), len([p for p in model.parameters() if isinstance(p, DTensor)])


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:the format gathers")
def test_parallelize_module_computes_the_same():
    for error, num_sharded in run_ranks(with_parallelize_module, 2):
        assert error < WITHIN
        assert num_sharded == 2 + 7 * 2


def test_without_a_line_it_does_not():
    """The check above can fail: a row-parallel module that is left out takes a shard for the whole."""
    with pytest.raises(Exception, match="rank"):
        run_ranks(with_parallelize_module, 2, "model.layers.*.mlp.down_proj")


# --- transformers --------------------------------------------------------------------------------------------------


def qwen3():
    """Norms of every head, whose weights are whole and whose inputs are shards."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).double()
    return model, zoo.causal_batch(4, 6, 64)


def saved_llama():
    return llama(exact=False)


def with_transformers(build, folder, plan):
    from transformers.distributed import DistributedConfig

    model, batch = build()
    logits, grads = expected_of(model, batch)
    config = DistributedConfig(tp_size=2, tp_plan=plan)
    parallel = type(model).from_pretrained(folder, distributed_config=config, dtype=torch.float64)
    parallel.train(model.training)
    sharded = [name for name, p in parallel.named_parameters() if isinstance(p, DTensor)]
    return compare(parallel, batch, logits, grads), sharded


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:the format gathers")
@pytest.mark.parametrize("build", [saved_llama, qwen3])
def test_transformers_computes_the_same(build, tmp_path):
    model, batch = build()
    plan = autopart.plan(model, "tp2", example_kwargs=batch).export("transformers", model)
    assert plan["model.embed_tokens"] == "embedding_rowwise" and plan["lm_head"] == "colwise_gather_output"
    assert plan.get("model.layers.*.self_attn.q_norm", "") == "replicated_with_grad_allreduce" * (build is qwen3)
    model.save_pretrained(tmp_path)
    for error, sharded in run_ranks(with_transformers, 2, build, str(tmp_path), plan, timeout_s=120):
        assert error < 1e-6  # the model's own loss and norms are in float32
        assert len(sharded) == 2 + 7 * 2


# --- pipelining ----------------------------------------------------------------------------------------------------


def first_of(output):
    """The loss or the logits of what a model, or the stages of one, return."""
    return output if isinstance(output, torch.Tensor) else output[0]


class Residual(nn.Module):
    """A model of one input, which is all that the first stage of `pipeline` takes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def residual():
    torch.manual_seed(0)
    return Residual(), {"x": torch.randn(8, 16, dtype=torch.float64)}


def run_pipeline_backward(spec):
    rank = torch.distributed.get_rank()
    model, batch = residual()
    target = torch.ones_like(batch["x"])
    names = [name for name, _ in model.named_parameters()]
    loss = nn.functional.mse_loss(model(**batch), target)
    expected = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    stage = pipeline(model, (batch["x"][:4],), split_spec=spec).build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, wanted: nn.functional.mse_loss(first_of(output), wanted))
    losses: list[torch.Tensor] = []
    schedule.step(batch["x"]) if rank == 0 else schedule.step(target=target, losses=losses)
    found = {name: p.grad for name, p in stage.submod.named_parameters()}
    assert rank == 0 or relative(sum(losses) / 2, loss) < WITHIN
    return max(relative(grad, expected[name]) for name, grad in found.items()), sorted({n.split(".")[1] for n in found})


def test_pipeline_computes_the_same_gradients():
    spec = exported("pipelining", "pp2", residual, pins={"stages": {"cut_before": ["layers.4"]}})
    assert spec == {"layers.4": SplitPoint.BEGINNING}
    (error, first), (other, second) = run_ranks(run_pipeline_backward, 2, spec)
    assert max(error, other) < WITHIN and (first, second) == (["0", "1", "2", "3"], ["4", "5"])


def run_pipeline(spec, with_microbatches=2):
    rank = torch.distributed.get_rank()
    model, batch = llama()
    model.config.use_cache, ids = False, batch["input_ids"]  # an output that holds a cache is not traced
    with torch.no_grad():  # `pipeline` loses the inputs of regions without gradients: rotary tables
        expected = model(ids).logits
        pipe = pipeline(model, (ids[: len(ids) // with_microbatches],), split_spec=spec)
        output = ScheduleGPipe(pipe.build_stage(rank, torch.device("cpu")), with_microbatches).step(
            *[ids] * (rank == 0)
        )
    own = [name for name, _ in pipe.get_stage_module(rank).named_parameters() if ".layers." in name]
    return (None if rank == 0 else relative(first_of(output), expected)), {name.split(".")[2] for name in own}


@pytest.mark.large
def test_pipeline_runs_on_two_ranks():
    (_, first), (error, second) = run_ranks(run_pipeline, 2, exported("pipelining", "pp2", pins=LAYERS))
    assert error < WITHIN and (first, second) == ({"0"}, {"1"})


# --- Megatron ------------------------------------------------------------------------------------------------------


def parsed(layout):
    """The stages of a layout string, by the grammar that Megatron-LM documents: E, t, m, L; `x*3`, `(x|)*3`, `|`, and
    commas that mean nothing. Its own checks: E first and L last, each once."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda m: m[1] * int(m[2]), text)
    stages = text.split("|")
    assert set("".join(stages)) <= set("EtmL")
    assert text[0] == "E" and text[-1] == "L" and text.count("E") == text.count("L") == 1
    return stages


def test_the_grammar_reads_the_documented_example():
    stages = parsed("Et*3|(tt|)*29,m|L")
    assert (len(stages), stages[0], stages[1], stages[-2:]) == (32, "Ettt", "tt", ["m", "L"])
    with pytest.raises(AssertionError):
        parsed("t*3|L")


@pytest.mark.few
@pytest.mark.parametrize("num_layers", [3, 5])
@pytest.mark.parametrize("mesh", ["pp1", "pp2", "pp3"])
def test_megatrons_layout_has_the_layers_of_every_stage(mesh, num_layers):
    model, batch = llama(num_layers=num_layers)
    plan = autopart.plan(model, mesh, example_kwargs=batch, pins=LAYERS if mesh != "pp1" else None)
    stages = parsed(plan.export("megatron"))
    layers = [
        {k for b in stage["blocks"] if "layers" in b for k in range(int(b["layers"][0]), int(b["layers"][-1]) + 1)}
        for stage in plan.stages
    ]
    assert [stage.count("t") for stage in stages] == [len(found) for found in layers]


def test_megatrons_layout_can_have_the_head_alone():
    pins = {"stages": {"cut_before": ["model.layers.0", "model.norm"]}}
    assert exported("megatron", "pp3", pins=pins) == "E|t*2|L"
    assert exported("megatron", "pp1") == "Et*2L"


# --- what a format cannot say --------------------------------------------------------------------------------------


CANNOT = {
    "a fused projection": (
        lambda: exported("transformers", build=zoo.phi3),
        "cannot express the layout S(0; sections=32+16+16) of 'model.layers.*.self_attn.qkv_proj.weight'\n  why    the "
        "format does not shard the sections of a fused projection separately",
    ),
    "another module": (lambda: exported("parallelize_module", build=zoo.gpt2), "it belongs to a Conv1D, and the "
    "format"),
    "a gather": (
        lambda: exported("transformers", pins={"model.layers.*.mlp.down_proj.weight": {"tp": "S(0)"}}),
        "cannot express the all_gather in model.layers.*.mlp",
    ),
    "unequal shards": (
        lambda: exported("parallelize_module", "tp4", lambda: llama(vocab=70)),
        "cannot express the layout S(0) of 'model.embed_tokens.weight'\n  why    70 is not a multiple of tp=4, and "
        "the format "
        "has no shards of unequal sizes",
    ),
    "a norm of every head": (
        lambda: exported("parallelize_module", build=qwen3),
        "cannot express model.layers.*.self_attn.q_norm on sharded values with a replicated weight",
    ),
    "one layer otherwise": (
        lambda: exported("transformers", pins={"model.layers.1.mlp": {"tp": "R"}}),
        "cannot express different layouts for modules of model.layers.*.mlp.gate_proj\n  why    "
        "model.layers.0.mlp.gate_proj is column, model.layers.1.mlp.gate_proj is whole",
    ),
    "a cut inside a module": (
        lambda: exported("pipelining", "pp2"),
        "cannot express that stage 1 begins with 'model.layers.1.self_attn/reshape'\n  why    it is inside a module, "
        "and in this format stages begin with modules\n  try    "
        "a plan with pins={'stages': {'together': [['model.layers.*']]}}",
    ),
    "a cut inside a layer": (
        lambda: exported("megatron", "pp2", pins={"stages": {"cut_before": ["model.layers.1.mlp"]}}),
        "cannot express that stage 1 begins with 'model.layers.1.mlp'\n  why    its stage boundaries "
        "are between layers",
    ),
    "edited cuts": (
        lambda: dataclasses.replace(
            autopart.plan(llama()[0], "pp2", example_kwargs=llama()[1]), cuts=("lm_head/linear",)
        ).export("pipelining"),
        "the stages of the plan do not match its 'cuts'\n  why    the cuts were edited",
    ),
    "stages in a V": (
        lambda: exported("megatron", "pp2", schedule="zbv", pins={"stages": {"together": [["model.layers.*.mlp"]]}}),
        "cannot express the schedule zbv",
    ),
    "two stacks": (
        lambda: exported("megatron", "pp2", zoo.t5), "why    the model has decoder.block.*, encoder.block.*",
    ),
    "no such format": (lambda: exported("onnx"), "there is no format 'onnx'\n  try    'transformers', 'parallelize_"),
    "no model": (
        lambda: autopart.plan(llama()[0], "tp2", example_kwargs=llama()[1]).export("transformers"),
        "export('transformers') needs the model",
    ),
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("case", CANNOT)
def test_what_a_format_cannot_say_is_told(case):
    use, text = CANNOT[case]
    with pytest.raises(AutopartError) as error:
        use()
    assert text in str(error.value)


# --- back as pins --------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:the format gathers")
@pytest.mark.parametrize("to", ["transformers", "parallelize_module", "pipelining"])
def test_what_is_exported_comes_back_as_pins(to):
    model, batch = llama()
    mesh = "pp2,tp2"
    odd = {"model.layers.*.self_attn": {"tp": "R"}, **LAYERS}
    whole = {"example_kwargs": batch, "sequence_parallel": False}
    plan = autopart.plan(model, mesh, **whole, pins=odd)
    pins = autopart.pins_from(plan.export(to, model), model)
    again = autopart.plan(model, mesh, **whole, pins=pins)
    if to == "pipelining":
        assert pins == {"stages": {"cut_before": [plan.cuts[0].rsplit(".", 1)[0]]}} and again.cuts == plan.cuts
        return
    wanted = {name: place for name, place in plan.parameters.items() if name in pins}
    assert wanted == pins == {name: again.parameters[name] for name in pins}
    assert ("model.layers.*.self_attn.q_proj.weight" in pins) == (to == "transformers")  # which says `replicate`
    assert autopart.verify(model, mesh, example_kwargs=batch, plan=again).ok


def test_transformers_own_plan_is_read():
    model, batch = llama()
    pins = autopart.pins_from(model.tp_plan, model)
    assert pins["model.layers.*.mlp.down_proj.weight"] == {"tp": "S(1)"} and pins["lm_head.weight"] == {"tp": "S(0)"}
    plan = autopart.plan(model, "tp2", example_kwargs=batch, pins=pins)
    assert {name: plan.parameters[name] for name in pins} == pins


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model.norm": "sequence_parallel"}, "the style 'sequence_parallel' of 'model.norm' cannot be read as a "
         "pin\n  why    it describes more than"),
        ({"model.norm": SequenceParallel()}, "the style SequenceParallel"),
        ({"model.layers.*.mlp": RowwiseParallel()}, "the style RowwiseParallel"),
        ({"model.layer.*.mlp.up_proj": ColwiseParallel()}, "'model.layer.*.mlp.up_proj' is not a module of the model"),
        ({"model.layers.0": SplitPoint.END}, "SplitPoint.END of 'model.layers.0' cannot be read as a pin\n  why    a "
         "pin names the"),
    ],
)  # fmt: skip
def test_styles_that_are_no_pins_are_told(given, text):
    with pytest.raises(AutopartError) as error:
        autopart.pins_from(given, llama()[0])
    assert text in str(error.value)


def test_rows_of_an_embedding_are_its_dim_0():
    given = {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    pins = autopart.pins_from(given, llama()[0])
    assert pins == {"model.embed_tokens.weight": {"tp": "S(0)"}, "lm_head.weight": {"tp": "S(0)"}}


@pytest.mark.few
@pytest.mark.parametrize("to", ["transformers", "parallelize_module", "pipelining", "megatron"])
def test_positions_are_in_no_format(to):
    model, batch = zoo.llama()
    with pytest.raises(
        LayoutError, match=f"the format '{to}' cannot express sharding over cp\n  why    it describes layouts"
    ):
        autopart.plan(model, "pp2,cp2", example_kwargs=batch).export(to, model)

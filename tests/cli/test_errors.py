"""Everything that a user can reach and that raises: the call, and the exact text it must give.

A text says what was asked, why it cannot be, where, and what to try. What needs ranks runs on two: every rank must
raise the same text, soon, and none may hang.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist import run_ranks
from hardware_errors import HARDWARE_CASES, no_profile
from pin_errors import PIN_CASES
from precision_errors import PRECISION_CASES
from rule_errors import RULE_CASES
from torch import Tensor, nn
from weight_errors import WEIGHT_CASES
from zero_errors import ZERO_CASES
from zoo import SkipMLP, gpt2, skip_mlp

import autopart
from autopart.errors import AutopartError

ROWS, SIZE = 8, 4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


class Contrast(nn.Module):
    """In-batch contrastive loss: every row is compared with every other."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return F.cross_entropy(z @ z.t(), torch.arange(ROWS))


class Counts(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return torch.poisson(x * self.weight).sum()


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.leak = nn.Linear(4, 4), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.leak(self.linear(x)).sum()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(2 * ROWS, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embedding(ids))


def linear() -> nn.Module:
    return nn.Linear(SIZE, SIZE)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return linear()


def batch_norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(SIZE))


def x(rows: int = ROWS) -> dict[str, Tensor]:
    return {"x": torch.ones(rows, SIZE)}


def input_(rows: int = ROWS) -> dict[str, Tensor]:
    return {"input": torch.ones(rows, SIZE)}


def plan(mesh: Any = "dp2", build: Callable[[], Any] = linear, batch: Any = None, **options: Any) -> Any:
    """A case: plan this model for this mesh."""
    needs_x = isinstance(build, type) and build.__module__ == __name__
    example = batch if batch is not None else x() if needs_x else input_()
    return lambda: autopart.plan(build(), mesh, example_kwargs=example, **options)


def skip(mesh: Any, **options: Any) -> Any:
    def case() -> Any:
        model, batch = skip_mlp()
        return autopart.plan(model, mesh, example_kwargs=batch, **options)

    return case


def called(use: Callable[[Any, dict], Any], build: Callable[[], Any] = skip_mlp, **options: Any) -> Any:
    """A case: use this model, parallelized over one rank; `example=False` leaves the trace to the first call."""

    def case() -> Any:
        built = build()
        model, batch = built if isinstance(built, tuple) else (built, input_())
        example = batch if options.get("example", True) else None
        return use(autopart.parallelize(model, "tp1", example_kwargs=example), batch)

    return case


def small_gpt2() -> tuple[nn.Module, dict]:
    return gpt2(num_layers=1, hidden=16, heads=2, vocab=16, rows=2, seq=4)


def plan_of_another(change: str) -> Any:
    def case() -> Any:
        model, batch = skip_mlp()
        made = autopart.plan(model, "tp1", example_kwargs=batch)
        if change == "mesh":
            return autopart.parallelize(model, "tp2", example_kwargs=batch, plan=made)
        model, batch = skip_mlp(num_layers=7)
        return autopart.parallelize(model, "tp1", example_kwargs=batch, plan=made)

    return case


def line_of(cls: type, text: str) -> str:
    """`file:number: text`: where the class says so."""
    lines, first = inspect.getsourcelines(cls)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + number}: {lines[number].strip()}"


def unknown_before_trace(asked: str) -> str:
    return (
        f"TraceError: {asked} is not available yet\n"
        "  why    the model is traced at the first call, and its parameters are partitioned then\n"
        "  try    parallelize(model, mesh, example_kwargs=batch), or call the module once before"
    )


def no_whole_number(name: str, given: Any) -> str:
    return (
        f"OptionError: {name}={given!r} is not a number of {name.replace('_', ' ')}\n"
        "  why    it must be an integer from 1"
    )


# --- the table -----------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # meshes
    "mesh: int": (lambda: autopart.Mesh.parse(4),
        "MeshError: mesh=4 gives a number of devices but no axes\n  why    only plan and parallelize choose the "
        "axes; this function needs their names\n  try    mesh='tp4', mesh={'dp': 4}, "
        "or the mesh of autopart.plan(model, 4, ...)"),
    "mesh: no devices": (plan(0),
        "OptionError: devices=0 is not a number of devices\n  why    it must be an integer from 1"),
    "mesh: bool": (plan(True),
        "MeshError: mesh=True is not a mesh\n  why    it is a bool\n  try    mesh={'dp': 2, 'tp': 2}"),
    "mesh: None": (plan(None),
        "MeshError: mesh=None is not a mesh\n  why    it is a NoneType\n  try    mesh={'dp': 2, 'tp': 2}"),
    "mesh: no size": (plan("tp"),
        "MeshError: mesh='tp' cannot be read\n  why    'tp' is not an axis name followed by a size\n  try    "
        "mesh='dp2,tp2'"),
    "mesh: twice": (plan("tp2,tp2"),
        "MeshError: mesh='tp2,tp2' names axis 'tp' twice\n  try    mesh='dp2,tp2'"),
    "mesh: unknown axis": (plan({"xp": 2}),
        "MeshError: unknown mesh axis 'xp'\n  why    the axes are pp, dpr, dp, cp, ep, tp\n  try    mesh={'dp': 2, "
        "'tp': 2}"),
    "mesh: size 0": (plan("tp0"),
        "MeshError: mesh axis 'tp' has size 0\n  why    a size is an integer from 1"),
    "mesh: text size": (plan({"tp": "2"}),
        "MeshError: mesh axis 'tp' has size '2'\n  why    a size is an integer from 1"),
    "mesh: cp": (plan("cp2"),
        "LayoutError: cp=2 has nothing to shard\n  why    no matrix product of the model has a sequence dim: its "
        "inputs are input "
        "[8, 4]\n  try    leave cp out of the mesh; dp shards any batch"),
    "mesh: ep": (plan("ep2"),
        "LayoutError: ep=2 has nothing to shard\n  why    the model has no experts: all tokens go through all of its "
        "matrix products\n  try    leave ep out of the mesh; dp shards any batch"),
    # what a mesh cannot split
    "tp: divides nothing": (skip("tp3"),
        "LayoutError: tp=3 divides no weight of the model\n  why    the weights of its matrix products have dims 32, "
        "64\n  where  linear at zoo.py:{skip_line} (layers.0)\n  try    tp=2, 4, 8, 16, 32"),
    "tp: nothing to split": (plan("tp2", Scale),
        "LayoutError: tp=2 has nothing to split\n  why    the model has no matrix product with a parameter, and no "
        "embedding table that can be sharded\n  try    leave tp out of the mesh; dp works for any model"),
    "tp: runs whole": (plan("tp2", lambda: nn.LSTM(4, 4)),
        "LayoutError: tp=2 divides no matrix product of the model\n  why    their sizes are divisible, but every "
        "rank runs lstm in full\n  where  lstm at rnn.py:{rnn_line}\n  try    leave tp out of the mesh; dp works for "
        "any "
        "model"),
    "pp: too many stages": (skip("pp64"),
        "StageError: the model cannot be split into 64 stages\n  why    it has 38 operators that depend on "
        "parameters, and 37 possible stage boundaries between them\n  try    pp=38 or less (pp times "
        "virtual_stages is the "
        "number of stages)"),
    "dp: batch": (skip("dp3"),
        "StageError: a batch of 8 samples cannot be split into dp=3 x microbatches=1 equal parts\n  why    8 is not a "
        "multiple of 3\n  try    a batch size that is a multiple of 3"),
    "dp: microbatches": (skip("dp2", microbatches=3),
        "StageError: a batch of 8 samples cannot be split into dp=2 x microbatches=3 equal parts\n  why    8 is not a "
        "multiple of 6\n  try    microbatches=1, 2, 4"),
    "microbatches: statistic": (plan("pp2", Contrast, microbatches=2),
        "StageError: the batch cannot be split into 2 microbatches\n  why    matmul needs all samples of a "
        "value of shape [4, 8] at once: it computes a statistic of the batch, and too much of the model depends on it "
        "to run once on all microbatches\n  where  matmul at test_errors.py:{contrast_line}\n  try    microbatches=1"),
    "microbatches: no pipeline": (plan("dp2", Contrast, microbatches=2),
        "StageError: the batch cannot be split into 2 microbatches\n  why    matmul needs all samples of a "
        "value of shape [4, 8] at once: it computes a statistic of the batch\n  where  matmul at "
        "test_errors.py:{contrast_line}\n  try    microbatches=1"),
    "nothing to partition": (plan("dp2", nn.ReLU),
        "LayoutError: the model has nothing to partition\n  why    none of its operators depends on a parameter\n  "
        "try    run it without parallelize"),
    # options
    "recompute": (plan(recompute="everything"), "OptionError: unknown recompute='everything'\n"
        "  try    recompute='none', 'selective' (the core of attention) or 'full' (every repeated block)"),
    "recompute: no word": (skip("dp2", recompute={"layers.0": "all"}), "OptionError: unknown recompute mode 'all' for "
        "'layers.0'\n"
        "  why    the modes are 'none', 'selective' (the core of attention) or 'full' (every repeated block)\n"
        "  try    recompute={'model.layers.[0-3]': 'full', '*': 'none'}"),
    "recompute: no block": (skip("dp2", recompute="layers.9=full"),
        "OptionError: recompute of 'layers.9' matches no block of the model\n"
        "  why    its blocks are layers.0 to layers.7"),
    "recompute: no blocks": (plan("dp2", recompute={"layers.9": "full"}),
        "OptionError: recompute of 'layers.9' matches no block of the model\n  why    it has no repeated blocks\n"
        "  try    'none', 'selective' or 'full' for the whole model"),
    **PRECISION_CASES,
    "memory: no size": (plan(memory="lots"),
        "OptionError: memory='lots' is not a size\n  try    memory='80GB', memory='24GiB', "
        "or an integer number of bytes"),
    "memory: nothing": (plan(memory=0),
        "OptionError: memory=0 is not a size\n  why    it is not above zero\n  try    memory='80GB', memory='24GiB', "
        "or an integer number of bytes"),
    "sequence_parallel": (plan(sequence_parallel="yes"),
        "OptionError: unknown sequence_parallel='yes'\n  try    True, False or 'auto'"),
    "unknown option": (plan(colour=1),
        "OptionError: unknown option colour=\n  try    one of lengths, schedule, microbatches, virtual_stages, "
        "sequence_parallel, context, sequence_dims, hardware, balance, pins, zero, prefetch, memory, recompute, "
        "dp_sync, optimizer, compile, precision, reduce_dtype, example_args, example_kwargs"),
    "option of another": (plan(timeout=5),
        "OptionError: unknown option timeout=\n  why    other functions take it, plan() does not\n  try    one of "
        "lengths, schedule, microbatches, virtual_stages, sequence_parallel, context, sequence_dims, hardware, "
        "balance, pins, zero, prefetch, memory, recompute, dp_sync, optimizer, compile, precision, reduce_dtype, "
        "example_args, example_kwargs"),
    "hardware": (plan(hardware="h900"),
        no_profile("h900")),
    "microbatches: 0": (plan(microbatches=0), no_whole_number("microbatches", 0)),
    "microbatches: -1": (plan(microbatches=-1), no_whole_number("microbatches", -1)),
    "microbatches: text": (plan(microbatches="2"), no_whole_number("microbatches", "2")),
    "virtual_stages: 0": (skip("pp2", virtual_stages=0), no_whole_number("virtual_stages", 0)),
    "schedule: unknown": (skip("pp2", schedule="fast"),
        "StageError: unknown schedule 'fast'\n  try    gpipe, 1f1b, 1f1b_2bw, interleaved_1f1b, "
        "interleaved_zero_bubble, zbv, dualpipev, looped_bfs"),
    "schedule: without pp": (skip("dp2", schedule="gpipe"),
        "OptionError: schedule='gpipe' needs a pipeline\n  why    the mesh dp2 has no axis pp\n  try    mesh='pp2', "
        "or leave schedule out"),
    "schedule: microbatches": (skip("pp2", schedule="1f1b_2bw", microbatches=1),
        "StageError: schedule='1f1b_2bw' cannot run 2 stages on pp=2 with 1 microbatches\n  why    this schedule needs "
        "at least 2 microbatches\n  try    microbatches=2"),
    "schedule: one stage each": (skip("pp2", schedule="gpipe", virtual_stages=2),
        "StageError: schedule='gpipe' cannot run 4 stages on pp=2 with 8 microbatches\n  why    this schedule runs "
        "one stage per rank, not 2\n  try    virtual_stages=1"),
    "schedule: two stages each": (skip("pp2", schedule="zbv", virtual_stages=1),
        "StageError: schedule='zbv' cannot run 2 stages on pp=2 with 8 microbatches\n  why    this schedule runs two "
        "stages per rank, not 1\n  try    virtual_stages=2"),
    # models
    "no module": (plan("dp2", lambda: print),
        "TraceError: a builtin_function_or_method is not a model\n  why    autopart partitions an nn.Module\n  try    "
        "an nn.Module whose forward calls it"),
    "batch norm: microbatches": (plan("pp2", batch_norm, microbatches=2, schedule="1f1b"),
        "StageError: the batch cannot be split into 2 microbatches\n  why    batch_norm needs all samples of a "
        "value of shape [1, 4] at once: it computes a statistic of the batch. Operators that mix samples run once on "
        "all microbatches, but not with schedule='1f1b'\n  where  batch_norm at batchnorm.py:{batch_norm_line} (1)\n"
        "  try    schedule='gpipe', or microbatches=1"),
    "random numbers": (plan("dp2", Counts),
        "TraceError: poisson draws random numbers whose distribution the model computes\n  why    all ranks must "
        "draw equal numbers, and no formula computes them from numbers of a fixed distribution\n  where  poisson at "
        "test_errors.py:{counts_line}\n  try    draw them outside the model and pass them in"),
    "exact random numbers": (lambda: autopart.verify(Leaky(), "dp2", example_kwargs=x()),
        "OptionError: rng='exact' cannot reproduce the random numbers of a single device\n  why    torch draws "
        "slopes only for inputs that are not positive, so the number of draws depends on the values\n  "
        "where  uniform at test_errors.py:{leaky_line} (leak)\n  try    rng='fast'"),
    "local_batch": (lambda: autopart.parallelize(linear(), "tp1", local_batch="mine"),
        "OptionError: unknown local_batch='mine'\n  try    True (each data rank passes its own samples) or False"),
    "local_batch: search": (lambda: autopart.parallelize(linear(), 2, example_kwargs=input_(), local_batch=True),
        "OptionError: local_batch=True cannot be combined with mesh=2\n  why    the search chooses over how many "
        "ranks the batch is "
        "split\n"
        "  try    name the axes, for example mesh='dp2,tp4'"),
    "unknown random numbers": (lambda: autopart.parallelize(linear(), "tp1", rng="slow"),
        "OptionError: unknown rng='slow'\n  try    rng='fast', or rng='exact'"),
    "no example": (lambda: autopart.plan(linear(), "dp2"),
        "InputError: plan() needs an example call\n  why    the model is traced on it\n  try    plan(model, mesh, "
        "example_kwargs={'input_ids': ids, 'labels': labels})"),
    "other names": (plan(batch={"z": torch.ones(2)}),
        "InputError: Linear cannot be called with z\n  why    missing a required argument: 'input'\n  try    its "
        "inputs are input"),
    "meta": (lambda: autopart.parallelize(on_meta(), "tp1", example_kwargs=input_()),
        "RuntimeSetupError: parameter 'weight' has no values to run with\n  why    it is on the meta device\n  try   "
        " weights='folder' of safetensors or weights='init', or load the model's weights first"),
    "verify: meta": (lambda: autopart.verify(on_meta(), "tp2", example_kwargs=input_(), scaled=False),
        "RuntimeSetupError: parameter 'weight' has no values to run with\n  why    it is on the meta device\n  try   "
        " load the model's weights first; plan() needs none, verify() does"),
    "verify: scaled": (lambda: autopart.verify(linear(), "tp2", example_kwargs=input_(), scaled="yes"),
        "OptionError: scaled='yes' is not a choice\n  try    True, False or \"auto\""),
    "verify: memory": (lambda: autopart.verify(linear(), "tp2", example_kwargs=input_(), memory=480),
        "MemoryLimitError: the plan needs 568 B on a rank, and memory is 480 B\n"
        "  why    temporary values 320 B, inputs 128 B, optimizer state 80 B, parameters 40 B, gradients 40 B\n"
        "  where  stage 0 of tp2; the largest: optimizer state of weight 64 B, parameter weight 32 B, gradient of "
        "weight 32 B, optimizer state of bias 16 B\n"
        "  try    microbatches=8: 336 B, 232 B less\n         microbatches=4: 368 B, 200 B less\n"
        "         microbatches=2: 448 B, 120 B less\n         mesh='pp2,tp2' (4 ranks): 376 B, 192 B less\n"
        "         mesh='dp2,tp2' (4 ranks): 408 B, 160 B less\n         mesh='tp4' (4 ranks): 476 B, 92 B less"),
    "verify: frozen": (lambda: autopart.verify(frozen(), "tp2", example_kwargs=input_()),
        "InputError: Linear has no parameter that needs a gradient\n  why    verify() compares gradients\n  try    "
        "call requires_grad_() on the parameters to train"),
    "verify: no example": (lambda: autopart.verify(linear(), "tp2"),
        "InputError: verify() needs an example call\n  try    verify(model, mesh, example_kwargs=batch)"),
    **RULE_CASES,
    **PIN_CASES,
    **ZERO_CASES,
    **WEIGHT_CASES,
    **HARDWARE_CASES,
    # plans
    "plan: mesh": (plan_of_another("mesh"),
        "PlanError: the plan is for the mesh tp1, not tp2\n  try    parallelize(model, 'tp1', plan=...), or make a "
        "plan for tp2"),
    "plan: model": (plan_of_another("model"),
        "PlanError: the plan is for another model than this SkipMLP\n  why    it is for SkipMLP with 10,528 "
        "parameters; this one has 9,472, or other names or shapes\n  try    make a new plan: autopart.plan(model, "
        "mesh, example_kwargs=...)"),
    "plan: path": (lambda: autopart.parallelize(linear(), "tp1", plan="nowhere.json"),
        "PlanError: there is no plan at nowhere.json\n  try    autopart plan ... --output plan.json writes one"),
    # calls
    "no process group": (lambda: autopart.parallelize(linear(), "tp2", example_kwargs=input_()),
        "RuntimeSetupError: mesh tp2 needs 2 processes, and torch.distributed is not initialised\n  why    this "
        "process was not started by torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set\n  try    torchrun "
        "--nproc-per-node 2 script.py, or call init_process_group first"),
    "call: names": (called(lambda pm, b: pm(x=b["x"])),
        "InputError: SkipMLP cannot be called with x\n  why    missing a required argument: 'y'\n  try    its inputs "
        "are x, y"),
    "step: no loss": (called(lambda pm, b: pm.step(**b), linear),
        "InputError: Linear returns no loss for this call\n  why    step() needs a scalar to differentiate\n  try    "
        "pass labels so that the model returns a loss, or step(..., loss_fn=f, target=t)"),
    "step: loss of every row": (
        called(lambda pm, b: pm.step(**b, loss_fn=lambda out, to: out - to, target=b["input"]), linear),
        "InputError: loss_fn returns f32[8,4]\n  why    step() needs a scalar to differentiate\n  try    return a "
        "mean or a sum from loss_fn"),
    "graph: no such stage": (called(lambda pm, b: pm.graph(3)),
        "StageError: there is no stage 3\n  why    the program has 1 stage\n  try    graph(0)"),
    "before: parameters": (called(lambda pm, b: list(pm.parameters()), example=False),
        unknown_before_trace("parameters()")),
    "before: buffers": (called(lambda pm, b: list(pm.buffers()), example=False), unknown_before_trace("buffers()")),
    "before: state_dict": (called(lambda pm, b: pm.state_dict(), example=False), unknown_before_trace("state_dict()")),
    "before: full_state_dict": (called(lambda pm, b: pm.full_state_dict(), example=False),
        unknown_before_trace("full_state_dict")),
    "before: full_grads": (called(lambda pm, b: pm.full_grads(), example=False), unknown_before_trace("full_grads")),
    "before: graph": (called(lambda pm, b: pm.graph(), example=False), unknown_before_trace("graph")),
    "before: plan": (called(lambda pm, b: pm.plan, example=False),
        "PlanError: there is no plan yet\n  why    the model is traced at the first call\n  try    "
        "parallelize(model, mesh, example_kwargs=batch)"),
}  # fmt: skip


def line_in(cls: type, text: str) -> str:
    return line_of(cls, text).split(": ")[0].rsplit(":", 1)[1]


def expected_text(text: str) -> str:
    from custom_ops import CustomModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
    from transformers.pytorch_utils import Conv1D

    lines = {
        "{skip_line}": line_in(SkipMLP, "torch.tanh(layer"), "{skip_head_line}": line_in(SkipMLP, "self.head("),
        "{counts_line}": line_in(Counts, "poisson"), "{rnn_line}": line_in(nn.LSTM, "result = _VF.lstm("),
        "{leaky_line}": line_in(Leaky, "self.leak("),
        "{batch_norm_line}": line_in(nn.modules.batchnorm._BatchNorm, "return F.batch_norm("),
        "{contrast_line}": line_in(Contrast, "z @ z.t()"), "{linear_line}": line_in(Contrast, "self.linear(x)"),
        "{custom_line}": line_in(CustomModel, "= scaled_mm("), "{llama_line}": line_in(LlamaMLP, "self.down_proj("),
        "{key_line}": line_in(LlamaAttention, "self.k_proj("), "{head_line}": line_in(GPT2LMHeadModel, "self.lm_head("),
        "{conv1d_line}": line_in(Conv1D, "torch.addmm("), "{norm_line}": line_in(GPT2Block, "self.ln_2("),
        "{begin_line}": line_in(GPT2Block, "self.ln_1("), "{gated_line}": line_in(LlamaMLP, "self.act_fn("),
    }  # fmt: skip
    for name, number in lines.items():
        text = text.replace(name, number)
    return text


def told(case: Callable[[], Any]) -> str:
    """`Class: text` of what a case raises."""
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("name", CASES)
def test_an_error_says_what_why_where_and_what_to_try(name, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    case, text = CASES[name]
    assert told(case) == expected_text(text)


# --- on two ranks --------------------------------------------------------------------------------------------------


def on_two_ranks(mesh: str, use: str) -> Any:
    """A case of `RANK_CASES`, by name: `use` is what goes wrong."""
    model, batch = skip_mlp()
    half = {name: value[:4] for name, value in batch.items()}
    if use == "world":
        return autopart.parallelize(model, "dp2,tp2", example_kwargs=batch)
    if use == "no values":
        return autopart.parallelize(model.to("meta"), mesh, example_kwargs=batch)
    if use == "statistic":
        return autopart.parallelize(Contrast(), mesh, example_kwargs=x(), microbatches=2)
    if use == "no loss":
        return autopart.parallelize(linear(), mesh, example_kwargs=input_()).step(**input_())
    if use == "batch":
        return autopart.parallelize(model, mesh, example_kwargs=batch, microbatches=3)
    if use == "divides nothing":
        return autopart.parallelize(Contrast(5), mesh, example_kwargs={"x": torch.ones(ROWS, 5)})
    if use == "values":
        ids = torch.arange(ROWS) + torch.distributed.get_rank()
        return autopart.parallelize(Tokens(), mesh)(ids=ids)
    if use == "unequal rows":
        rows = 4 + torch.distributed.get_rank()
        return autopart.parallelize(model, mesh, local_batch=True).step(**{n: v[:rows] for n, v in batch.items()})
    if use == "others' rows":
        ids = torch.arange(ROWS) + torch.distributed.get_rank()
        return autopart.parallelize(Tokens(), mesh, local_batch=True)(ids=ids)
    if use == "example":
        example = batch if torch.distributed.get_rank() == 0 else half
        return autopart.parallelize(model, mesh, example_kwargs=example)
    if use == "no_sync in parts":
        return autopart.parallelize(model, mesh, example_kwargs=batch, zero=3).no_sync()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch)
    if use == "not summed":
        with pm.no_sync():
            pm.step(**batch)
        return pm.clip_grad_norm_(1.0)
    if use == "hook":
        next(iter(pm.parameters())).register_post_accumulate_grad_hook(print)
        with pm.no_sync():
            return pm.step(**batch)
    if use == "norm":
        pm.step(**batch)
        return pm.clip_grad_norm_(float("nan"))
    first = torch.distributed.get_rank() == 0
    if use == "shapes":
        return pm.step(**(batch if first else half))
    if use == "modes":
        return pm.train(first)(**batch)
    if use == "purposes":
        return pm(**batch) if first else pm.step(**batch)
    if use == "names":
        return pm.step(x=batch["x"])
    raise AssertionError(use)


SAME_BATCH = "pass the same global batch on every rank; or parallelize(..., local_batch=True), and pass local samples"


def disagree(first: str, second: str, where: str) -> str:
    return (
        f"InputError: the ranks are called with different inputs\n  why    rank 0: {first}; rank 1: {second}\n"
        f"  where  {where}\n  try    {SAME_BATCH}"
    )


RANK_CASES = {
    ("dp2", "world"): "RuntimeSetupError: mesh dp2,tp2 needs 4 processes, there are 2\n  why    dp=2 x tp=2 = 4\n"
        "  try    torchrun --nproc-per-node 4 ..., or a mesh of 2 ranks",
    ("tp2", "no values"): "RuntimeSetupError: parameter 'layers.0.weight' has no values to run with\n  why    it is on "
        "the meta device\n  try    weights='folder' of safetensors or weights='init', or load the model's weights "
        "first",
    ("pp2", "statistic"): CASES["microbatches: statistic"][1],
    ("tp2", "no loss"): CASES["step: no loss"][1],
    ("dp2", "batch"): CASES["dp: microbatches"][1],
    ("tp2", "divides nothing"): "LayoutError: tp=2 divides no weight of the model\n  why    the weights of its matrix "
        "products have dims 5\n  where  linear at test_errors.py:{linear_line} (linear)\n  try    tp=5",
    ("dp2", "shapes"): disagree("step(x f64[8,32], y f64[8,32]) in train mode", "step(x f64[4,32], y f64[4,32]) in "
        "train mode", "step 1"),
    ("tp2", "values"): "InputError: the ranks are called with different values of ids\n  why    every rank must "
        "be passed the full global batch, of which it computes its shard\n  where  forward 1: rank 1 unlike rank 0\n"
        f"  try    {SAME_BATCH}",
    ("pp2", "modes"): disagree("forward(x f64[8,32], y f64[8,32]) in train mode", "forward(x f64[8,32], y f64[8,32]) "
        "in eval mode", "forward 1"),
    ("dp2", "purposes"): disagree("forward(x f64[8,32], y f64[8,32]) in train mode", "step(x f64[8,32], y f64[8,32]) "
        "in train mode", "forward 1"),
    ("tp2", "names"): CASES["call: names"][1],
    ("dp2", "unequal rows"): "InputError: the ranks are given different numbers of samples\n  why    rank 0: 4 "
        "samples; rank 1: 5 samples\n  where  step 1\n  try    DistributedSampler(..., drop_last=True) and "
        "DataLoader(..., drop_last=True)",
    ("tp2", "others' rows"): "InputError: the ranks are called with different values of ids\n  why    ranks with "
        "equal data_rank compute the same samples\n  where  forward 1: rank 1 unlike rank 0\n  try    "
        "DistributedSampler(data, num_replicas=pm.num_data_ranks, rank=pm.data_rank), and one seed on all ranks",
    **dict.fromkeys([("dp2", "example"), ("tp2", "example"), ("pp2", "example")],
        "RuntimeSetupError: the ranks differ in the example's inputs\n  why    the example's "
        "inputs: rank 0: x f64[8,32]; rank 1: x f64[4,32]\n  try    an example of the same shapes and dtypes on every "
        "rank"),
    ("dp2", "no_sync in parts"): "UsageError: no_sync() is not supported for sharded parameters (zero=)\n"
        "  why    'layers.0.weight' is sharded over dp: every backward reduce-scatters its gradient\n  try    "
        "microbatches=4 in one step of a batch that is four times as large; or zero=0",
    ("dp2", "not summed"): "UsageError: the norm of the gradients needs gradients that are reduced over the ranks\n"
        "  why    the current gradients were computed inside no_sync(), and each rank has a partial gradient\n  "
        "try    run the last call before the optimizer's step outside no_sync(): it reduces all of them",
    ("dp2", "norm"): "OptionError: max_norm=nan is not a norm to clip gradients to\n  why    it must be a number, "
        "0 or more\n  try    pm.clip_grad_norm_(1.0)",
    ("dp2", "hook"): "UsageError: the gradient hook of 'layers.0.weight' cannot run inside no_sync()\n  why    "
        "the hook would see this rank's partial gradient, not that of the whole batch\n  try    remove the hook, and "
        "change p.grad before optimizer.step()",
}  # fmt: skip


def told_in_time(mesh: str, use: str) -> tuple[str, float]:
    started = time.monotonic()
    return told(lambda: on_two_ranks(mesh, use)), time.monotonic() - started


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "use"), RANK_CASES, ids=lambda part: part)
def test_every_rank_raises_the_same_text(mesh, use):
    run_ranks(told_in_time, 2, "dp2", "world")  # imports what takes seconds the first time
    reports = run_ranks(told_in_time, 2, mesh, use)
    assert [text for text, _ in reports] == [expected_text(RANK_CASES[mesh, use])] * 2
    assert max(seconds for _, seconds in reports) < 5.0


def test_every_error_is_a_value_error():
    assert all(issubclass(cls, ValueError) for cls in (AutopartError, *AutopartError.__subclasses__()))

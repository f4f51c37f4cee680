"""What an expert would write by hand: counted in the generated graphs, at toy sizes and at real ones.

A block under tensor parallelism has two all-reduces forward and two backward, every projection is sharded, and the
vocabulary is cut for the embedding, the head and the loss. Values are whole between matrix products here; with sequence
parallelism: test_sequence_parallel.py, and in bytes test_block_bytes.py.
"""

import re
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import autopart
from autopart.ir.facts import facts
from autopart.ir.layout import CONVERSIONS
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.options import Options
from autopart.passes.choose.plan_codec import decode
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import find_loss, make_plan, prepare
from autopart.tracing.trace_model import bind_call

BOTH_WAYS = {c.operator: (c.forward, c.backward) for c in CONVERSIONS.values()} | {"all_reduce_max": ("all_reduce", "")}
MOVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MESHES = ("tp2", "tp4")
ROWS, SEQ = 4, 256


def meta_gpt2(**sizes):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _on_meta(GPT2LMHeadModel, config)


def meta_llama(**sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    return _on_meta(LlamaForCausalLM, LlamaConfig(**sizes))


def _on_meta(model_class, config):
    with torch.device("meta"):
        model = model_class(config)
    ids = torch.zeros(ROWS, SEQ, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


class Names(NamedTuple):
    """What the model calls its parts."""

    block: str
    projections: str
    embedding: str
    head: str


GPT2 = Names(
    r"^transformer\.h\.\d+", r"(c_attn|c_fc|c_proj)\.weight$", "transformer.wte.weight", "transformer.wte.weight"
)
LLAMA = Names(r"^model\.layers\.\d+", r"_proj\.weight$", "model.embed_tokens.weight", "lm_head.weight")
LLAMA_1024 = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
CASES = {  # name: builder, sizes, names, blocks; no other dim has the vocabulary's size
    "gpt2 toy": (zoo.gpt2, {"vocab": 160, "num_layers": 2}, GPT2, 2),
    "llama toy": (zoo.llama, {"vocab": 160, "heads": 8, "kv_heads": 4}, LLAMA, 2),
    "gpt2 medium": (meta_gpt2, {"n_layer": 24, "n_embd": 1024, "n_head": 16}, GPT2, 24),
    "llama 1024": (meta_llama, {**LLAMA_1024, "num_hidden_layers": 8, "vocab_size": 32000}, LLAMA, 8),
}


@cache
def compiled(case, mesh) -> tuple[Program, Plan, int]:
    """The program of a training step, its plan, and the size of the vocabulary."""
    builder, sizes, *_ = CASES[case]
    model, batch = builder(**sizes)
    program, plan = compile_step(model, batch, mesh)
    return program, plan, model.config.vocab_size


def compile_step(model, batch, mesh):
    traced = prepare(model, bind_call(model, (), batch))
    plan = make_plan(model, traced, Mesh.parse(mesh), Options(sequence_parallel=False))
    decisions = decode(traced, plan, Mesh.parse(mesh))
    return lower(traced, decisions, [find_loss(traced)], whole_outputs=False), plan


def collectives(program):
    """(module, forward, backward, node) of every conversion that moves data; what needs no gradient has no backward."""
    for stage in program.stages:
        for node in stage.graph.graph.nodes:
            name = str(node.target).split(".")[-2] if str(node.target).startswith("autopart.") else ""
            if name not in BOTH_WAYS:
                continue
            forward, backward = (kind if kind in MOVES else "" for kind in BOTH_WAYS[name])
            backward = backward if facts(node).get("needs_grad", True) else ""
            if forward or backward:
                yield facts(node).get("key", "/").split("/")[0], forward, backward, node


def per_block(program, block):
    """{block: (forward collectives, backward collectives)}, each counted by kind."""
    found = {}
    for module, forward, backward, _ in collectives(program):
        match = re.match(block, module)
        counters = found.setdefault(match[0] if match else "", (Counter(), Counter()))
        for counter, kind in zip(counters, (forward, backward), strict=True):
            counter.update([kind] * bool(kind))
    return found


ALL = [(case, mesh) for case in CASES for mesh in MESHES]


@pytest.mark.few
@pytest.mark.parametrize(("case", "mesh"), ALL)
def test_a_block_has_two_all_reduces_each_way(case, mesh):
    names, num_blocks = CASES[case][2:]
    program, _, _ = compiled(case, mesh)
    blocks = {name: counts for name, counts in per_block(program, names.block).items() if name}
    assert len(blocks) == num_blocks
    wrong = {
        name: counts for name, counts in blocks.items() if counts != (Counter(all_reduce=2), Counter(all_reduce=2))
    }
    assert not wrong, wrong


@pytest.mark.few
@pytest.mark.parametrize(("case", "mesh"), ALL)
def test_nothing_is_gathered(case, mesh):
    """Nor is any value in the program as long as the vocabulary: logits and their loss stay sharded."""
    program, _, vocab = compiled(case, mesh)
    moved = Counter(kind for _, forward, backward, _ in collectives(program) for kind in (forward, backward) if kind)
    assert set(moved) == {"all_reduce"}, moved
    for stage in program.stages:
        for node in stage.graph.graph.nodes:
            val = node.meta.get("val")
            sizes = tuple(val.shape) if isinstance(val, torch.Tensor) else ()
            assert vocab not in sizes, f"{node.name} at {facts(node).get('key')} is {list(sizes)} on every rank"


@pytest.mark.large
@pytest.mark.parametrize(("case", "mesh"), ALL)
def test_outside_the_blocks_only_the_vocabulary_is_reduced(case, mesh):
    """The embedding's sum, and the loss: its maximum, its sum of exponentials and the label's logit, one per token."""
    names = CASES[case][2]
    program, _, _ = compiled(case, mesh)
    forward, backward = per_block(program, names.block)[""]
    assert forward == Counter(all_reduce=4) and backward == Counter(all_reduce=1)


@pytest.mark.few
@pytest.mark.parametrize(("case", "mesh"), ALL)
def test_all_projections_are_sharded(case, mesh):
    names = CASES[case][2]
    program, plan, _ = compiled(case, mesh)
    stored = {name: p.layout["tp"] for name, p in program.parameters.items()}
    projections = {name: place for name, place in stored.items() if re.search(names.projections, name)}
    assert projections and all(place.is_shard for place in projections.values()), projections
    assert str(stored[names.embedding]) == str(stored[names.head]) == "S(0)"
    norms = [name for name in stored if re.search(r"(ln_\w+|norm)\.(weight|bias)$", name)]
    assert norms and all(stored[name].is_replicated for name in norms)
    assert plan.cost["bytes_per_microbatch"] > 0


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
def test_the_tied_embedding_is_stored_once(mesh):
    program, _, _ = compiled("gpt2 toy", mesh)
    stored = program.parameters["transformer.wte.weight"]
    assert stored.aliases == ("lm_head.weight",) and "lm_head.weight" not in program.parameters


@pytest.mark.parametrize(("case", "mesh"), ALL)
def test_plan_counts_what_the_program_does(case, mesh):
    program, plan, _ = compiled(case, mesh)
    counted = Counter()
    for _, forward, backward, node in collectives(program):
        counted[node.args[1], forward, backward] += 1
    planned = Counter()
    for row in plan.collectives:
        if row.axis == "tp" and row.per == "microbatch":
            planned[row.axis, row.forward, row.backward] += row.count
    assert planned == counted


# --- No name is known to the rules -----------------------------------------------------------------------------------


class Block(nn.Module):
    """A plain transformer block, its modules called as the caller likes."""

    PARTS = ("wq", "wk", "wv", "wo", "up", "down", "norm1", "norm2")

    def __init__(self, names, hidden, heads):
        super().__init__()
        self.names, self.heads = dict(zip(self.PARTS, names, strict=True)), heads
        widths = dict.fromkeys(self.PARTS[:4], (hidden, hidden)) | {"up": (hidden, 4 * hidden)}
        for part in self.PARTS[:6]:
            self.add_module(self.names[part], nn.Linear(*widths.get(part, (4 * hidden, hidden))))
        for part in self.PARTS[6:]:
            self.add_module(self.names[part], nn.LayerNorm(hidden))

    def part(self, name, x):
        return self.get_submodule(self.names[name])(x)

    def forward(self, x):
        rows, seq, hidden = x.shape
        y = self.part("norm1", x)
        q, k, v = (self.part(w, y).view(rows, seq, self.heads, -1).transpose(1, 2) for w in ("wq", "wk", "wv"))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.part("wo", y.transpose(1, 2).reshape(rows, seq, hidden))
        return x + self.part("down", F.gelu(self.part("up", self.part("norm2", x))))


class Plain(nn.Module):
    def __init__(self, names, hidden=32, heads=4, num_blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(names, hidden, heads) for _ in range(num_blocks))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


NAMES = {
    "as usual": Block.PARTS,
    "a1": tuple(f"a{i}" for i in range(1, 9)),
    "misleading": ("down", "wo", "norm2", "wq", "norm1", "wv", "up", "wk"),
}


def plain_plan(names, mesh):
    """Layouts by part, and the collectives of one block, of a model that uses these names."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 12, 32), "y": torch.randn(8, 12, 32)}
    program, _ = compile_step(Plain(names), batch, mesh)
    part = {name: part for part, name in zip(Block.PARTS, names, strict=True)}
    layouts = {}
    for name, stored in program.parameters.items():
        _, index, module, kind = name.split(".")
        layouts[index, part[module], kind] = str(stored.layout["tp"])
    return layouts, per_block(program, r"^blocks\.\d+")


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("names", NAMES)
def test_names_of_modules_do_not_matter(names, mesh):
    layouts, blocks = plain_plan(NAMES[names], mesh)
    assert (layouts, blocks) == plain_plan(NAMES["as usual"], mesh)
    columns, rows = ("wq", "wk", "wv", "up"), ("wo", "down")
    assert {layouts["0", part, "weight"] for part in columns} == {"S(0)"}
    assert {layouts["1", part, "weight"] for part in rows} == {"S(1)"}
    two = Counter(all_reduce=2)
    assert blocks["blocks.1"] == (two, two)


class Branches(nn.Module):
    """Two column-parallel layers whose outputs are joined before a row-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 16, bias=False), nn.Linear(8, 32, bias=False)
        self.last = nn.Linear(48, 8, bias=False)

    def forward(self, x):
        return self.last(torch.cat([self.narrow(x), self.wide(x)], -1).relu()).square().mean()


def test_joined_branches_stay_sharded_section_by_section():
    batch = {"x": torch.randn(8, 8, dtype=torch.float64)}
    made = autopart.plan(Branches().double(), "tp2", example_kwargs=batch)
    assert made.parameters == {
        "narrow.weight": {"tp": "S(0)"}, "wide.weight": {"tp": "S(0)"}, "last.weight": {"tp": "S(1; sections=16+32)"},
    }  # fmt: skip
    assert [(c.where, c.forward, c.backward) for c in made.collectives] == [("last", "all_reduce", "")]
    assert autopart.verify(Branches().double(), "dp2,tp4", example_kwargs=batch).ok


class JoinedRows(Branches):
    def forward(self, x):
        rows = torch.cat([self.narrow(x), 2 * self.narrow(x)], 0)
        return (rows * torch.arange(16.0, dtype=rows.dtype)[:, None]).square().mean()


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_joined_rows_of_the_batch_are_exact(mesh):
    batch = {"x": torch.randn(8, 8, dtype=torch.float64)}
    assert autopart.verify(JoinedRows().double(), mesh, example_kwargs=batch).ok


# --- Fewer key-value heads than ranks ---------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize(("kv_heads", "tp", "most"), [(2, 4, 1.15), (2, 8, 1.08), (1, 4, 1.14)])
def test_few_key_value_heads_cost_little(kv_heads, tp, most):
    """In bytes sent a block, against four all-reduces of a value of shape [rows, seq, hidden]."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 32000}
    model, batch = meta_llama(**sizes, num_key_value_heads=kv_heads, num_hidden_layers=2)
    _, plan = compile_step(model, batch, f"tp{tp}")
    sent = sum(c.bytes for c in plan.collectives if "layers" in c.where and c.per == "microbatch") / 2
    assert sent <= most * 4 * 2 * (tp - 1) / tp * ROWS * SEQ * 4096 * 4
    for name in ("q", "k", "v", "o"):
        assert plan.parameters[f"model.layers.*.self_attn.{name}_proj.weight"]["tp"].startswith("S"), name

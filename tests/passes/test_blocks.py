"""Blocks that repeat are found by what they are, whatever they are called, and decide together what is free to them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from traced import plan_of, run_of

import autopart
from autopart.cost.hardware.profile import Hardware
from autopart.ir.graph import name_of
from autopart.ir.mesh import Mesh
from autopart.passes.choose.solve.layout_pins import FREE, pinned_layouts
from autopart.passes.choose.solve.shard_axis import ShardingProblem
from autopart.passes.facts.find_blocks import BlockPosition, places
from autopart.plans.pins import Pins

WORDS = ("first", "dog", "w2v", "attention", "norm", "of_all", "x", "tail", "linear", "h")


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A GPT whose blocks are kept in a list, in a dict or as attributes."""

    def __init__(self, kept, num_layers, hidden, heads, vocab):
        super().__init__()
        blocks = [Block(hidden, heads) for _ in range(num_layers)]
        self.embed, self.norm, self.head = nn.Embedding(vocab, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, vocab)
        if kept == "list":
            self.layers = nn.ModuleList(blocks)
        elif kept == "dict":
            self.layers = nn.ModuleDict(dict(zip(WORDS, blocks, strict=False)))
        else:
            for word, block in zip(WORDS, blocks, strict=False):
                setattr(self, f"the_{word}", block)
        self.run = tuple(blocks)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.run:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def model_of(kept="list", num_layers=4, hidden=32, heads=4, vocab=64):
    torch.manual_seed(0)
    model = Model(kept, num_layers, hidden, heads, vocab).double()
    return model, {"ids": torch.randint(0, vocab, (4, 8))}


def problem_of(pinned=FREE, between="free", build=model_of, **sizes):
    graph = run_of(build, **sizes).traced.graph
    return ShardingProblem(graph, 2, Hardware.load(), {}, {}, pinned, between)


def unshared(problem):
    """The same problem without pins, in which every block chooses for itself."""
    return replace(problem, pinned=FREE, is_shared=False)


def size_of(problem):
    return len(problem.choices), len(problem.values)


@pytest.mark.large
@pytest.mark.parametrize("kept", ["dict", "attributes"])
def test_names_do_not_matter(kept):
    listed, other = problem_of(kept="list"), problem_of(kept=kept)
    assert size_of(listed) == size_of(other)
    assert listed.solve().cost == other.solve().cost
    plans = [plan_of(run_of(model_of, kept=which), "tp2") for which in ("list", kept)]
    for part in ("objective", "lower_bound", "sharing_costs", "bytes_per_microbatch", "bytes_per_step"):
        assert plans[0].cost[part] == plans[1].cost[part], part
    assert [s["flops"] for s in plans[0].stages] == [s["flops"] for s in plans[1].stages]


@pytest.mark.few
@pytest.mark.parametrize("build", [model_of, zoo.gpt2, zoo.llama, zoo.bert, zoo.phi3, zoo.transformer_encoder])
def test_depth_adds_no_decision(build):
    three, five = (problem_of(build=build, num_layers=depth) for depth in (3, 5))
    assert size_of(three) == size_of(five)
    assert max(len(choice.members) for choice in five.choices.values()) >= 4


@pytest.mark.large
def test_depth_adds_decisions_where_blocks_do_not_share():
    """The check above can fail."""
    sizes = [size_of(unshared(problem_of(num_layers=depth))) for depth in (2, 3, 4, 6, 7)]
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] == sizes[4]  # two at either end, and all between


def test_parts_of_a_block_decide_for_themselves():
    problem = problem_of(num_layers=1)
    members = [{name_of(node) for node in choice.members} for choice in problem.choices.values()]
    assert all(len(names) == 1 for names in members)


def test_a_pinned_block_decides_for_itself_whatever_it_is_called():
    trace = run_of(model_of, kept="attributes", num_layers=5).traced
    pinned = pinned_layouts(trace, Mesh.parse("tp2"), Pins.parse({f"the_{WORDS[2]}.up.weight": {"tp": "R"}}), "tp")
    problem = problem_of(pinned, kept="attributes", num_layers=5)
    sizes = [len(choice.members) for choice in problem.choices.values()]
    assert set(sizes) == {1, 4}
    assert size_of(problem)[0] > size_of(problem_of(kept="attributes", num_layers=5))[0]


@pytest.mark.parametrize("between", ["whole", "cut", "free"])
@pytest.mark.parametrize("build", [model_of, zoo.gpt2, zoo.llama, zoo.t5, zoo.skip_mlp, zoo.transformer_encoder])
def test_what_is_shared_is_priced_as_what_it_stands_for(build, between):
    """The shared choices cost as much as the same ones of blocks that choose for themselves, who can only do better."""
    sizes = {} if build is zoo.skip_mlp else {"num_layers": 3}
    shared = problem_of(between=between, build=build, **sizes)
    free = unshared(shared)
    found = shared.solve()
    options = {
        id(choice): choice.options.index(
            found.strategies.get(choice.node, found.parameters.get(choice.node.target, choice.options[0]))
        )
        for choice in free.choices.values()
    }
    prices = [p.prices.weigh(p.price(o, p.prices)) for p, o in ((shared, found.options), (free, options))]
    assert prices[1] == pytest.approx(prices[0], rel=1e-12)
    assert free.solve().cost <= found.cost * (1 + 1e-9)


# --- in a sequence -------------------------------------------------------------------------------------------------


def chain(kinds):
    """Operators that read the one before."""
    return places(kinds, [[i - 1] if i else [] for i in range(len(kinds))])


@pytest.mark.parametrize(
    ("kinds", "copies"),
    [
        ("eabababh", "-001122-"),
        ("abcabc", "000111"),
        ("abcabd", "------"),
        ("aaaa", "0123"),
        ("aabaab", "000111"),  # the most operators, then the smallest block
        ("xababyabab", "-0011-0011"),
        ("a", "-"),
        ("", ""),
    ],
)
def test_repeats_in_a_sequence(kinds, copies):
    found = chain(list(kinds))
    assert "".join("-" if place.block is None else str(place.block[1]) for place in found) == copies
    for i, place in enumerate(found):
        assert kinds[place.like] == kinds[i]


def test_stretches_that_read_the_same_are_no_repeats():
    """As q, k and v of an attention."""
    assert places(list("nqvqvs"), [[], [0], [1], [0], [3], [2, 4]]) == [BlockPosition(i) for i in range(6)]


def test_a_block_begins_where_the_fewest_values_cross():
    reads = [[], [0], [0, 1], [2], [2, 3], [4], [4, 5], [6]]  # e, then three of a norm and an addition, then a norm
    found = places(list("enananan"), reads)
    assert [place.block for place in found] == [None, (1, 0), (1, 0), (1, 1), (1, 1), (1, 2), (1, 2), None]


# --- equal single layers -------------------------------------------------------------------------------------------


def stack(num_layers):
    layers = [part for _ in range(num_layers) for part in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers).double(), {"input": torch.randn(8, 16, dtype=torch.float64)}


@pytest.mark.few
@pytest.mark.parametrize("num_layers", [2, 3, 4, 7, 8])
def test_a_stack_of_equal_layers_is_cut_along_output_and_input_in_turn(num_layers):
    model, batch = stack(num_layers)
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    said = [plan.parameters.get(f"{2 * i}.weight", plan.parameters["*.weight"])["tp"] for i in range(num_layers)]
    assert said == [f"S({i % 2})" for i in range(num_layers)]
    forward = {c.forward: c.count for c in plan.collectives if c.forward}
    assert forward == {"all_reduce": num_layers // 2} | ({"all_gather": 1} if num_layers % 2 else {})


def test_depth_adds_no_decision_to_a_stack():
    sizes = [size_of(problem_of(build=stack, num_layers=n)) for n in (8, 16, 32)]
    assert sizes[0] == sizes[1] == sizes[2]

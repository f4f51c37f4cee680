"""Models and helpers for context parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import zoo
from torch import fx, nn

from autopart.ir.facts import facts
from autopart.ir.graph import operator_name

SEQUENCES = {"gpt2": zoo.gpt2, "llama": zoo.llama, "bert": zoo.bert, "t5": zoo.t5, "phi3": zoo.phi3}


UNEVEN = 25


def given(name, seq=12):
    """A model and a batch of sequences that are so long; of 25 positions neither 3 nor 4 ranks have as many each."""
    return SEQUENCES[name](**({"seq": seq} if seq != 12 else {}))


class Plain(nn.Module):
    """Attention that is causal by its own argument, as people write it."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(self, ids):
        q, k, v = (x.unflatten(-1, (4, 4)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(self.embed(ids) + y)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain(seq):
    torch.manual_seed(0)
    return Plain().double(), {"ids": torch.randint(0, 32, (2, seq))}


DISPATCHED = {  # of what a collective is given on each of n ranks, how much it sends
    "all_gather_into_tensor": ("all_gather", lambda n: n - 1),
    "reduce_scatter_tensor": ("reduce_scatter", lambda n: (n - 1) / n),
    "all_to_all_single": ("all_to_all", lambda n: (n - 1) / n),
    "all_reduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
}


def stage_modules(pm):
    """The stages of all programs that a module runs on this rank."""
    return [module for executable in pm._executables.values() for module in executable.modules]


def calls(program, name, where=""):
    """The calls of an operator in all stages that belong to an operator of the model with `where` in its name."""
    for stage in program.stages:
        for node in list(stage.graph.graph.nodes):
            if node.op == "call_function" and operator_name(node) == name and where in facts(node).get("key", ""):
                yield stage.graph.graph, node
        stage.graph.recompile()


def instead(node: fx.Node, target, *args) -> None:
    """Another call in the place of one; planted again it changes nothing."""
    with node.graph.inserting_after(node):
        other = node.graph.call_function(target, args)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    if node not in args:
        node.graph.erase_node(node)

"""Which repeated block of the model every operator of a traced graph is in."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import on_parameters, parents


def blocks(traced: fx.Graph) -> dict[str, str]:
    """{key of an operator that depends on parameters: its repeated block, "" for none}.

    A block is a module whose path ends in a number and which has at least half of its operators in common with another
    number; where blocks are in blocks, the outermost. Without any, it is a stretch of operators that comes again and
    again (`passes/facts/find_blocks.py`), such as one layer called many times.
    """
    nodes = {facts(node)["key"]: node for node in on_parameters(traced)}
    inside: dict[str, set[str]] = defaultdict(set)
    for key in nodes:
        for path in _numbered(key):
            inside[path].add(key.removeprefix(path))
    siblings: dict[str, list[str]] = defaultdict(list)
    for path in inside:
        siblings[path.rpartition(".")[0]].append(path)

    def repeats(path: str) -> bool:
        others = (inside[other] for other in siblings[path.rpartition(".")[0]] if other != path)
        return any(2 * len(inside[path] & other) >= len(inside[path]) for other in others)

    repeated = {path for path in inside if repeats(path)}
    if not repeated:
        return {key: str(facts(node)["place"].block or "") for key, node in nodes.items()}
    return {key: next((path for path in _numbered(key) if path in repeated), "") for key in nodes}


def _numbered(key: str) -> list[str]:
    return [path for path in parents(key) if path.rpartition(".")[2].isdigit()]

"""The repeated block of each operator of a traced graph."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import on_parameters, parents


def blocks(traced: fx.Graph) -> dict[str, str]:
    """Return {key of an operator that depends on parameters: its repeated block, "" outside of blocks}.

    A block is a module whose path ends in a number (`layers.3`) and that shares at least half of its operators with a
    module of the same path and another number. Of nested blocks only the outermost counts. If no module is such a
    block, a block is a sequence of operators that repeats (`passes/facts/find_blocks.py`), such as one layer that is
    called many times.
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
        siblings_of_path = (inside[other] for other in siblings[path.rpartition(".")[0]] if other != path)
        return any(2 * len(inside[path] & other) >= len(inside[path]) for other in siblings_of_path)

    repeated = {path for path in inside if repeats(path)}
    if not repeated:
        return {key: str(facts(node)["place"].block or "") for key, node in nodes.items()}
    return {key: next((path for path in _numbered(key) if path in repeated), "") for key in nodes}


def _numbered(key: str) -> list[str]:
    return [path for path in parents(key) if path.rpartition(".")[2].isdigit()]

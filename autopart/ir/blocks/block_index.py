"""Assignment of the operators of a traced graph to repeated blocks."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import on_parameters, parents


def blocks(traced: fx.Graph) -> dict[str, str]:
    """Return {operator key: path of the repeated block that contains the operator}.

    The path is "" for operators outside of blocks. Operators that depend on no parameter are left out. A repeated block
    is a module whose path ends in a number (`layers.3`). It shares at least half of its operators with a sibling such
    as `layers.4`. If blocks are nested, an operator belongs to the outermost one.

    If there is no such module, for example because one layer is called many times, blocks are repeated sequences of
    operators (`passes/facts/find_blocks.py`).
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

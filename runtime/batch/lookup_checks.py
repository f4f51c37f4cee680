"""Checks of token ids and positions against the sizes of embedding tables, before a call communicates.

Without these checks, only ranks of the first pipeline stage would raise, and all other ranks would wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from autopart.errors import InputError
from autopart.ir.program import Program
from autopart.ir.run.lookups import Lookup, computed, index_nodes, unviewed
from autopart.runtime.comm.process_mesh import Process


class LookupChecks:
    """Checks that the indices of all embeddings of a program are within their tables.

    Indices can be inputs, or be computed from inputs. Indices that depend on no input, such as positions, are checked
    when a call is traced. If a program has tensor sizes as integer inputs, indices that depend only on these sizes are
    checked when the sizes change.
    """

    def __init__(self, program: Program, process: Process):
        self._reads_values = process.host_group is not None or process.device.type == "cpu"
        """False for one rank on a GPU: reading values would wait for the GPU, and embeddings raise there anyway."""
        self._checked_sizes: Mapping[str, int] | None = None
        """Sizes of the last call whose positions were checked."""
        self._of_inputs: dict[tuple[str, int], Lookup] = {}
        """{(input, rows of the table): look-up}, for look-ups whose indices are the values of an input."""
        self._computed: list[tuple[Lookup, fx.Node, set[fx.Node], dict[fx.Node, str]]] = []
        for lookup, index, placeholders in _lookups(program):
            nodes = index_nodes(index)
            used = {} if nodes is None else {n: placeholders[n] for n in nodes if n.op == "placeholder"}
            if index in placeholders:
                self._of_inputs[placeholders[index], lookup.num_rows] = lookup
            elif nodes is not None and used and all(n.op in ("call_function", "placeholder") for n in nodes):
                self._computed.append((lookup, index, nodes, used))

    def problem(self, inputs: Mapping[str, Tensor]) -> InputError | None:
        """Return an error if an input of this rank has an index outside of its embedding table, else None."""
        if not self._reads_values:
            return None
        errors = (lookup.error(inputs[name], [name], True) for (name, _), lookup in self._of_inputs.items())
        return next((error for error in errors if error is not None), None)

    def check_computed(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Raise InputError if an index that the model computes is outside of its embedding table.

        Args:
            inputs: {name: input} of the global batch.
            sizes: {name: value} of the tensor sizes that are integer inputs of the program.
        """
        are_checked = self._checked_sizes == sizes
        for lookup, index, nodes, used in self._computed:
            if are_checked and sizes.keys() >= {*used.values()}:
                continue
            values = {node: sizes.get(name, inputs.get(name)) for node, name in used.items()}
            if all(
                isinstance(value, int) or (isinstance(value, Tensor) and value.device.type == "cpu")
                for value in values.values()
            ):
                names = [name for name in used.values() if name not in sizes]
                error = lookup.error(computed(index, nodes, values), names, False)
                if error is not None:
                    raise error
        self._checked_sizes = sizes


def _lookups(program: Program) -> Iterator[tuple[Lookup, fx.Node, Mapping[fx.Node, str]]]:
    """Yield (embedding look-up, node that computes its index, input names) for all stages.

    The node is in the stage's prologue, the graph that runs on the global batch. The names are {placeholder of the
    prologue: name of the program's input}.
    """
    for stage in program.stages:
        outputs: Sequence[Any] = stage.prologue.graph.output_node().args[0]
        made = {one.name: output for one, output in zip(stage.inputs, outputs, strict=False)}
        names = (*program.input_names, *program.sizes)
        placeholders = dict(zip(stage.prologue.graph.find_nodes(op="placeholder"), names, strict=True))
        for lookup in Lookup.all_of(stage.graph.graph):
            if lookup.index.op == "placeholder" and isinstance(made.get(str(lookup.index.target)), fx.Node):
                yield lookup, unviewed(made[str(lookup.index.target)]), placeholders

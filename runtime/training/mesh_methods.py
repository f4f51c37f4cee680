"""What a partitioned model says of its place in the mesh, and how long its ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.errors import StageError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process, first_ranks_seed
from autopart.runtime.gradients.no_sync import Unsummed, in_parts
from autopart.runtime.sharded_tensor.shard_spec import total_over_stages
from autopart.runtime.shards.shard_owners import home_of


class OnMesh(nn.Module):
    """What a partitioned model has beside an `nn.Module`, because it runs on the ranks of a mesh."""

    _process: Process
    _program: Program | None
    _unsummed: Unsummed
    _traced: Callable[[str], Program]
    _stages: Callable[[Program], list[int]]
    plan: Any

    @property
    def mesh(self) -> Mesh:
        return self._process.mesh

    @property
    def data_rank(self) -> int:
        """Which rows of the global batch this rank computes, from 0 to `num_data_ranks - 1`. Ranks that differ in `tp`
        or `pp` alone have the same. Known before the model is traced.

        Example: `DistributedSampler(data, num_replicas=pm.num_data_ranks, rank=pm.data_rank)` with `local_batch=True`.
        """
        return self.mesh.row_index(self._process.coordinates)

    @property
    def num_data_ranks(self) -> int:
        """In how many parts the rows of the global batch are cut over ranks: the product of the mesh's data axes."""
        return self.mesh.row_ranks

    @property
    def initial_seed(self) -> int:
        """The first rank's random seed (`torch.initial_seed()`), on every rank. A collective call."""
        return first_ranks_seed(self._process)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._process.device

    def summed(self, fn: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Return the sum of `fn(parameter)` over all parameters of the model, the same on every rank.

        Each parameter counts once, wherever it is stored. Differentiable in the parameters. A collective call.

        Args:
            fn: returns a scalar of one parameter or its gradient, which behave as the full tensors.

        Example:
            penalty = pm.summed(lambda p: p.abs().sum())
        """
        homes = [(parameter, home_of(parameter)) for parameter in self.parameters()]
        values = [fn(p) for p, home in homes if home is not None and home.owners[0] == self._process.pp]
        total = torch.stack([value.reshape(()) for value in values]).sum() if values else None
        return total_over_stages(total, self._process)

    def pause_timeout(self) -> AbstractContextManager[None]:
        """Around work of your own that takes longer than `timeout=`, such as evaluating or saving on one rank: ranks
        that wait for this one at the start of their next call do so without a limit. Enter it on the ranks that work.

        Example:
            if rank == 0:
                with pm.pause_timeout():
                    evaluate()
        """
        return nullcontext() if self._process.watch is None else self._process.watch.pause()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, `step`, and `backward` of a forward inside, add gradients up without summing them over ranks. The
        next call outside sums all of them once, as `torch.nn.parallel.DistributedDataParallel.no_sync` does.

        Until then `.grad` holds this rank's part of whole gradients, and whatever reads them (norms, clipping, an
        optimizer's step, `full_grads`) raises UsageError. What you add to `.grad` by hand there is summed as well.
        Raises UsageError where parameters are stored in parts (`zero=3`), which have no whole gradients. Enter it on
        every rank.

        Example:
            with pm.no_sync():
                for batch in batches[:-1]:
                    pm.step(**batch, num_tokens=num_tokens)
            pm.step(**batches[-1], num_tokens=num_tokens)
            optimizer.step()
        """
        problem = in_parts(self._program) if self._program is not None else None
        if problem is not None:
            raise problem
        return self._unsummed.opened()

    def graph(self, stage: int | None = None) -> fx.GraphModule:
        """The graph of a stage (None: this rank's first), with axis names in its collectives."""
        program = self._traced("graph")
        if stage is None:
            stage = self._stages(program)[0]
        if not 0 <= stage < len(program.stages):
            count = f"{len(program.stages)} stage{'s' * (len(program.stages) > 1)}"
            hint = "graph(0)" if len(program.stages) == 1 else f"graph(0) to graph({len(program.stages) - 1})"
            raise StageError(f"there is no stage {stage}", why=f"the program has {count}", hint=hint)
        return program.stages[stage].graph

    def report(self, path: str | Path) -> None:
        """Write one page of HTML (`Plan.report`) with the graphs of this rank's stages. A path for each rank."""
        program = self._traced("report")
        graphs = {f"Graph of stage {stage}": program.stages[stage].graph for stage in self._stages(program)}
        self.plan.report(path, graphs)

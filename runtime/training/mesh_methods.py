"""Methods of a partitioned model that concern its mesh, such as `data_rank`, `summed` and `no_sync`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopart.errors import StageError, UsageError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.runtime.comm import stop_signal
from autopart.runtime.comm.process_mesh import Process, first_ranks_seed
from autopart.runtime.gradients.no_sync import NoSync, sharded_error
from autopart.runtime.sharded_tensor.shard_spec import total_over_stages
from autopart.runtime.shards.shard_owners import shard_info_of


class MeshMethods(nn.Module):
    """Methods and properties of a partitioned model that concern its mesh."""

    _process: Process
    _program: Program | None
    _unreduced: NoSync
    _traced: Callable[[str], Program]
    _stages: Callable[[Program], list[int]]
    plan: Any

    @property
    def mesh(self) -> Mesh:
        return self._process.mesh

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of the global batch, from 0 to `num_data_ranks - 1`.

        Ranks that differ only in `tp` or `pp` have equal indices. It can be used before the model is traced.

        Example: `DistributedSampler(data, num_replicas=pm.num_data_ranks, rank=pm.data_rank)` with `local_batch=True`.
        """
        return self.mesh.row_index(self._process.coordinates)

    @property
    def num_data_ranks(self) -> int:
        """Number of parts of the global batch: the product of the sizes of the mesh's data axes."""
        return self.mesh.data_parallel_size

    @property
    def initial_seed(self) -> int:
        """The first rank's random seed (`torch.initial_seed()`), on every rank. A collective call."""
        return first_ranks_seed(self._process)

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._process.device

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along a mesh axis. Raises UsageError if the axis has one rank."""
        if axis not in self._process.groups:
            raise UsageError(f"no process group of axis '{axis}'", why=f"the mesh is {self._process.mesh}",
                             hint=f"one of {', '.join(self._process.groups) or 'none: there is one rank'}")  # fmt: skip
        return self._process.groups[axis]

    def summed(self, fn: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Return the sum of `fn(parameter)` over all parameters of the model, equal on every rank.

        Each parameter counts once, even if several ranks store it. The sum is differentiable with respect to the
        parameters. A collective call.

        Args:
            fn: function of one parameter that returns a scalar. The parameter and its `.grad` behave as full tensors.

        Example:
            penalty = pm.summed(lambda p: p.abs().sum())
        """
        shard_infos = [(parameter, shard_info_of(parameter)) for parameter in self.parameters()]
        values = [
            fn(p)
            for p, shard_info in shard_infos
            if shard_info is not None and shard_info.owners[0] == self._process.pp
        ]
        total = torch.stack([value.reshape(()) for value in values]).sum() if values else None
        return total_over_stages(total, self._process)

    @property
    def stop_requested(self) -> bool:
        """True if a rank has received SIGTERM, with which Slurm, Kubernetes and torchrun stop a job.

        The value is equal on all ranks, because the ranks agree on it at the beginning of each `step` or forward. From
        the first use of this property on, SIGTERM no longer ends the process: your loop must end.

        Example (at the end of a training step):
            if pm.stop_requested:
                pm.save("run", optimizer=optimizer, step=step)
                sys.exit(143)
        """
        stop_signal.listen()
        return self._process.stop_requested

    def pause_timeout(self) -> AbstractContextManager[None]:
        """Context manager that pauses the limit `timeout=` during other work of this rank, such as evaluation.

        Use it on the ranks that do the work. In their next call, other ranks then wait for these ranks without a limit.

        Example:
            if rank == 0:
                with pm.pause_timeout():
                    evaluate()
        """
        return nullcontext() if self._process.watch is None else self._process.watch.pause()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager in which gradients accumulate without being reduced over ranks.

        As with `torch.nn.parallel.DistributedDataParallel.no_sync`, the next `step` or backward outside of the block
        reduces the accumulated gradients once. Every rank must enter the block. A backward counts as inside the block
        if its forward ran in the block.

        Until the reduction, `.grad` has this rank's partial gradients. Functions that need reduced gradients (norms,
        clipping, an optimizer's step, `full_grads`) raise UsageError. Values that you add to `.grad` by hand are
        reduced too. Raises UsageError if parameters are sharded (`zero=`).

        Example:
            with pm.no_sync():
                for batch in batches[:-1]:
                    pm.step(**batch, num_tokens=num_tokens)
            pm.step(**batches[-1], num_tokens=num_tokens)
            optimizer.step()
        """
        problem = sharded_error(self._program) if self._program is not None else None
        if problem is not None:
            raise problem
        return self._unreduced.opened()

    def graph(self, stage: int | None = None) -> fx.GraphModule:
        """Return the graph of a stage, by default this rank's first stage. Its collectives name mesh axes."""
        program = self._traced("graph")
        if stage is None:
            stage = self._stages(program)[0]
        if not 0 <= stage < len(program.stages):
            count = f"{len(program.stages)} stage{'s' * (len(program.stages) > 1)}"
            hint = "graph(0)" if len(program.stages) == 1 else f"graph(0) to graph({len(program.stages) - 1})"
            raise StageError(f"there is no stage {stage}", why=f"the program has {count}", hint=hint)
        return program.stages[stage].graph

    def report(self, path: str | Path) -> None:
        """Write an HTML page (`Plan.report`) with the graphs of this rank's stages.

        Each rank must pass a different path.
        """
        program = self._traced("report")
        graphs = {f"Graph of stage {stage}": program.stages[stage].graph for stage in self._stages(program)}
        self.plan.report(path, graphs)

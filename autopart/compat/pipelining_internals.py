"""Private APIs of torch.distributed.pipelining: schedules, stages, and a 1F1B run by its caller."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import record_function

_SCHEDULES = {
    "gpipe": "ScheduleGPipe", "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV", "looped_bfs": "ScheduleLoopedBFS",
}  # fmt: skip


def schedule_class(schedule: str) -> Any:
    """Return torch's class of a pipeline schedule.

    The function imports `torch.distributed.pipelining` only when it is called: this also imports torch.compile, which
    takes as long as importing torch.
    """
    from torch.distributed import pipelining

    if schedule == "1f1b":
        return one_forward_one_backward_class()
    if schedule == "1f1b_2bw":
        return batch_class()
    return getattr(pipelining, _SCHEDULES[schedule])


def pipeline_order(schedule: Any, num_stages: int, num_ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """Return {rank: its actions in order} for a torch pipeline schedule.

    Torch's code computes the actions, without starting processes. The part that adds sends and receives is skipped,
    because it takes minutes for large pipelines.
    """
    from torch.distributed import pipelining

    per_rank = num_stages // num_ranks
    stages: list[Any] = [
        types.SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None,
            is_first=index == 0, is_last=index == num_stages - 1,
        ) for index in range(per_rank)
    ]  # fmt: skip
    if issubclass(schedule, pipelining.schedules.PipelineScheduleSingle):
        return cast(dict[int, list[Any]], schedule(stages[0], microbatches).pipeline_order)
    quick: Any = type(
        schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": lambda *arguments, **options: None}
    )
    return quick(stages, microbatches).pipeline_order


@functools.cache
def stage_class() -> Any:
    """Return a subclass of torch's `PipelineStage` with three changes.

    A rank never sends to itself in the first handshake. In torch 2.11 a rank with two neighbouring stages (zbv,
    dualpipev) would do so, which gloo rejects. The class also calls `after_backward` as soon as a microbatch's weight
    gradients have been computed. On torch's "fake" backend, whose ranks receive nothing, it does not wait for the other
    stages' vote on whether shapes are known: in autopart, shapes are always known.
    """
    from torch.distributed import pipelining

    class PipelineStage(pipelining.PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            known: torch.Tensor = super()._warmup_backward_result(*args, **kwargs)
            return torch.ones_like(known) if dist.get_backend(self.group) == "fake" else known

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            part = "" if kwargs.get("full_backward", True) else " of the inputs"
            with record_function(f"backward{part} {args[0] if args else kwargs['bwd_chunk_id']}"):
                done = super().backward_one_chunk(*args, **kwargs)
            if kwargs.get("full_backward", True):
                self.after_backward()
            return done

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with record_function(f"backward of the weights {args[0] if args else kwargs['bwd_chunk_id']}"):
                done = super().backward_weight_one_chunk(*args, **kwargs)
            self.after_backward()
            return done

        def after_backward(self) -> None:
            """Do nothing. The code that creates the stage replaces this method."""

    return PipelineStage


@functools.cache
def one_forward_one_backward_class() -> Any:
    """Return a 1F1B schedule class that accepts fewer microbatches than stages.

    The constructor of torch's class rejects so few microbatches, although its `step` could run them.
    """
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    class OneForwardOneBackward(pipelining.Schedule1F1B):
        def __init__(self, stage: Any, n_microbatches: int, **options: Any):
            super(pipelining.Schedule1F1B, self).__init__(stage, n_microbatches, **options)

        def _get_pipeline_order(self) -> dict[int, list[Any]]:
            order: dict[int, list[Any]] = {}
            for stage in range(self._num_stages):
                warmup = min(self._n_microbatches, self._num_stages - 1 - stage)
                forwards = [_Action(stage, _ComputationType.FORWARD, m) for m in range(self._n_microbatches)]
                backwards = [_Action(stage, _ComputationType.FULL_BACKWARD, m) for m in range(self._n_microbatches)]
                pairs = zip(forwards[warmup:], backwards, strict=False)
                rest = backwards[self._n_microbatches - warmup :]
                order[stage] = [*forwards[:warmup], *(action for pair in pairs for action in pair), *rest]
            return order

    return OneForwardOneBackward


def batch_class() -> Any:
    """Return a 1F1B schedule class whose caller runs each forward and backward of a microbatch itself.

    `step` only stores the batch and initializes the stage.
    """

    base: Any = one_forward_one_backward_class()

    class Batch(base):
        def _step_microbatches(
            self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *_: Any, **__: Any
        ) -> None:
            self.arguments, self.targets = list(zip(arg_mbs, kwarg_mbs, strict=True)), target_mbs
            takes_targets = "target" in inspect.signature(self._initialize_stage).parameters  # from torch 2.12 on
            self._initialize_stage(*self.arguments[0], *([target_mbs[0]] if takes_targets else []))

        def forward_receives(self, microbatch: int) -> list[dist.P2POp]:
            return self._stage.get_fwd_recv_ops(microbatch)

        def forward(self, microbatch: int) -> list[dist.P2POp]:
            """Run the forward of a microbatch, and return the sends that follow it."""
            output = self._stage.forward_one_chunk(microbatch, *self.arguments[microbatch], save_forward_output=False)
            self._maybe_compute_loss(self._stage, output, self.targets, microbatch)
            return self._stage.get_fwd_send_ops(microbatch)

        def backward_receives(self, microbatch: int) -> list[dist.P2POp]:
            return self._stage.get_bwd_recv_ops(microbatch)

        def backward(self, microbatch: int) -> list[dist.P2POp]:
            """Run the backward of a microbatch, and return the sends that follow it."""
            loss = self._maybe_get_loss(self._stage, microbatch)
            is_last = microbatch == self._n_microbatches - 1
            self._stage.backward_one_chunk(microbatch, loss=loss, last_backward=is_last)
            return self._stage.get_bwd_send_ops(microbatch)

        def losses(self) -> list[torch.Tensor]:
            """Return the losses of the microbatches on the last stage, and an empty list on other stages."""
            losses: list[torch.Tensor] = []
            self._update_losses(self._stage, losses)
            return losses

    return Batch


@functools.cache
def split_backward_counts_twice() -> bool:
    """Return True if torch's split backward is wrong for a parameter that a stage uses twice.

    In torch 2.11 the gradient is counted twice if the second use depends on the first. Later versions are right. The
    function runs an example instead of comparing versions: z = (x + w) + w, whose gradient with respect to w is 2.
    """
    from torch.distributed.pipelining import _backward

    x, w = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    with torch.enable_grad():
        z = (x.clone() + w) + w
        _, groups = _backward.stage_backward_input([z], None, [x], iter([w]))
        _backward.stage_backward_weight(iter([w]), groups)
    return w.grad is None or w.grad.item() != 2.0

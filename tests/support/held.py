"""What is really held in memory: storages that autograd has saved, counted on every rank of a running program."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from zoo import ZOO

import autopart
from autopart.compat.torch_function_internals import on_local_values
from autopart.cost.count.stage_footprint import liveness_of, own_saved_bytes, saved_buffers
from autopart.ir.facts import times
from autopart.ops.stage_masks import with_mask_structure
from autopart.runtime.executable import Executable
from autopart.runtime.pipeline_stages import StageModule


class Saved:
    """A tensor that autograd has packed; gone when autograd drops it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Recorder(saved_tensors_hooks):
    """Inside, autograd saves through this; `alive()` is what it still holds."""

    def __init__(self) -> None:
        self.packed: list[weakref.ref[Saved]] = []
        super().__init__(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self.packed.append(weakref.ref(saved))
        return saved

    def behind(self, gathered: Any) -> None:
        """Also record what the hooks of gathered weights leave as it is."""
        first = gathered._pack
        gathered._pack = lambda tensor: self._pack(kept) if isinstance(kept := first(tensor), Tensor) else kept

    def alive(self) -> list[Tensor]:
        return [saved.tensor for reference in self.packed if (saved := reference()) is not None]


@on_local_values
def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """{address: bytes} of the memory of all tensors among these."""
    found = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def small(name: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = vit() if name == "vit" else ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model, batch


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                       image_size=16, patch_size=4, num_labels=8)  # fmt: skip
    model = ViTForImageClassification(config).double().train()
    return model, {"pixel_values": torch.randn(8, 3, 16, 16, dtype=torch.float64), "labels": torch.randint(8, (8,))}


@on_local_values
def _started(pm: Any, program: Any, inputs: Any) -> tuple[Executable, Any]:
    """What runs a step, and the comparison of how the ranks were called, which has ended."""
    executable, comparison = pm._executable(program, inputs, "step")
    comparison.finish_comparison()
    return executable, comparison


@on_local_values
def saved_on_a_rank(name: str, mesh: str, dropout: float, options: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """(stage, bytes that autograd saves of its first microbatch, bytes that the estimate says) of a rank's stages."""
    model, batch = small(name, dropout)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    program, inputs = pm._compiler.program((), batch, purpose="step", training=True)
    executable, comparison = _started(pm, program, inputs)
    trace = pm._compiler._example.trace
    found = []
    with executable.loaded(inputs, comparison):
        for module in executable.modules:
            walk = liveness_of(
                trace, program, with_mask_structure(module.stage, dict(module.loaded.mask_structures[0]))
            )
            saved = saved_buffers(walk, walk.reached())
            estimated = sum(
                times(node) * (sum(memory.size_bytes for memory in buffers) + own_saved_bytes(walk, node))
                for node, buffers in saved.items()
            )
            found.append((module.stage.index, _saved_of(module), estimated))
    return found


def _saved_of(module: StageModule) -> int:
    boundaries = module.stage.receives
    received = [torch.ones(b.shape_at(module.process.mesh, module.process.coordinates), dtype=b.dtype,
                           requires_grad=b.dtype.is_floating_point) for b in boundaries]  # fmt: skip
    recorder = Recorder()
    if (
        blocks := module._specialized_graph(module.loaded.mask_structures[0]).blocks
    ) is not None:  # these weights have hooks of their own
        recorder.behind(blocks)
    with torch.enable_grad(), recorder:
        outputs = module.run(received, 0)
    lasting = storages([*module.parameters(), *module.buffers(), *received, *module.loaded.arguments[0].values()])
    held = {address: size for address, size in storages(recorder.alive()).items() if address not in lasting}
    assert outputs
    return sum(held.values())


@on_local_values
def states_on_a_rank(name: str, mesh: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that a rank holds of parameters, gradients and AdamW's moments after a training step."""
    model, batch = small(name)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    optimizer = torch.optim.AdamW(pm.parameters())
    pm.step(**batch)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return {
        "parameters": sum(storages(pm.parameters()).values()),
        "gradients": sum(storages(p.grad for p in pm.parameters()).values()),
        "optimizer": sum(storages(moments).values()),
        "buffers": sum(storages(pm.buffers()).values()),
        "rank": torch.distributed.get_rank(),
    }


@on_local_values
def most_in_flight(schedule: str, mesh: str, microbatches: int) -> dict[int, int]:
    """{stage: the most microbatches between forward and the end of backward} of a rank that runs a real step."""
    model, batch = ZOO["skip_mlp"]()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, schedule=schedule, microbatches=microbatches)
    program, inputs = pm._compiler.program((), batch, purpose="step", training=True)
    executable, _ = _started(pm, program, inputs)
    pipeline = executable.pipeline
    assert pipeline is not None
    schedule_run = pipeline.schedule
    stages = getattr(schedule_run, "_stages", None) or [schedule_run._stage]
    most: dict[int, int] = {}
    for stage in stages:
        _watch(stage, most)
    pm.step(**batch)
    return most


def _watch(stage: Any, most: dict[int, int]) -> None:
    """Note the most entries of what a stage holds for backwards, after each of its forwards."""
    forward = stage.forward_one_chunk

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        held = set(stage.fwd_cache) | set(stage.backward_state)
        most[stage.stage_index] = max(most.get(stage.stage_index, 0), len(held))
        return result

    stage.forward_one_chunk = watched


ROWS = 8
"""For each row of a batch, so that a step is fullest in its backward and not after it."""


@on_local_values
def peak_on_a_rank(name: str, mesh: str, options: Mapping[str, Any], dropout: float = 0.0) -> tuple[int, int]:
    """The most bytes that torch's allocator has handed out at a time in a training step of a rank, and what the plan
    says. The least of several steps: threads that communicate hold what they have sent a moment longer."""
    model, batch = small(name, dropout)
    batch = {key: tensor.repeat_interleave(ROWS, 0) for key, tensor in batch.items()}
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    return _peak_of_steps(pm, batch, mesh, 8)


@on_local_values
def _peak_of_steps(pm: Any, batch: Mapping[str, Any], mesh: str, times: int) -> tuple[int, int]:
    optimizer = torch.optim.AdamW(pm.parameters(), fused=True)

    def step() -> None:
        pm.step(**batch)
        optimizer.step()

    step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    constants = [value for one in pm._executables.values() for m in one.modules for value in m.constants.values]
    before = sum(storages([*pm.parameters(), *pm.buffers(), *batch.values(), *state, *constants]).values())
    found = []
    for _ in range(times):
        optimizer.zero_grad()
        torch.distributed.barrier()
        found.append(before + _most_allocated(step))
    rank = torch.distributed.get_rank() if mesh == "pp2" else 0
    return min(found), pm.plan.memory[rank]["total"]


def _most_allocated(call: Callable[[], Any]) -> int:
    """How many bytes more than before there are at a time, by the profiler's record of every piece."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    taken = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"]) if e["name"] == "[memory]"]
    return max(accumulate(taken, initial=0))


def partitioned_on_this_process(name: str, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that torch's own partitioner keeps of a step on `dp1`, where nothing is turned into kernels; and what the
    plan says."""
    model, batch = ZOO[name](num_layers=3, hidden=64, heads=4, rows=8, seq=64)
    pm = autopart.parallelize(model.to(dtype), "dp1", example_kwargs=batch, compile=True, **options)
    program, inputs = pm._compiler.program((), batch, purpose="step", training=True)
    executable, comparison = _started(pm, program, inputs)
    with executable.loaded(inputs, comparison):
        (module,) = executable.modules
        return _saved_of(module), pm.plan.memory[0]["activations"]


def compiled_peak_on_a_rank(name: str, mesh: str, options: Mapping[str, Any]) -> tuple[int, int]:
    """As `peak_on_a_rank`, of compiled stages in float32 of which activations are most."""
    vocab = 1024
    model, batch = ZOO[name](num_layers=2, hidden=64, heads=2, vocab=vocab, rows=8, seq=128)
    pm = autopart.parallelize(model.float(), mesh, example_kwargs=batch, compile=True, **options)
    return _peak_of_steps(pm, batch, mesh, 3)

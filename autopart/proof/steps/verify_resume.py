"""`autopart.verify_resume`: train on one mesh, save, load on another one, and compare, in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from autopart.common.progress import phase
from autopart.common.text import ShownAsText
from autopart.errors import InputError, OptionError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.ir.run.schedules import DELAYED
from autopart.ir.sharding import boxes, spans_of
from autopart.options import TOLERANCE, VerifyOptions, read_options, with_options
from autopart.plans.rank_digest import autopart_version
from autopart.proof.comparison import relative
from autopart.proof.steps.lockstep_steps import AllRanks, SingleDeviceTraining, TracedBatches, restore_state
from autopart.proof.steps.training_options import MakeOptimizer, Training, read_training
from autopart.proof.verify import VerificationRun
from autopart.runtime.checkpoint.saved_shard import ShardOffsets, ShardTensor, connect_checkpoints, to_plain
from autopart.runtime.optimizers.full_tensor_update import StateByName, unwrap_replicated, wrap_replicated
from autopart.runtime.saves.checkpoint_index import STATE_FILE, CheckpointIndex, read_index
from autopart.runtime.saves.training_state import MODEL, STATE, packed, target_of, unpacked
from autopart.runtime.shards.shard_state import splits_at
from autopart.tracing.trace_model import bind_call

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Shards = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True, repr=False)
class ResumeVerification(ShownAsText):
    """Result of `verify_resume`. `str()` of it is a readable report.

    Attributes:
        meshes: (mesh that saved, mesh that loaded).
        steps: number of training steps before the save.
        num_values: number of compared tensors: weights, buffers and optimizer state.
        different: names of tensors whose bits differ after the load, on any rank.
        losses: loss of the next step in (the uninterrupted run, the resumed run).
        loss_error: relative difference of the two losses. It is 0 if the meshes are equal and the resumed run is right.
    """

    meshes: tuple[str, str]
    steps: int
    num_values: int
    different: tuple[str, ...]
    losses: tuple[float, float]
    loss_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return not self.different and self.loss_error <= self.tolerance

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        first, second = self.meshes
        what = f"{first} to {second} after {self.steps} step{'s' * (self.steps > 1)}"
        lines = [f"{'exact' if self.ok else 'WRONG'} resume from {what}"]
        if self.different:
            names = ", ".join(self.different[:5]) + (" and more" if len(self.different) > 5 else "")
            lines.append(f"  {len(self.different)} of {self.num_values} values differ: {names}")
        else:
            lines.append(f"  {self.num_values} values equal bit for bit")
        lines.append(f"  next loss {self.losses[0]:.6g} uninterrupted, {self.losses[1]:.6g} resumed: "
                     f"relative difference {self.loss_error:.2g}")  # fmt: skip
        return "\n".join(lines)


@with_options(VerifyOptions)
def verify_resume(
    model: nn.Module, mesh_a: Any, mesh_b: Any, *, example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None, loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
    steps: int = 3, optimizer: MakeOptimizer | None = None, max_norm: float | None = None,
    batches: Sequence[Mapping[str, Any]] | None = None, options_b: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE, **options: Unpack[VerifyOptions],
) -> ResumeVerification:  # fmt: skip
    """Train on mesh A, save, load on mesh B, and compare, with all ranks in this process.

    No process group is needed. A float64 copy of the model runs `steps` training steps on mesh A. Its shards are
    written and read by the code of `pm.save` and `pm.load`. All values on mesh B must be bitwise identical to mesh A,
    and the loss of the next step must be equal up to `tolerance`.

    Args:
        model, example_args, example_kwargs, loss_fn, target: as in `verify`.
        mesh_a, mesh_b: mesh that saves, mesh that loads.
        steps: number of training steps before the save.
        optimizer, max_norm, batches: as in `verify`.
        options_b: options that are different on mesh B, such as {"zero": 3}.
        **options: `VerifyOptions`.

    Example:
        >>> assert autopart.verify_resume(model, "tp4", "dp2,pp2", example_kwargs=batch).ok    # doctest: +SKIP
    """
    if not example_args and example_kwargs is None:
        raise InputError("verify_resume() needs an example call", hint="verify_resume(..., example_kwargs=batch)")
    arguments = bind_call(model, example_args, example_kwargs or {})
    training = read_training(model, arguments, steps, optimizer, max_norm, None, batches, loss_fn is not None)
    assert training is not None
    chosen = [read_options(verify_resume, {**options, **more}) for more in ({}, options_b or {})]
    if any(one.schedule in DELAYED for one in chosen):
        raise OptionError(
            "verify_resume does not run schedule='1f1b_2bw'",
            why="a gradient of the batch before the save is not saved",
            hint="schedule='1f1b'",
        )
    run = VerificationRun(model, arguments, loss_fn, target)
    run.check_trainable(training)
    training = run.converted_training(training)
    return _compared(run, training, (Mesh.parse(mesh_a), Mesh.parse(mesh_b)), chosen, tolerance)


def _compared(
    run: VerificationRun, training: Training, meshes: tuple[Mesh, Mesh], chosen: Sequence[Any], tolerance: float
) -> ResumeVerification:
    arrangements = [run.arrange(mesh, None, options) for mesh, options in zip(meshes, chosen, strict=True)]
    connect_checkpoints()
    with restore_state(run.reference):
        full = SingleDeviceTraining(run.reference, training).names_of_full_tensors()
        first, second = (AllRanks(run.subject, arrangement, training, full) for arrangement in arrangements)
        calls = [TracedBatches(run.reference, arrangement, training) for arrangement in arrangements]
        for step in range(1, training.steps + 1):
            phase(f"training step {step} of {training.steps}")
            _backward(first, calls[0], step)
            first.update()
            first.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            phase("saving and loading")
            path = Path(folder, "save")
            path.mkdir()
            _save(first, path)
            saved = _values(first)
            _load(second, path)
        loaded = _values(second)
        different = [name for name, value in saved.items() if not _same_bits(value, loaded.get(name))]
        different += [name for name in loaded if name not in saved]
        losses = [
            _backward(ranks, of_mesh, training.steps + 1) for ranks, of_mesh in zip((first, second), calls, strict=True)
        ]
    error = float(relative(losses[0], losses[1]))
    names = str(meshes[0]), str(meshes[1])
    return ResumeVerification(
        names, training.steps, len(saved), tuple(different), (float(losses[0]), float(losses[1])), error, tolerance
    )


def _backward(ranks: AllRanks, calls: TracedBatches, step: int) -> Tensor:
    """Run forward and backward of one step on all ranks. Return the loss; several losses are added."""
    subject, ranks.program = calls.of(step)
    losses = ranks.backward(subject).losses
    return torch.stack([loss.reshape(()) for loss in losses.values()]).sum()


def _offsets(program: Program, rank: int, name: str) -> ShardOffsets:
    stored = program.parameters[name]
    cuts = splits_at(stored, program.mesh, program.mesh.coordinates(rank))
    return ShardOffsets(name, tuple(stored.shape), spans_of(stored.shape, cuts))


def _is_sharded(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _save(ranks: AllRanks, path: Path) -> None:
    """Write weights, buffers and optimizer state of all ranks, as `pm.save` does."""
    from autopart.runtime.saves.chunk_storage import IndexedWriter, write_shards

    states, others = ranks.state(), {}
    shards: list[dict[str, Tensor]] = []
    for rank, local in ranks.shards.items():
        tensors: dict[str, Tensor] = {}
        for name, parameter in local.items():
            place = _offsets(ranks.program, rank, name)
            tensors[MODEL + name] = ShardTensor(parameter.detach(), place)
            for key, entry in states[rank].get(name, {}).items():
                value = unwrap_replicated(entry)
                if _is_sharded(entry, parameter):
                    tensors[f"{STATE}{name}.{key}"] = ShardTensor(value, place)
                elif isinstance(value, Tensor):
                    tensors[f"{STATE}{name}.{key}"] = value
                else:
                    others[f"{STATE}{name}.{key}"] = value
        shards.append({**tensors, **{MODEL + name: value for name, value in ranks.buffers.items()}})
    mesh = ranks.program.mesh
    index = CheckpointIndex(1, 0, 0, torch.__version__, autopart_version(), "", str(mesh), mesh.num_ranks)
    write_shards(shards, IndexedWriter(path, index, {STATE_FILE: packed(others)}, lambda: None))


def _load(ranks: AllRanks, path: Path) -> None:
    """Read the shards of all ranks, as `pm.load` does."""
    from autopart.runtime.saves.chunk_storage import read_shards

    index = read_index(path)
    others = unpacked((path / STATE_FILE).read_bytes(), STATE_FILE)
    states: dict[int, StateByName] = {}
    for rank, local in ranks.shards.items():
        states[rank] = {}
        targets: dict[str, Tensor] = {}
        for name, parameter in local.items():
            place, prefix = _offsets(ranks.program, rank, name), f"{STATE}{name}."
            targets[MODEL + name] = ShardTensor(torch.empty_like(parameter.detach()), place)
            state = {key[len(prefix) :]: value for key, value in others.items() if key.startswith(prefix)}
            for key in (key for key in index.entries if key.startswith(prefix)):
                targets[key] = target_of(index.entries[key], place)
                value = to_plain(targets[key])
                is_sharded = isinstance(targets[key], ShardTensor)
                shapes = place.local_shape, place.shape
                state[key[len(prefix) :]] = value if is_sharded else wrap_replicated(value, *shapes)
            if state:
                states[rank][name] = state
        read_shards(path, index, targets)
        with torch.no_grad():
            for name, parameter in local.items():
                parameter.copy_(targets[MODEL + name])
    ranks.load_state(states)
    buffers = {MODEL + name: torch.empty_like(value) for name, value in ranks.buffers.items()}
    read_shards(path, index, buffers)
    for name, value in ranks.buffers.items():
        value.copy_(buffers[MODEL + name])


def _values(ranks: AllRanks) -> dict[str, Tensor]:
    """Return {name: full tensor}, assembled from the shards of all ranks.

    This does not use the code that saves and loads. A tensor whose replicas differ is returned as an empty tensor.
    """
    states = ranks.state()
    full: dict[str, Tensor] = {name: value.clone() for name, value in ranks.buffers.items()}
    known: dict[str, Tensor] = {}
    disagree: set[str] = set()
    for rank, local in ranks.shards.items():
        for name, parameter in local.items():
            place = _offsets(ranks.program, rank, name)
            entries = {name: parameter.detach()}
            entries |= {f"{name}.{key}": value for key, value in states[rank].get(name, {}).items()}
            for key, value in entries.items():
                is_sharded, value = _is_sharded(value, parameter), unwrap_replicated(value)
                value = value if isinstance(value, Tensor) else torch.tensor(value)
                shape = place.shape if is_sharded else tuple(value.shape)
                if key not in full:
                    full[key], known[key] = value.new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
                for box in boxes(place.spans) if is_sharded and place.spans else [None]:
                    at: Any = () if box is None else _slices(box.offsets, box.sizes)
                    shard = value if box is None else value[_slices(box.local_offsets, box.sizes)]
                    seen = known[key][at]
                    if bool((seen & (_bits(full[key][at]) != _bits(shard))).any()):
                        disagree.add(key)
                    full[key][at], known[key][at] = shard, True
    incomplete = {key for key, entries in known.items() if not bool(entries.all())}
    return {key: value.new_empty(0) if key in disagree | incomplete else value for key, value in full.items()}


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _bits(value: Tensor) -> Tensor:
    """View the entries of a tensor as integers, so that NaN equals NaN and 0 differs from -0."""
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.contiguous().view(BITS[value.dtype.itemsize])


def _same_bits(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (one.dim() == 0 and one.item() == other.item()) or torch.equal(_bits(one), _bits(other))

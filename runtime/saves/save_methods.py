"""`pm.save` and `pm.load`: a whole training run, saved on one mesh and resumed on any other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopart.common.progress import phase
from autopart.compat.torch_function_internals import local_values
from autopart.errors import CheckpointError, OptionError
from autopart.ir.program import Program
from autopart.plans.rank_digest import autopart_version
from autopart.runtime.batch.step_metrics import StepMeter
from autopart.runtime.checkpoint.full_optimizer import canonical_names
from autopart.runtime.checkpoint.state_dicts import shapes_of, with_offsets, with_shard_offsets
from autopart.runtime.comm.process_mesh import Process, gather_over_all
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.consistency.rank_checks import ranks_text
from autopart.runtime.consistency.replicas import Replicas
from autopart.runtime.gradients.gradient_sync import GradientSync
from autopart.runtime.saves.checkpoint_index import (
    CONFIG_FILE,
    PLAN_FILE,
    STATE_FILE,
    CheckpointIndex,
    digest_of,
    printable,
    problem_error,
    read_file,
    read_index,
    size_problems,
)
from autopart.runtime.saves.save_in_progress import Save, begin_save
from autopart.runtime.saves.step_folders import complete_in, new_names, none_complete, resolve
from autopart.runtime.saves.training_state import (
    MODEL,
    SYNC,
    VALUES,
    TrainingState,
    add_optimizers,
    class_name,
    group_problems,
    load_optimizers,
    model_targets,
    optimizer_targets,
    packed,
    random_state,
    saved_keys,
    sequence_of,
    set_random_state,
    unpacked,
)
from autopart.runtime.shards.shard_owners import shard_info_of
from autopart.runtime.training.loss_scaling import STATE as LOSS_SCALING
from autopart.tracing.meta_copy import Source


@dataclass(frozen=True)
class Resumed:
    """Result of `pm.load`: the step and samples at which the run continues.

    Attributes:
        folder: the save; None if there was none (`missing_ok`).
        step, samples: training steps, and samples of the global batches, before the save.
        extra: the dict that was passed to `pm.save` as `extra`.
    """

    folder: Path | None
    step: int = 0
    samples: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class SaveMethods:
    """Methods of a partitioned model that save and load a whole training run."""

    _process: Process
    _source: Source
    _traced: Callable[[str], Program]
    _replicas: Replicas
    _local_parameters: dict[str, nn.Parameter]
    _extra_state: dict[str, Any]
    _data_sync: GradientSync
    _in_flight: Any
    _compiler: Any
    _meter: StepMeter
    _save_loss_scaling: Callable[[Any, str], None]
    load_state_dict: Callable[..., Any]
    dp_sync_state_dict: Callable[..., dict[str, Any]]
    load_dp_sync_state_dict: Callable[[Mapping[str, Any]], None]
    _save: Save | None = None

    @meeting
    def save(
        self, folder: str | Path, *, optimizer: Any = None, scheduler: Any = None, step: int | None = None,
        extra: Mapping[str, Any] | None = None, wait: bool = True, keep: int | None = None,
    ) -> Save:  # fmt: skip
        """Save the training run in a new folder `step-00000300` of `folder`. Every rank must call it.

        Saves weights, optimizers, schedulers, loss scale, random state, `dp_sync` state, the plan, and the numbers of
        steps and samples, in names and shapes of the unpartitioned model. `pm.load` resumes on any mesh. The new folder
        gets its name only when it is complete, so an interrupted save does not damage earlier ones. Gradients are not
        saved, so call it after `optimizer.step()`.

        Args:
            folder: folder of all saves of the run, on a file system that all ranks share.
            optimizer, scheduler: one, or a list of several.
            step: number of the save. None: number of training steps that this module has run.
            extra: further values: numbers, texts, tensors, lists and dicts. The values of the first rank are saved.
            wait: False to write in a background thread, while training continues. The next `save` waits for it.
            keep: number of complete saves to keep. Older ones are deleted when the new one is complete.
        Raises CheckpointError on every rank if one rank cannot write.

        Example:
            pm.save("run", optimizer=optimizer, scheduler=scheduler, wait=False, keep=2)
        """
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise OptionError(f"keep={keep!r} is not a number of saves", hint="keep=2")
        self._in_flight.check_landed("save()")
        self._finish_save()
        program, process, parent = self._traced("save()"), self._process, Path(folder)
        phase(f"saving in {parent}")
        self._replicas.check_before("save", program, self._local_parameters)
        state, aliases = self._training_state(
            program, sequence_of(optimizer), sequence_of(scheduler), dict(extra or {})
        )
        step = self._meter.total_steps if step is None else step
        problems, files, names, number = list[str](), dict[str, bytes](), None, 0
        if _is_first(process):
            try:
                files = {STATE_FILE: packed(state.values), PLAN_FILE: self._compiler.plan.to_json().encode()}
                if hasattr(config := getattr(self._source.model, "config", None), "to_json_string"):
                    files[CONFIG_FILE] = config.to_json_string().encode()
                parent.mkdir(parents=True, exist_ok=True)
                names = new_names(parent, step)
                number = 1 + max((one.index.number for one in complete_in(parent) if one.index), default=0)
                (parent / names[1]).mkdir()
            except (OSError, CheckpointError) as error:
                problems.append(str(error))
        (names, problems), *_ = gather_over_all((names, problems), process)
        if problems:
            raise CheckpointError(f"cannot save in {parent}", why=problems[0])
        index = CheckpointIndex(
            number, step, self._meter.total_samples, torch.__version__, autopart_version(),
            type(self._source.model).__name__, str(process.mesh), process.mesh.num_ranks,
            tuple(map(class_name, sequence_of(optimizer))), tuple(map(class_name, sequence_of(scheduler))),
            aliases=aliases,
        )  # fmt: skip
        save = begin_save(state.tensors, index, files, parent / names[1], parent / names[0], process, keep, wait)
        self._save = None if wait else save
        return save

    @meeting
    def load(
        self, folder: str | Path, name: str | None = None, *, optimizer: Any = None, scheduler: Any = None,
        missing_ok: bool = False,
    ) -> Resumed:  # fmt: skip
        """Load a save of any mesh, and continue its training run. Every rank must call it.

        If the mesh is unchanged, the next steps are bitwise identical to those of an uninterrupted run. First, all
        ranks compare the save with the model and the optimizers, read their shards and compare checksums. If anything
        differs, every rank raises a CheckpointError that lists the differences, and nothing is changed.

        Args:
            folder: a save, or, if `name` is passed, a folder of saves.
            name: "latest" for the last complete save of `folder`, or the name of a save.
            optimizer, scheduler: as in `save`. None: its state is not loaded.
            missing_ok: True to return step 0 if "latest" finds no complete save.

        Example:
            start = pm.load("run", "latest", optimizer=optimizer, scheduler=scheduler, missing_ok=True).step
        """
        self._in_flight.check_landed("load()")
        self._finish_save()
        program, process = self._traced("load()"), self._process
        path = self._resolved_save(Path(folder), name, missing_ok)
        if path is None:
            return Resumed(None)
        phase(f"loading {path}")
        optimizers, schedulers = sequence_of(optimizer), sequence_of(scheduler)
        with local_values():
            index, values = self._checked_save(path, program, optimizers, schedulers)
            first = canonical_names(program, self._source.model)
            local = self._local_state_dict()
            keys = saved_keys(index, local, first)
            of_model, of_optimizers = model_targets(local, keys), optimizer_targets(optimizers, index, first)
            of_sync = self._sync_targets(index, values)
            self._read_shards(path, index, {**of_model, **of_optimizers, **of_sync})
            loaded = {name: of_model[key] for name, key in keys.items()}
            self.load_state_dict({**loaded, **values["model"]})
            if optimizers:
                load_optimizers(optimizers, of_optimizers, values, first)
        if of_sync:
            tensors = {key[len(SYNC) :]: value for key, value in of_sync.items()}
            self.load_dp_sync_state_dict({**values["dp_sync"], **tensors})
        for one, state in zip(schedulers, values["schedulers"], strict=False):
            one.load_state_dict(state)
        if states := values["random"]:
            own = states[process.rank] if len(states) == process.mesh.num_ranks else states[0]
            set_random_state(own, process.device, self._compiler.set_random_state)
        self._meter.total_steps, self._meter.total_samples = index.step, index.samples
        return Resumed(path, index.step, index.samples, values["extra"])

    # --- Saving

    def _finish_save(self) -> None:
        """Wait for the save that is being written, if any. Raises its error if it has failed, but only once."""
        pending, self._save = self._save, None
        if pending is not None:
            pending.wait()

    def _local_state_dict(self) -> dict[str, Any]:
        """Return this rank's state dict, without the comparison of replicas that `state_dict` prepares."""
        module = cast(nn.Module, self)
        state_dict: dict[str, Any] = nn.Module.state_dict(module)
        with_shard_offsets(module, state_dict, "", self._extra_state)
        self._save_loss_scaling(state_dict, "")
        return state_dict

    def _training_state(
        self, program: Program, optimizers: list[Any], schedulers: list[Any], extra: dict[str, Any]
    ) -> tuple[TrainingState, dict[str, str]]:
        """Return (this rank's state, {second name of a tied parameter: first name}). A collective call."""
        state, process = TrainingState(), self._process
        first = canonical_names(program, self._source.model)
        with local_values():
            state_dict = self._local_state_dict()
            unique = {name: value for name, value in state_dict.items() if first.get(name, name) == name}
            unique |= {first[name]: value for name, value in state_dict.items() if name in first}
            if process.apart:  # data ranks have different weights, which the state of dp_sync contains
                for name, mean in self._data_sync.replica_mean(self._local_parameters).items():
                    info = shard_info_of(self._local_parameters[name])
                    unique[first[name]] = mean.detach() if info is None else with_offsets(mean.detach(), info)
            state.values["model"] = state.add(MODEL, unique)
            add_optimizers(state, optimizers, first, process)
        state.values["dp_sync"] = {}
        if type(self._data_sync) is not GradientSync:
            state.values["dp_sync"] = state.add(SYNC, self.dp_sync_state_dict())
        state.values["schedulers"] = [one.state_dict() for one in schedulers]
        state.values["extra"] = extra
        mine = packed(random_state(process.device, self._compiler.random_state()))
        are_equal = len(set(gather_over_all(digest_of(mine), process))) == 1
        states = [mine] if are_equal else gather_over_all(mine, process)
        state.values["random"] = [unpacked(one, "random state") for one in states]
        aliases = {MODEL + name: MODEL + target for name, target in first.items() if name != target}
        return state, aliases

    # --- Loading

    def _resolved_save(self, folder: Path, name: str | None, missing_ok: bool) -> Path | None:
        """Return the folder of the save to load, which the first rank chooses for all ranks."""
        result: Any = None
        if _is_first(self._process):
            try:
                result = resolve(folder, name, lambda text: warnings.warn(text, stacklevel=5))
            except (OSError, CheckpointError) as error:
                result = error if isinstance(error, CheckpointError) else CheckpointError(str(error))
        result, *_ = gather_over_all(result, self._process)
        if isinstance(result, CheckpointError):
            raise result
        if result is None and not missing_ok:
            raise none_complete(folder)
        return result

    def _checked_save(
        self, path: Path, program: Program, optimizers: list[Any], schedulers: list[Any]
    ) -> tuple[CheckpointIndex, dict[str, Any]]:
        """Read and check the index of a save. Return (index, values of the save that are not tensors).

        Raises CheckpointError on every rank if the save does not fit the model or the optimizers.
        """
        problems, index, values = list[str](), None, dict[str, Any]()
        try:
            index = read_index(path)
            problems = size_problems(path, index)
            if not problems:
                values = unpacked(read_file(path, index.files[STATE_FILE]), STATE_FILE)
                problems = [f"{STATE_FILE} has no '{key}'" for key in VALUES if key not in values]
        except (OSError, CheckpointError) as error:
            problems = [str(error).replace("\n", "; ")]
        self._raise_problems(path, problems)
        assert index is not None
        problems = self._model_problems(index, values, program)
        problems += _count_problems("optimizer", [class_name(one) for one in optimizers], index.optimizers)
        problems += _count_problems("scheduler", [class_name(one) for one in schedulers], index.schedulers)
        if optimizers and len(optimizers) == len(index.optimizers):
            first = canonical_names(program, self._source.model)
            problems += group_problems(optimizers, values["optimizer groups"], first, self._process)
        self._raise_problems(path, problems)
        return index, values

    def _model_problems(self, index: CheckpointIndex, values: Mapping[str, Any], program: Program) -> list[str]:
        """Return one text for each difference between the saved entries and those of the model."""
        problems = []
        expected, local = shapes_of(program, self._source.model), self._local_state_dict()
        keys = saved_keys(index, expected, canonical_names(program, self._source.model))
        for name, shape in expected.items():
            if shape is None:
                continue
            if name not in keys:
                problems.append(f"'{name}' is not saved")
                continue
            entry = index.entries[keys[name]]
            if entry.shape != shape:
                problems.append(f"'{name}' has shape {list(entry.shape)} in the save, {list(shape)} in the model")
            elif isinstance(local.get(name), Tensor) and f"torch.{entry.dtype}" != str(local[name].dtype):
                dtype = str(local[name].dtype).removeprefix("torch.")
                problems.append(f"'{name}' has dtype {entry.dtype} in the save, {dtype} in the model")
        used = set(keys.values())
        unknown = [name for name in index.entries if name.startswith(MODEL) and name not in used]
        problems += [f"the model has no '{printable(name[len(MODEL) :])}', which was saved" for name in unknown]
        problems += [f"'{name}' is not saved" for name in self._extra_state if name not in values["model"]]
        known = {*self._extra_state, LOSS_SCALING}
        return problems + [
            f"the model has no '{name}', which was saved" for name in values["model"] if name not in known
        ]

    def _sync_targets(self, index: CheckpointIndex, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return {name in the index: tensor to load into} for the state of `dp_sync` methods.

        Empty if this module has no such method, or if the save has no such state.
        """
        if type(self._data_sync) is GradientSync or not values["dp_sync"]:
            return {}
        own = self.dp_sync_state_dict(data_ranks=int(values["dp_sync"]["data_ranks"]))
        tensors = {SYNC + name: value for name, value in own.items() if isinstance(value, Tensor)}
        missing = [f"the state of dp_sync has no '{name}'" for name in tensors if name not in index.entries]
        self._raise_problems(Path(), missing)
        return tensors

    def _read_shards(self, path: Path, index: CheckpointIndex, targets: Mapping[str, Tensor]) -> None:
        from autopart.runtime.saves.chunk_storage import read_shards

        problems: list[str] = []
        try:
            read_shards(path, index, targets)
        except (OSError, CheckpointError) as error:
            problems.append(str(error).replace("\n", "; "))
        self._raise_problems(path, problems)

    def _raise_problems(self, path: Path, problems: list[str]) -> None:
        """Raise CheckpointError on all ranks if any rank has found problems. A collective call."""
        everyones = gather_over_all(problems, self._process)
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(everyones):
            for problem in of_rank:
                ranks.setdefault(problem, []).append(rank)
        group = self._process.host_group
        texts = []
        for problem, of_problem in ranks.items():
            on = "" if group is None or len(of_problem) == len(everyones) else f" ({ranks_text(of_problem, group)})"
            texts.append(problem + on)
        if texts:
            raise problem_error(path, texts)


def _is_first(process: Process) -> bool:
    return process.host_group is None or process.host_group.index == 0


def _count_problems(what: str, given: list[str], saved: tuple[str, ...]) -> list[str]:
    """Return a text if the classes of optimizers or schedulers differ from the saved classes."""
    if not given or tuple(given) == saved:
        return []
    return [f"the save has {what} {', '.join(saved) or 'none'}, and {', '.join(given)} is to be loaded"]

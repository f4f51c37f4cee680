"""Folders in the format of `from_pretrained`: safetensors files, an index, and the config.

Every rank writes some of the files. A file is gathered tensor by tensor, so that no rank has the full model in memory.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.common.files import write_whole
from autopart.common.memory_size import parse_size
from autopart.compat.torch_function_internals import local_values
from autopart.errors import CheckpointError, UsageError
from autopart.ir.program import Program
from autopart.ir.sharding import local_shard_of
from autopart.runtime.checkpoint.saved_shard import contains_shards
from autopart.runtime.comm.process_mesh import Process, is_on_any_rank
from autopart.runtime.comm.stage_ranks import stage_style_of
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.consistency.replicas import Replicas
from autopart.runtime.gradients.gradient_sync import GradientSync
from autopart.runtime.shards.shard_owners import shard_info_of
from autopart.runtime.shards.shard_state import gather
from autopart.runtime.weights.load_weights import Checkpoint
from autopart.runtime.weights.safetensors_files import INDEX, SINGLE
from autopart.tracing.meta_copy import Source

GATHERED_BYTES = 2**27
"""Maximum bytes of the tensors that are gathered together. A larger tensor is gathered alone."""
ADAPTER, PROMPT = "adapter_model.safetensors", "prompt_embeddings"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the model's state dict, to write into a folder.

    Attributes:
        stored: name of the parameter in the partitioned model; None for a tensor that need not be gathered (a buffer).
    """

    name: str
    size_bytes: int
    stored: str | None


def saved_tensors(model: nn.Module, program: Program, dtypes: Mapping[str, torch.dtype]) -> list[SavedTensor]:
    """Return the tensors to write into a folder of the model.

    A tied tensor is listed once, under the name with which transformers saves it.
    """
    ties = getattr(model, "_tied_weights_keys", None) or ()
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    names: dict[Any, list[str]] = {}
    values = model.state_dict(keep_vars=True)
    for name, value in values.items():
        if isinstance(value, Tensor) and name not in ignored:
            names.setdefault(program.stored_names.get(name, id(value)), []).append(name)
    result = []
    for key, group in names.items():
        name = next((one for one in group if not any(re.search(tie, one) for tie in ties)), group[0])
        if isinstance(key, str):
            numel = math.prod(program.parameters[key].shape)
            result.append(SavedTensor(name, numel * dtypes[key].itemsize, key))
        else:
            result.append(SavedTensor(name, values[name].nbytes, None))
    return result


def files_of(tensors: Sequence[SavedTensor], max_bytes: int) -> list[list[SavedTensor]]:
    """Divide tensors over files of at most `max_bytes`, or one tensor per file if it is larger."""
    files: list[list[SavedTensor]] = []
    size = 0
    for tensor in tensors:
        if not files or size + tensor.size_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.size_bytes
    return files


class PretrainedFolderMethods:
    """Methods of a partitioned model that write and read folders in the format of `from_pretrained`."""

    _process: Process
    _source: Source
    _schedule: str | None
    _traced: Callable[[str], Program]
    _replicas: Replicas
    _local_parameters: dict[str, nn.Parameter]
    _local_buffers: dict[str, Tensor]
    _data_sync: GradientSync
    _in_flight: Any

    @meeting
    def save_pretrained(
        self, save_directory: str | Path, *, max_shard_size: int | str = "5GB", tokenizer: Any = None,
        is_main_process: bool = True, save_function: Any = None, state_dict: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Write a folder that `from_pretrained` loads on one device.

        Every rank must call it, with the same folder. Every rank writes some of the safetensors files. The first rank
        writes the index and the config. For a PEFT model, the first rank writes only the adapter, as PEFT does.

        Args:
            max_shard_size: largest size of a file: bytes, or a text such as "5GB". A tensor is never divided.
            tokenizer: tokenizer or processor to save in the folder.
            is_main_process, save_function: accepted for scripts of accelerate, and not used.
            state_dict: full tensors, such as `pm.full_state_dict()`. The first rank writes them, not the model's.
        Raises UsageError for shards and other options, OptionError if `max_shard_size` is no size, and CheckpointError
        on every rank if one rank cannot write.

        Example:
            pm.save_pretrained("tuned")  # on every rank
            model = AutoModelForCausalLM.from_pretrained("tuned")  # in one process
        """
        if options:
            raise UsageError(f"save_pretrained({next(iter(options))}=...) does not work for a partitioned model",
                             why="every rank writes the tensors that it gathers from all ranks",
                             hint="pm.full_state_dict(), and save_pretrained of the unpartitioned model")  # fmt: skip
        if state_dict is not None:
            self._check_given(state_dict)
        program = self._traced("save_pretrained()")
        self._replicas.check_before("save_pretrained", program, self._local_parameters)
        folder = Path(save_directory)
        model: Any = self._source.model
        with self._raised_on_every_rank(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:
            with self._raised_on_every_rank(folder):
                if self._process.rank == 0:
                    save_given(model, state_dict, folder, max_shard_size)
        elif hasattr(model, "peft_config"):
            trained = [name for name in program.parameters if model.get_parameter(name).requires_grad]
            values = self._gathered(program, trained)
            with self._raised_on_every_rank(folder):
                if self._process.rank == 0:
                    with _with_values(model, values):  # PEFT computes prompts from the parameters
                        model.save_pretrained(str(folder), state_dict=values, save_embedding_layers=False)
        else:
            self._save_files(program, model, folder, parse_size(max_shard_size, "max_shard_size"))
        with self._raised_on_every_rank(folder):
            if self._process.rank == 0 and tokenizer is not None:
                tokenizer.save_pretrained(str(folder))

    def _check_given(self, state_dict: Mapping[str, Any]) -> None:
        """Raise UsageError on every rank if `save_pretrained(state_dict=...)` got shards."""
        if is_on_any_rank(contains_shards(state_dict), self._process):
            raise UsageError("save_pretrained(state_dict=...) needs full tensors",
                             why="pm.state_dict() has the shards of this rank",
                             hint="state_dict=pm.full_state_dict(), or leave state_dict= out")  # fmt: skip
        if not hasattr(self._source.model, "save_pretrained"):
            raise UsageError("save_pretrained(state_dict=...) needs a model that has this method",
                             why=f"{type(self._source.model).__name__} has no save_pretrained",
                             hint="leave state_dict= out")  # fmt: skip

    def load_pretrained(self, folder: str | Path) -> None:
        """Load weights from a folder of safetensors files. Each rank reads only its shards.

        For a PEFT model, the folder must contain an adapter, and only the adapter is loaded. Raises CheckpointError if
        the files do not fit the model.
        """
        program = self._traced("load_pretrained()")
        model: Any = self._source.model
        self._in_flight.check_landed("load_pretrained()")
        if hasattr(model, "peft_config"):
            self._load_adapter(program, model, Path(folder))
            return
        checkpoint = Checkpoint(model, folder)
        cuts = {}
        for name, parameter in self._local_parameters.items():
            info = shard_info_of(parameter)
            assert info is not None
            cuts[name] = info.local_splits
        with torch.no_grad(), local_values():
            for name, value in checkpoint.read(cuts):
                self._local_parameters[name].copy_(value)
            for name, value in checkpoint.non_parameters().items():
                if name in self._local_buffers:
                    self._local_buffers[name].copy_(value)

    def _load_adapter(self, program: Program, model: Any, folder: Path) -> None:
        from safetensors.torch import load_file

        if not (folder / ADAPTER).is_file():
            raise CheckpointError(f"{folder} has no {ADAPTER}", why="the partitioned model is a PEFT model",
                                  hint="a folder that save_pretrained of a PEFT model has written")  # fmt: skip
        values, own_names = load_file(str(folder / ADAPTER)), adapter_names(program, model)
        missing = sorted(own_names.keys() - values.keys())
        if missing:
            raise CheckpointError(f"the adapter in {folder} does not fit the model", why=f"it lacks {missing[:8]}",
                                  hint="an adapter that was saved with the same PEFT config")  # fmt: skip
        loaded = {own_names[name]: value for name, value in values.items() if name in own_names}
        with torch.no_grad(), local_values():
            for name, parameter in self._local_parameters.items():
                info = shard_info_of(parameter)
                if name in loaded and info is not None:
                    parameter.copy_(local_shard_of(loaded[name], info.local_splits))

    def _save_files(self, program: Program, model: nn.Module, folder: Path, max_bytes: int) -> None:
        num_ranks = self._process.mesh.num_ranks
        dtypes = {name: model.get_parameter(name).dtype for name in program.parameters}
        tensors = saved_tensors(model, program, dtypes)
        total = sum(tensor.size_bytes for tensor in tensors)
        files = files_of(tensors, min(max_bytes, max(1, -(-total // num_ranks))))
        width, names = len(files), []
        for index in range(width):
            names.append(SINGLE if width == 1 else f"model-{index + 1:05}-of-{width:05}.safetensors")
        for start in range(0, width, num_ranks):  # in a round, each rank writes one file
            own: dict[str, Tensor] = {}
            for offset, file in enumerate(files[start : start + num_ranks]):
                for group in files_of(file, GATHERED_BYTES):
                    values = self._gathered(program, [one.stored for one in group if one.stored is not None])
                    if self._process.rank == offset:
                        own |= {one.name: self._value(one, values).cpu().contiguous() for one in group}
            with self._raised_on_every_rank(folder):
                if own:
                    write_file(own, folder / names[start + self._process.rank])
        with self._raised_on_every_rank(folder):
            if self._process.rank == 0:
                placed = {one.name: name for file, name in zip(files, names, strict=True) for one in file}
                write_index(folder, names, placed, total)
                save_config(model, folder)

    def _gathered(self, program: Program, names: Sequence[str]) -> dict[str, Tensor]:
        """Return {name: full tensor} on every rank."""
        with local_values():
            local = self._data_sync.replica_mean(self._local_parameters)
            return gather(local, program, self._process, stage_style_of(self._schedule), set(names))

    def _value(self, tensor: SavedTensor, gathered: Mapping[str, Tensor]) -> Tensor:
        return self._local_buffers[tensor.name] if tensor.stored is None else gathered[tensor.stored]

    @contextmanager
    def _raised_on_every_rank(self, folder: Path) -> Iterator[None]:
        """Context manager that waits for all ranks at its end. If its block fails on a rank, all ranks raise."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever a file system or a tokenizer raises
            problem = error
        has_failed = is_on_any_rank(problem is not None, self._process)
        if problem is not None:
            raise CheckpointError(f"cannot write to {folder}", why=str(problem) or type(problem).__name__) from problem
        if has_failed:
            raise CheckpointError(f"cannot write to {folder}", why="another rank failed; it has the reason")


def save_given(model: Any, state_dict: Mapping[str, Any], folder: Path, max_shard_size: int | str) -> None:
    """Write the values of `state_dict` by the `save_pretrained` of the original model."""
    values = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in state_dict.items()}
    extra = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {"max_shard_size": max_shard_size}
    model.save_pretrained(str(folder), state_dict=values, **extra)


def write_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. An existing file is replaced only when the new file is complete."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            "save_pretrained() needs the package safetensors", hint="pip install safetensors"
        ) from None
    part = path.with_name(f".{path.name}.part")
    save_file(dict(tensors), str(part), metadata={"format": "pt"})
    part.replace(path)


def write_index(folder: Path, names: Sequence[str], placed: Mapping[str, str], total: int) -> None:
    """Write the index of a folder if it has several files, and delete weight files of earlier saves."""
    earlier = [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX]
    if len(names) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}, indent=2)
        write_whole(folder / INDEX, text + "\n")
        earlier.remove(folder / INDEX)
    for path in earlier:
        if path.name not in names:
            path.unlink(missing_ok=True)


def save_config(model: Any, folder: Path) -> None:
    """Write the config, and the generation config of a model that generates."""
    config = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if dtype is not None and hasattr(config, "dtype"):
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(str(folder))
    if getattr(model, "can_generate", lambda: False)() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(str(folder))


def adapter_names(program: Program, model: Any) -> dict[str, str]:
    """Return {name in the adapter file of PEFT: name of the parameter} for the adapter of a PEFT model."""
    from peft import get_peft_model_state_dict

    own = {name: p for name in program.parameters if (p := model.get_parameter(name)).requires_grad}
    if model.peft_config[model.active_adapter].is_prompt_learning:
        embedding = f"prompt_encoder.{model.active_adapter}.embedding.weight"
        if set(own) != {embedding}:
            raise CheckpointError(
                "PEFT's file of a prompt encoder cannot be loaded for training",
                why="it has the prompt that the encoder computes, and lacks the encoder's parameters",
                hint="pm.save and pm.load, or a checkpoint of Trainer to resume from",
            )
        return {PROMPT: embedding}
    saved = get_peft_model_state_dict(model, state_dict=dict(own), save_embedding_layers=False)
    names = {id(parameter): name for name, parameter in own.items()}
    return {key: names[id(value)] for key, value in saved.items() if id(value) in names}


@contextmanager
def _with_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context manager in which parameters of the original model have these values."""
    parameters = {name: model.get_parameter(name) for name in values}
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]

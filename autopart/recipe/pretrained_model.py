"""Models of transformers from a folder with a `config.json`, on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.common.scoped import default_dtype
from autopart.errors import CheckpointError, InputError, OptionError

ADAPTER_CONFIG = "adapter_config.json"


def meta_model(folder: Path, task: str | type | None, dtype: torch.dtype | str | None, changes: Any) -> nn.Module:
    """Return the transformers model of a folder, on the meta device and in eval mode.

    Args:
        task: a task such as "causal-lm" or "text-generation", the name of a transformers class, or a class. None: the
            class that the config names.
        dtype: dtype of the parameters. None or "auto": the dtype in the config.
        changes: {attribute of the config: new value}.
    """
    try:
        import transformers
    except ImportError:
        raise InputError("from_pretrained() needs transformers", hint="pip install transformers") from None
    if not (folder / "config.json").is_file():
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        raise CheckpointError(
            f"{folder} has no config.json", why="it is an adapter of PEFT" if is_adapter else "",
            hint="parallelize(PeftModel.from_pretrained(model, folder), ...)" if is_adapter else
            "a folder that save_pretrained has written",
        )  # fmt: skip
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"the weights in {folder} are quantized",
            why="autopart loads plain floating-point weights",
            hint="a folder with weights in bfloat16 or float32",
        )
    kind = _class_of(transformers, config, task)
    wanted = config.dtype if dtype in (None, "auto") else dtype
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    with torch.device("meta"), default_dtype(wanted):
        build = kind._from_config if hasattr(kind, "_from_config") else kind.from_config
        model: Any = build(config, dtype=wanted) if wanted is not None else build(config)
    generation = folder / "generation_config.json"
    if generation.is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _class_of(transformers: Any, config: Any, task: str | type | None) -> Any:
    if isinstance(task, type):
        return task
    if task is None:
        names = config.architectures or []
        if not names or not hasattr(transformers, names[0]):
            raise InputError(
                "the config names no class of transformers", why=f"its 'architectures' are {names}",
                hint="from_pretrained(..., task='causal-lm')",
            )  # fmt: skip
        return getattr(transformers, names[0])
    if hasattr(transformers, task):
        return getattr(transformers, task)
    names = [name for name in dir(transformers) if name.startswith("AutoModelFor")]
    tasks = {_plain(name.removeprefix("AutoModelFor")): name for name in names}
    pipelines = transformers.pipelines.SUPPORTED_TASKS
    if task in pipelines:
        return pipelines[task]["pt"][0]
    if _plain(task) in tasks:
        return getattr(transformers, tasks[_plain(task)])
    raise OptionError(
        f"task={task!r} is not known", why=f"transformers has the tasks {', '.join(sorted(pipelines))}",
        hint="'causal-lm', 'sequence-classification', ..., or a class such as AutoModelForCausalLM",
    )  # fmt: skip


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()

"""Folders of pretrained models: a path, or the name of a repository on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from autopart.errors import CheckpointError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIGS = ("*.json", "*.jinja")
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "adapter_model.safetensors")


@dataclass(frozen=True)
class Pretrained(os.PathLike):
    """Checkpoint folder for `weights=`.

    Parameters that its files lack are initialised, as in `from_pretrained`.
    """

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)


def is_hub_name(name: str | Path) -> bool:
    """Return True if `name` looks like `openai-community/gpt2` and no path of this name exists."""
    text = str(name)
    is_file = text.endswith((".json", ".safetensors", ".bin", ".pt"))
    return isinstance(name, str) and not Path(name).exists() and not is_file and bool(_NAME.fullmatch(text))


def pretrained_folder(name: str | Path, *, weights: bool = True, revision: str | None = None) -> Path:
    """Return the local folder of a pretrained model. Download the model from the hub if it is not cached.

    Args:
        name: a path, which is returned unchanged, or a name on the Hugging Face hub.
        weights: True to get the weights (safetensors files) in addition to the configuration.
        revision: branch, tag or commit of the hub repository.
    """
    if not is_hub_name(name):
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(f"there is no folder '{name}', and names on the hub need the package huggingface_hub",
                              hint="pip install huggingface_hub") from None  # fmt: skip
    patterns = [*_CONFIGS, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"there is no folder '{name}', and no such model on the hub or in its local cache",
            why=next(iter(str(error).strip().splitlines()), type(error).__name__).removeprefix("Got: "),
            hint="the path of a folder, or a name such as 'openai-community/gpt2'; "
            "HF_HUB_OFFLINE=1 uses the cache only",
        ) from None  # fmt: skip

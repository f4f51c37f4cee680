"""Models named on the command line: `package.module:callable`, or a transformers `config.json`.

Some published configs are shipped by name; nothing is downloaded. transformers is not a dependency: it is imported only
to read a config.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.common.files import read_text
from autopart.common.hub import pretrained_folder
from autopart.common.json_text import parse_json
from autopart.common.progress import phase
from autopart.common.scoped import default_dtype
from autopart.compat.torch_internals import tree_map
from autopart.errors import CheckpointError, InputError, OptionError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CONFIGS = Path(__file__).parent.parent / "configs"
"""Folder of transformers configs with the published sizes of models.

Sources: GPT-2 (Radford 2019), GPT-3 (Brown 2020; the padded vocabulary of Narayanan 2021), Llama 2 and 3 (Touvron 2023,
Grattafiori 2024), Mixtral (Jiang 2024).
"""

BATCH, SEQUENCE, COMPUTED_SEQUENCE = 8, 512, 128
"""Sizes of an example call: samples, default tokens per sample, and maximum tokens for a run.

The default is used if the config has no length. The maximum applies to commands that run the model.
"""

LONGEST = 2048
"""Maximum default number of tokens per sample of an example."""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""Names that configs use for the maximum sequence length."""

_TOKEN_LABELS = ("LMHeadModel", "LMHead", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


@dataclass(frozen=True)
class ModelSource:
    """A model and one example call of it, as {input name: value}.

    `example` is None if the callable returned only a model. `note` describes the example for the user.
    """

    model: nn.Module
    example: Mapping[str, Any] | None = None
    note: str = ""


@dataclass(frozen=True)
class SourceOptions:
    """Options to build the model and its example.

    Attributes:
        meta: True to create weights on the meta device, with shapes but no values.
        dtype: a key of `DTYPES`. None: the dtype of the callable, or for a config its own dtype on `meta`, else
            float32.
        batch, sequence: samples and tokens per sample of the example, for configs. None: 8 samples, and as many tokens
            as the config allows.
        short: True to use at most 128 tokens, for commands that run the model instead of only planning it.
    """

    meta: bool = False
    dtype: str | None = None
    batch: int | None = None
    sequence: int | None = None
    seed: int = 0
    short: bool = False


def from_callable(name: str, options: SourceOptions) -> ModelSource:
    """Return the model that `package.module:callable` makes, and its example if it returns both.

    The callable returns the model, or `(model, kwargs)` with the arguments of an example call. The module is found on
    Python's path or in the current directory. Raises InputError if there is no such callable or it returns something
    else. Raises OptionError if the options set a batch or sequence, because the callable makes its own example.
    """
    for option, value in (("--batch", options.batch), ("--sequence", options.sequence)):
        if value is not None:
            raise OptionError(f"{option} only applies to --hf-config", why=f"{name} makes its own example inputs")
    build = _find(name)
    torch.manual_seed(options.seed)
    with _creation_context(options.meta, None):
        built = build()
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not (example is None or isinstance(example, Mapping)):
        raise InputError(
            f"{name}() returned {_kinds(built)}",
            why="--model needs an nn.Module, or (nn.Module, dict of keyword arguments)",
            hint="def build(): return model, {'input_ids': ids, 'labels': labels}",
        )
    if options.dtype is not None:
        dtype = DTYPES[options.dtype]
        model = model.to(dtype)
        example = tree_map(lambda x: _cast(x, dtype), example)
    return ModelSource(model, example)


def _kinds(built: Any) -> str:
    """Return the types of a callable's result as text, for errors: `a tuple of Linear, int`."""
    inner = f" of {', '.join(type(part).__name__ for part in built)}" if isinstance(built, tuple) else ""
    return f"a {type(built).__name__}{inner}"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _find(name: str) -> Any:
    """Return the callable that `package.module:callable` names."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InputError(f"--model {name} names no callable", hint="--model package.module:callable")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the missing module is one that the user's module imports
        raise InputError(
            f"--model {name}: there is no module '{error.name}'",
            why="searched the Python path and the current directory",
            hint="run in the directory that holds it, or set PYTHONPATH",
        ) from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [n for n, v in vars(target).items() if callable(v) and not n.startswith("_")]
            raise InputError(f"--model {name}: '{module_name}' has no '{attribute}'", hint=", ".join(public[:8]))
        target = getattr(target, part)
    if not callable(target):
        raise InputError(
            f"--model {name} is a {type(target).__name__}, not a callable", hint="a function that returns the model"
        )
    return target


@contextmanager
def _creation_context(meta: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """Set the default dtype, and the meta device if `meta`, for modules created in a `with` block."""
    with default_dtype(dtype), torch.device("meta" if meta else "cpu"):
        yield


# transformers configs


def from_hf_config(path: str | Path, options: SourceOptions) -> ModelSource:
    """Return a transformers model built from its `config.json`, with random tokens as its example call.

    Weights are random, or have no values if `options.meta` is set. The class is the first of the config's
    `architectures`, else the language model class for the config's `model_type`. Raises InputError if the file, its
    `model_type` or its class is unknown, or the model does not take tokens.
    """
    phase("reading the config")  # transformers takes long to import
    config = _read_config(_config_path(path))
    kind = _model_class(config, path)
    config_dtype = str(config.dtype).removeprefix("torch.") if options.meta and config.dtype is not None else "float32"
    dtype = DTYPES.get(options.dtype or config_dtype, torch.float32)
    torch.manual_seed(options.seed)
    phase("making the model")
    with _creation_context(options.meta, dtype):
        model: Any = kind(config)
    if getattr(model, "loss_type", "") is None:  # pass transformers' default, to avoid its warning
        model.loss_type = "ForCausalLM"
    example = _tokens(model, config, options)
    return ModelSource(model, example, _note(example, config, options))


def config_names() -> list[str]:
    """Return the names of the shipped configs."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def _config_path(named: str | Path) -> Path:
    """Return the file of a config, given the name of a shipped config, a path or a hub name.

    Raises InputError if there is none.
    """
    path = Path(named)
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    if path.exists() or path.suffix == ".json":
        return path
    if str(named) in config_names():
        return CONFIGS / f"{named}.json"
    try:
        return pretrained_folder(str(named), weights=False) / "config.json"
    except CheckpointError as error:
        raise InputError(
            f"there is no config at {named}",
            why=f"it is no file, no config that autopart ships, and not on the hub: {error.why}",
            hint=f"one of {', '.join(config_names())}, the path of a config.json, or a name such as Qwen/Qwen3-0.6B",
        ) from None


def _longest(config: Any) -> int | None:
    """Return the maximum sequence length that a config sets; None if it sets none."""
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in _LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _sequence(config: Any, options: SourceOptions) -> int:
    longest = _longest(config)
    if options.sequence is not None:
        return options.sequence
    return min(longest or SEQUENCE, COMPUTED_SEQUENCE) if options.short else longest or SEQUENCE


def _note(example: Mapping[str, Tensor], config: Any, options: SourceOptions) -> str:
    """Describe the example: `8 rows x 128 tokens a step, of the 1,024 tokens that the config allows; ...`."""
    rows, tokens = example["input_ids"].shape
    longest = _longest(config)
    allowed = f", of the {longest:,} tokens that the config allows" if longest is not None and tokens < longest else ""
    unsaid = [f"--{name}" for name in ("batch", "sequence") if getattr(options, name) is None]
    change = f"; {' and '.join(unsaid)} change{'s' * (len(unsaid) == 1)} it" if unsaid else ""
    return f"{rows:,} sample{'s' * (rows > 1)} x {tokens:,} tokens a step{allowed}{change}"


def example_of(model: nn.Module) -> dict[str, Tensor]:
    """Return an example call of a transformers model: two samples of at most `LONGEST` random tokens.

    Raises InputError for any other model.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"there are no example inputs for {type(model).__name__}",
            why="autopart makes example inputs only for models with a transformers config",
            hint="example_kwargs={'input_ids': ids, 'labels': labels}",
        )  # fmt: skip
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST
    return _tokens(model, config, SourceOptions(batch=2, sequence=min(limit, LONGEST)))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "--hf-config needs transformers",
            why=str(error),
            hint="pip install transformers, or --model package.module:callable",
        ) from None
    return transformers


def _read_config(path: Path) -> Any:
    if not path.exists():
        raise InputError(f"there is no config at {path}", hint="--hf-config path/to/config.json")
    if path.is_dir():
        raise InputError(f"{path} is a directory", hint=f"--hf-config {path / 'config.json'}")
    data = parse_json(read_text(path, "a config", InputError, "--hf-config path/to/config.json"), str(path), InputError)
    if not isinstance(data, dict) or "model_type" not in data:
        raise InputError(f"{path} is not a transformers config", why="it has no entry 'model_type'",
                         hint='{"model_type": "llama", "num_hidden_layers": 32, ...}')  # fmt: skip
    transformers = _transformers()
    kind = data.pop("model_type")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        raise InputError(
            f"{path}: transformers {transformers.__version__} has no model_type '{kind}'",
            hint="a type that it has, such as gpt2, llama, bert or t5, or --model package.module:callable",
        )
    config = transformers.AutoConfig.for_model(kind, **data)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # the model itself shifts the labels
    return config


def _model_class(config: Any, path: str | Path) -> type[nn.Module]:
    """Return the class that the config's `architectures` names, else the language model class of its type."""
    transformers = _transformers()
    names = config.architectures or []
    if names:
        if not hasattr(transformers, names[0]):
            raise InputError(
                f"{path}: transformers {transformers.__version__} has no class '{names[0]}'",
                why="the config's 'architectures' names it",
                hint="leave 'architectures' out, or --model package.module:callable",
            )
        return getattr(transformers, names[0])
    auto = transformers.models.auto.modeling_auto
    mappings = [auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    if config.is_encoder_decoder:
        mappings = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    elif getattr(config, "is_decoder", False):
        mappings.reverse()
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise InputError(
        f"{path}: transformers has no language model for model_type '{config.model_type}'",
        hint="name the class in the config's 'architectures', or --model package.module:callable",
    )


def _tokens(model: nn.Module, config: Any, options: SourceOptions) -> dict[str, Tensor]:
    """Return random tokens as `input_ids`, and `labels` if the model takes them.

    The labels are a copy of the inputs. For an encoder-decoder, they are other random tokens.
    """
    name, inputs = type(model).__name__, inspect.signature(model.forward).parameters
    if "input_ids" not in inputs or ("labels" in inputs and not name.endswith(_TOKEN_LABELS)):
        raise InputError(
            f"there are no example inputs for {name}",
            why="--hf-config makes tokens and their labels, for language models",
            hint="--model package.module:callable, where the callable returns (model, {'pixel_values': ...})",
        )
    text = config.get_text_config()
    limit, sequence = getattr(text, "max_position_embeddings", None), _sequence(config, options)
    if limit is not None and sequence > limit:
        raise OptionError(
            f"--sequence {sequence} is too long for {name}",
            why=f"its config allows at most {limit} tokens",
            hint=f"--sequence {limit}",
        )
    generator = torch.Generator().manual_seed(options.seed)

    def draw() -> Tensor:
        ids = torch.randint(text.vocab_size, (options.batch or BATCH, sequence), generator=generator)
        padding = getattr(text, "pad_token_id", None)
        return ids if padding is None else ids.where(ids != padding, (padding + 1) % text.vocab_size)

    example = {"input_ids": draw()}
    if "labels" in inputs:
        example["labels"] = draw() if config.is_encoder_decoder else example["input_ids"].clone()
    return example

"""Architectures of the coverage benchmark, overrides of the size recipe, and example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from _other_models import OTHER_MODELS
from _recipe import SEQUENCE, VOCAB, small_config
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

Batch = dict[str, Tensor]

ROWS = 8
NUM_LABELS = 12
IGNORED = -100

# The classes behind transformers' AutoModelForImageClassification, ...Seq2SeqLM, ...MaskedLM and ...CausalLM. Most
# specific first: a model in several families is run as the first that names it.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "image classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}

# Not built, and why.
LEFT_OUT = {
    "dinat": "needs the natten library",
    "timm_wrapper": "needs the timm library",
    "gemma3n": "needs the timm library (its text model has a row: gemma3n_text)",
    "gemma4_assistant": "reads the keys and values of another model",
    "gemma4_unified_assistant": "reads the keys and values of another model",
}

# Field values that have relations the names do not tell, e.g. heads x head size = expand x width.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4},
    "cvt": {"depth": (1, 2, 3), "num_heads": (4, 4, 4)},
    "reformer": {"axial_pos_shape": (3, 4), "axial_pos_embds_dim": (16, 48), "max_position_embeddings": 12},
    "hiera": {"image_size": (64, 64), "embed_dim": 16},
    "focalnet": {"embed_dim": 16},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},  # else those of the large one
    "swin": {"embed_dim": 16, "window_size": 2},
    "swinv2": {"embed_dim": 16, "window_size": 2},
    "donut-swin": {"embed_dim": 16, "window_size": 2},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "efficientnet": {  # its stem has 32 channels whatever the configuration says
        "in_channels": (32, 16, 24, 40, 80, 112, 192),
        "out_channels": (16, 24, 40, 80, 112, 192, 320),
        "width_coefficient": 0.5,
        "depth_coefficient": 1.0,
        "hidden_dim": 640,
    },
    "mamba2": {"num_heads": 8},
    "mpnet": {"relative_attention_num_buckets": 32},  # it computes 32 whatever the configuration says
    "esm": {"vocab_size": 40, "mask_token_id": 38, "pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},  # its default is one expert
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp": {
        "text_config.indexer_n_heads": 4,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 2,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "intermediate_size": 96,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note": {"text_config.head_dim": 32},
    "encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "longcat_flash": {"head_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "rwkv": {"rescale_every": 0},  # in eval mode it divides its own weights in its forward
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_chunk_size": 3200,
        "acoustic_tokenizer_encoder_config.num_filters": 4,
        "semantic_tokenizer_encoder_config.num_filters": 4,
    },
    "nemo_speechlm": {
        "audio_config.diarization_config.chunk_length": 12,
        "audio_config.diarization_config.chunk_left_context": 2,
        "audio_config.diarization_config.chunk_right_context": 2,
    },
}


def _transformers_architectures() -> dict[str, tuple[str, str]]:
    """`{model type: (family, class name)}`, one entry per model class."""
    found: dict[str, tuple[str, str]] = {}
    classes: set[str] = set()
    for family, names in FAMILIES.items():
        listed = [(t, name[0] if isinstance(name, tuple) else name) for t, name in names.items()]
        # Types that share a class (internlm3 is a LlamaForCausalLM): the one that the class is called after.
        for model_type, name in sorted(listed, key=lambda entry: not _plain(entry[1]).startswith(_plain(entry[0]))):
            if model_type not in found and name not in classes and model_type not in LEFT_OUT:
                found[model_type] = (family, name)
                classes.add(name)
    return dict(sorted(found.items()))


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


ARCHITECTURES = _transformers_architectures() | {
    name: (name.partition(":")[0], build.__name__) for name, build in OTHER_MODELS.items()
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model with random weights, and a batch with labels."""
    torch.manual_seed(0)
    if name in OTHER_MODELS:
        model, inputs = OTHER_MODELS[name]()
        return finished(model), in_double(inputs)
    family, class_name = ARCHITECTURES[name]
    overrides = dict(OVERRIDES.get(name, {}))
    if family == "image classification":
        overrides["num_labels"] = NUM_LABELS
    config = _own_part(small_config(configuration_auto.CONFIG_MAPPING[name](), overrides), class_name)
    make = getattr(transformers, class_name)._from_config
    with_experts = "experts_implementation"
    try:
        model = make(config, **{with_experts: "batched_mm"})
    except (TypeError, ValueError, KeyError, AttributeError):
        model = make(config)
    if family == "sequence to sequence" and getattr(config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = 0
    return finished(model), in_double(batch(model, name, family))


def _own_part(config: Any, class_name: str) -> Any:
    """The nested configuration that the class is for, where it is not for the whole one (MusicgenForCausalLM)."""
    wanted = getattr(transformers, class_name).config_class
    parts = [part for part in vars(config).values() if type(part) is wanted]
    return config if type(config) is wanted or not parts else parts[0]


def finished(model: nn.Module) -> nn.Module:
    """In double precision and without dropout; no parameter keeps a special value: a bias of zero that is added twice
    would not be noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.double().eval()


def in_double(inputs: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def batch(model: nn.Module, name: str, family: str) -> Batch:
    """Inputs by family. Rows have different numbers of labels: they end at different lengths. Where labels are also the
    decoder's inputs the ignored ones are scattered: it takes them for padding, and a token that sees only padding (in a
    window, or as padding itself) has no value but what the rounding of its mask makes of it."""
    if family == "image classification":
        inputs = {"pixel_values": _images(model.config), "labels": torch.randint(NUM_LABELS, (ROWS,))}
    else:
        vocab = min(model.config.get_text_config().vocab_size or VOCAB, VOCAB) - 24  # special tokens come last
        lengths = [SEQUENCE - (5 * row) % (SEQUENCE - 1) for row in range(ROWS)]
        mask = torch.arange(SEQUENCE) < torch.tensor(lengths)[:, None]
        kept = mask
        if family == "sequence to sequence":
            kept, mask = torch.arange(SEQUENCE) % (2 + torch.arange(ROWS) % 4)[:, None] != 1, torch.ones_like(mask)
        labels = torch.randint(5, vocab, (ROWS, SEQUENCE)).masked_fill(~kept, IGNORED)
        inputs = {"input_ids": torch.randint(5, vocab, (ROWS, SEQUENCE)), "labels": labels}
        if family == "masked" or name in NEED_MASKS:
            inputs["attention_mask"] = mask.long()
        if name in NEED_MASKS:
            inputs["decoder_attention_mask"] = mask.long()
    inputs |= INPUTS.get(name, lambda config: {})(model.config)
    names = inspect.signature(model.forward).parameters
    return {n: value for n, value in inputs.items() if value is not None and (n in names or n == "input_ids")}


def _images(config: Any) -> Tensor:
    size = getattr(config, "image_size", 64)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.randn(ROWS, getattr(config, "num_channels", 3), height, width)


def _codebooks(config: Any) -> Batch:
    """Audio codes: a row of tokens per codebook."""
    books = config.num_codebooks
    ids = torch.randint(5, VOCAB - 24, (ROWS * books, SEQUENCE))
    return {"input_ids": ids, "labels": torch.randint(5, VOCAB - 24, (ROWS, SEQUENCE, books))}


def _tokens() -> Batch:
    return {"input_ids": torch.randint(VOCAB - 24, (ROWS, SEQUENCE))}


def _patches(config: Any) -> Batch:
    """Images that were cut into patches by their processor, in two shapes."""
    shapes = torch.tensor([[4, 4], [2, 8]] * (ROWS // 2))
    patches = torch.randn(ROWS, 16, 3 * config.vision_config.patch_size**2)
    return {"pixel_values": patches, "pixel_attention_mask": torch.ones(ROWS, 16).long(), "spatial_shapes": shapes}


NEED_MASKS = ("fsmt", "longt5", "switch_transformers")
INPUTS: dict[str, Callable[[Any], Batch]] = {
    "git": lambda config: {"pixel_values": _images(config.vision_config)},
    "imagegpt": lambda config: {**_tokens(), "pixel_values": None},
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "prophetnet": lambda config: {"decoder_input_ids": torch.randint(5, VOCAB - 24, (ROWS, SEQUENCE))},
    "reformer": lambda config: {"attention_mask": None},
    "shieldgemma2": lambda config: {**_tokens(), "pixel_values": None, "labels": None},
    "siglip2": _patches,
    "voxtral_realtime": lambda config: {
        "input_features": torch.randn(ROWS, config.audio_config.num_mel_bins, 8 * SEQUENCE)
    },
}
"""Inputs other than the family's; None: without."""

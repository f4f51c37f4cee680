"""Small configurations: one recipe for every transformers architecture.

The recipe traverses a default configuration and shrinks each field by the kind of its name: widths, heads, layers,
vocabulary, experts, windows, images. If a configuration lists its layers, one layer of every kind
remains. Relations between fields (such as heads x head size = width) are in `OVERRIDES` of
`_architectures.py`.

Sizes are chosen to differ from each other and from the batch, so that an error cannot cancel.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, EXPERTS = 64, 4, 2, 16, 96, 160, 4
SEQUENCE, WINDOW = 12, 4

# Kind of field name -> size; the first that matches counts. A function gets the default value.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(type|token_type|segment|prompt|task_type)_?(vocab_size|types)", lambda v: min(v, 4)),
    (r"num_nextn_predict_layers|mtp_num_layers", lambda v: v),
    (r"num_kv_shared_layers|max_window_layers|((n|num)_)?dense_layers|num_adapter_layers", lambda v: min(v, 1)),
    (r"first_k_dense_replace|moe_layer_start_index", lambda v: min(v, 1)),
    (r"(n|num|moe_num)_shared_experts?|num_residual_layers", lambda v: min(v, 1)),
    (r".*vocab(_size)?|.*vocab_size.*", VOCAB),
    (r"num_(key_value|kv)_heads|kv_n_heads|n_kv_heads|.*_num_key_value_heads", lambda v: min(v, KV_HEADS)),
    (r"(n|num)_mamba_heads|mamba_(n|num)_heads|linear_num_value_heads", 8),
    (r"((n|num)_)?((\w+_)?attention_)?heads?|(\w+_)?n(um)?_heads|(\w+_)?num_(key|value)_heads|num_heads_per.*", HEADS),
    (r"qk_rope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"qk_head_dim", HEAD_DIM + HEAD_DIM // 2),
    (r"(\w+_)?head_dim|d_kv|d_head|dim_head|mamba_d_head|kv_channels|attention_head_(dim|size)|head_size", HEAD_DIM),
    (r"q_lora_rank|o_lora_rank", 24), (r"kv_lora_rank", 40), (r"(\w+_)?(lora|low)_?rank|laurel_rank|hc_lowrank", 8),
    (r"(\w+_)?layers|n_layer|depth|layers_per_stack|num_blocks", 2),
    (r"(num|n)_(routed_|local_)?experts|moe_num_experts|num_local_experts|zero_expert_num", EXPERTS),
    (r"(\w*experts_per_tok(en)?|moe_top_?k|moe_k|top_k|topk)", lambda v: min(v, 2)),
    (r"n_group|num_expert_group", lambda v: min(v, 2)), (r"topk_group", 1),
    (r"moe_intermediate_size|\w*expert\w*_(intermediate|hidden)_size|expert_ffn_hidden_size|moe_ffn_hidden_size", 32),
    (r"\w*intermediate_size(_mlp)?|(\w+_)?ffn_dim|d_ff|dff|dim_ff|d_inner|n_inner|ffn_hidden_size|mlp_dim", MLP),
    (r"(\w*hidden_size(_\w+)?|d_model|n_embd|d_latents|dim|hidden_dim|(\w+_)?emb(ed)?_dim|embedding_(size|dim)|"
     r"(\w+_)?embed_proj_dim|(\w+_)?embedding_size|lru_width|projection_(dim|size)|(\w+_)?output_(size|dim)|"
     r"adapter_(in|out)_dim|adapter_input_size)", HIDDEN),
    (r"max_\w*positions?(_embeddings)?|n_positions|n_ctx|\w*max_seq_len|context_length|\w*max_position_embeddings|"
     r"model_max_length|max_2d_position_embeddings|max_encoder_position_embeddings", 64),
    (r"sliding_window(_size)?|attention_window(_size)?|local_attention|\w*chunk_size|block_size|context_size|"
     r"local_attention_window_len|\w*chunk_length|keep_window_size|\w*block_size", lambda v: min(v, WINDOW)),
    (r"image_size", 64), (r"patch_size", lambda v: 16 if v > 8 else v),
    (r"state_size|\w*_d_state|ssm_state_size", 16), (r"(mamba_)?(time_step|dt)_rank", 4), (r"mamba_d_ssm", 128),
    (r"n_groups|mamba_n_groups", lambda v: min(v, 2)),
    (r"num_mel_bins", 16), (r"num_landmarks|segment_means_seq_len", 4), (r"num_latents", 12), (r"num_labels", 10),
    (r"codebook_size|num_filters|num_conv_pos_embeddings", 16),
    (r"\w*buckets", lambda v: min(v, 8)), (r"\w*max_distance", lambda v: min(v, 16)),
    (r"\w*_(period|interval|step|pattern|frequency)", lambda v: min(v, 2)), (r"\w*_offset", lambda v: min(v, 1)),
)  # fmt: skip
# Lists with an entry per stage of a vision model: widths become 16, 32, 48, ... in the order of their sizes.
_WIDTHS = re.compile(r"(neck_)?hidden_sizes|embed_dims?|(stage_\w+|in|out|stem|stem_out)_channels|base_attn_unit_dims")
_HEADS = re.compile(r"num_(attention_)?heads|num_attention_heads_per_layer")
_DEPTHS = re.compile(r"depths?|num_block_repeats|stage_num_blocks|stage_numb_of_layers|n_attn_blocks|block_sizes")
_TOKEN = re.compile(r"\w*token_(id|index)|eo[sda]_index|pad_index|mask_index|unk_index|bos_index")


def small_config(default: PreTrainedConfig, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A small configuration of the same architecture.

    `overrides`: field values that the recipe cannot know; `"text_config.head_dim"` is a field of a nested one.
    """
    overrides = dict(overrides or {})
    values = _small_values(default)
    own = {name: value for name, value in overrides.items() if "." not in name}
    for name, value in _fields(default).items():
        if isinstance(value, PreTrainedConfig):
            nested = {k.removeprefix(name + "."): v for k, v in overrides.items() if k.startswith(name + ".")}
            values[name] = small_config(value, nested)
    return type(default)(**{**values, **own})


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(type(config)) if f.init}
    return {name: value for name, value in vars(config).items() if name in names}


def _small_values(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that change, except nested configurations."""
    fields = _fields(config)
    small: dict[str, Any] = {}
    widths = _widths(fields)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            continue
        if _TOKEN.fullmatch(name):
            small[name] = _token(name, value, fields)
        elif isinstance(value, (list, tuple)):
            small[name] = type(value)(_small_list(name, value, widths))
        elif widths and _WIDTHS.fullmatch(name):
            small[name] = _small_list(name, [value], widths)[0]
        else:
            small[name] = _small_size(name, value)
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] == _heads(config):
        small["num_key_value_heads"] = HEADS  # no grouping of heads where the default has none
    if "use_cache" in fields:
        small["use_cache"] = False
    usual = _fields(type(config)())  # a nested one may have other sizes, which may be small already
    small = {
        name: value for name, value in small.items()
        if value != fields[name] or (type(value) is int and value != usual.get(name, value))
    }  # fmt: skip
    small |= _one_layer_of_every_kind(config, fields, small)
    return small | _rope(fields, small)


def _heads(config: PreTrainedConfig) -> Any:
    return vars(config).get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))


def _small_size(name: str, value: Any) -> Any:
    """A number shrunk by the kind of its name; everything else as it is."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return value
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
    return min(size(value) if callable(size) else size, value)


def _widths(fields: Mapping[str, Any]) -> list[int]:
    """All widths of the stages of a vision model, in order."""
    lists = [v for n, v in fields.items() if _WIDTHS.fullmatch(n) and isinstance(v, (list, tuple))]
    single = [[v] for n, v in fields.items() if _WIDTHS.fullmatch(n) and isinstance(v, int)] if lists else []
    return sorted({v for values in lists + single for v in values if isinstance(v, int) and v > 3})


def _small_list(name: str, values: Sequence[Any], widths: Sequence[int] = ()) -> list[Any]:
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return list(values)
    if _WIDTHS.fullmatch(name):
        return [16 * (1 + widths.index(v)) if v > 3 else v for v in values]  # an image has 3 channels
    if _HEADS.fullmatch(name):
        return [HEADS] * len(values)
    if _DEPTHS.fullmatch(name):
        return [min(v, 2) for v in values]
    return [_small_size(name, v) for v in values]


def _token(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """Special tokens inside the small vocabulary: the usual three first, all others at its end."""
    usual = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 0, "forced_bos": 1, "forced_eos": 2}
    if isinstance(value, (list, tuple)):
        return type(value)(_token(name, v, fields) for v in value[:1])
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for prefix, token in usual.items():
        if name.startswith(prefix):
            return token
    others = sorted(n for n, v in fields.items() if _TOKEN.fullmatch(n) and isinstance(v, int))
    return VOCAB - 1 - others.index(name)


def _one_layer_of_every_kind(
    config: PreTrainedConfig, fields: Mapping[str, Any], small: Mapping[str, Any]
) -> dict[str, Any]:
    """Lists with an entry per layer, cut to as few layers as have every kind, and at least two."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    number = fields.get(name)
    if not isinstance(number, int):
        return {}
    lists = {
        n: v for n, v in fields.items()
        if isinstance(v, (list, tuple)) and len(v) == number and number > 2 and "depths" not in fields
    }  # fmt: skip
    if not lists:
        return {}
    kinds = {(n, repr(x)) for n, v in lists.items() for x in v}
    chosen: list[int] = []
    while kinds:
        best = max(range(number), key=lambda i: len(kinds & {(n, repr(v[i])) for n, v in lists.items()}))
        kinds -= {(n, repr(v[best])) for n, v in lists.items()}
        chosen.append(best)
    chosen += [i for i in range(number) if i not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    found = {name: len(chosen)} | {n: type(v)(_small_list(n, [v[i] for i in chosen])) for n, v in lists.items()}
    spec = vars(config).get("_heterogeneity_spec")
    if spec is not None:  # layers that differ in size: as many times the common size as by default
        found["per_layer_config"] = {
            new: {n: _scaled(v, fields[n], small.get(n, fields[n])) for n, v in spec.per_layer_overrides[i].items()}
            for new, i in enumerate(chosen) if i in spec.per_layer_overrides
        }  # fmt: skip
    return found


def _scaled(value: Any, common: Any, small: Any) -> Any:
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in (value, common, small))
    return small * value // common if numbers and common else value


def _rope(fields: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose lists count parts of a head: cut to the small head."""
    rope = fields.get("rope_parameters")
    return {"rope_parameters": _cut_rope(rope, fields, small)} if isinstance(rope, Mapping) else {}


def _cut_rope(rope: Mapping[str, Any], fields: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            value = _cut_rope(value, fields, small)
        elif name == "mrope_section":
            pairs = int(small.get("head_dim", HEAD_DIM) * rope.get("partial_rotary_factor", 1.0)) // 2
            value = split(pairs, value)
        elif name == "original_max_position_embeddings":
            value = 64
        found[name] = value
    return found


def split(total: int, parts: Sequence[int]) -> list[int]:
    """`total` in the proportions of `parts`, every part at least 1."""
    cut = [max(1, math.floor(total * part / sum(parts))) for part in parts]
    cut[cut.index(max(cut))] += total - sum(cut)
    return cut

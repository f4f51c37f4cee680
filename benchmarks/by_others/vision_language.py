"""Vision-language models of transformers, small, with random weights. Some rows of the batch have no image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from by_others.case import ROWS, VOCAB, Case

LENGTH = 16
IMAGE, START = VOCAB - 1, VOCAB - 2
IGNORED = -100
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SIZES = [1, 1, 0, 1, 0, 1, 1, 1]
"""Number of images of each row."""


def sentences(images: Sequence[int], padded: bool = True) -> dict[str, Tensor]:
    """Tokens of each row, with as many image tokens as `images` says, and labels on the text behind them.

    Args:
        images: number of image tokens of each row.
        padded: the rows end at different lengths.
    """
    ids = torch.randint(5, VOCAB - 10, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    for row, number in enumerate(images):
        if number:
            ids[row, 1], ids[row, 2 : 2 + number] = START, IMAGE
        if padded:
            mask[row, LENGTH - row % 4 :] = 0
    labels = ids.masked_fill((ids >= START) | (mask == 0), IGNORED)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def model_of(name: str, config: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}ForConditionalGeneration")(config).train()


def config_of(name: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}Config")(**fields)


def images_in_some_rows(size: int = 16) -> Tensor:
    return torch.randn(sum(SIZES), 3, size, size)


def llava() -> Case:
    vision = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION, "patch_size": 8}
    text = {"model_type": "llama", **TEXT}
    config = config_of(
        "Llava", vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1,
    )  # fmt: skip
    inputs = sentences([4 * n for n in SIZES])
    return Case(model_of("Llava", config), (), {"pixel_values": images_in_some_rows(), **inputs})


def qwen(name: str, **vision: Any) -> Case:
    """Images of three sizes, as patches of all images in one tensor, with a grid of each."""
    grids = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 2], [1, 4, 4], [1, 4, 2], [1, 2, 4]])
    pictures = iter(grids.prod(1).tolist())
    counts = [next(pictures) // 4 if n else 0 for n in SIZES]
    inputs = sentences(counts)
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    if name == "Qwen3VL":
        text["rope_parameters"]["mrope_interleaved"] = True  # type: ignore[index]
    else:
        del text["head_dim"]
    config = config_of(
        name, text_config=text, image_token_id=IMAGE, video_token_id=VOCAB - 3, vision_start_token_id=START,
        vision_end_token_id=VOCAB - 4,
        vision_config={"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, **vision},
    )  # fmt: skip
    types = (inputs["input_ids"] == IMAGE).int()
    patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4)
    more = {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}
    return Case(model_of(f"{name}", config), (), {**more, **inputs})


def paligemma() -> Case:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION, "patch_size": 8}
    config = config_of(
        "PaliGemma", vision_config=vision, text_config={"model_type": "gemma", **TEXT}, image_token_index=IMAGE,
        vocab_size=VOCAB, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    inputs = sentences([4 * n for n in SIZES])
    types = torch.zeros_like(inputs["input_ids"])
    types[:, 8:] = 1  # the answer; what is before it is read in both directions
    more = {"pixel_values": images_in_some_rows(), "token_type_ids": types}
    return Case(model_of("PaliGemma", config), (), {**more, **inputs})


def idefics(name: str) -> Case:
    """Rows have up to two images; missing ones are zeros, which the model drops."""
    config = config_of(
        name, vision_config=VISION, text_config={"model_type": "llama", **TEXT}, image_token_id=IMAGE, scale_factor=2
    )
    numbers = [1, 2, 0, 1, 0, 1, 2, 1]
    inputs = sentences([4 * n for n in numbers])
    pictures = torch.randn(ROWS, 2, 3, 16, 16)
    for row, number in enumerate(numbers):
        pictures[row, number:] = 0
    return Case(model_of(name, config), (), {"pixel_values": pictures, **inputs})


def internvl() -> Case:
    vision = {**VISION, "image_size": (16, 16), "patch_size": (4, 4)}
    text = {"model_type": "qwen2", **TEXT}
    del text["head_dim"]
    config = config_of(
        "InternVL", vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    inputs = sentences([4 * n for n in SIZES])
    return Case(model_of("InternVL", config), (), {"pixel_values": images_in_some_rows(), **inputs})


def gemma3() -> Case:
    """Tokens of an image see each other in both directions; one layer has a sliding window."""
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}
    text = {
        **TEXT, "sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]
    }  # fmt: skip
    config = config_of(
        "Gemma3", vision_config=vision, text_config=text, mm_tokens_per_image=4, boi_token_index=START,
        eoi_token_index=VOCAB - 4, image_token_index=IMAGE,
    )  # fmt: skip
    inputs = sentences([4 * n for n in SIZES])
    types = (inputs["input_ids"] == IMAGE).long()
    more = {"pixel_values": images_in_some_rows(), "token_type_ids": types}
    return Case(model_of("Gemma3", config), (), {**more, **inputs})


MODELS: dict[str, Callable[[], Case]] = {
    "transformers: LLaVA": llava,
    "transformers: Qwen2-VL": partial(qwen, "Qwen2VL", embed_dim=32, hidden_size=32),
    "transformers: Qwen2.5-VL": partial(
        qwen, "Qwen2_5_VL", hidden_size=32, intermediate_size=48, out_hidden_size=32, window_size=16,
        fullatt_block_indexes=[1],
    ),
    "transformers: Qwen3-VL": partial(
        qwen, "Qwen3VL", hidden_size=32, intermediate_size=48, out_hidden_size=32, num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    "transformers: PaliGemma": paligemma,
    "transformers: Idefics 3": partial(idefics, "Idefics3"),
    "transformers: SmolVLM": partial(idefics, "SmolVLM"),
    "transformers: InternVL": internvl,
    "transformers: Gemma 3 with images": gemma3,
}  # fmt: skip

"""Speech models of transformers that mask at random (SpecAugment), and its detectors with their losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from by_others.case import LENGTH, ROWS, VOCAB, Case, images
from by_others.unseen.hub import called

KINDS = 3
DETECTOR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 6, "num_labels": KINDS,
}  # fmt: skip


def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        apply_spec_augment=True, mask_time_prob=0.2, mask_time_length=3, mask_feature_prob=0.2, mask_feature_length=2,
    )  # fmt: skip
    labels = torch.randint(5, VOCAB, (ROWS, LENGTH)).masked_fill(torch.rand(ROWS, LENGTH) < 0.2, -100)
    return called(
        WhisperForConditionalGeneration(config), input_features=torch.randn(ROWS, 16, 40), labels=labels,
    )  # fmt: skip


def waves(name: str) -> Case:
    """A model of raw waves with CTC; samples have different lengths."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, apply_spec_augment=True, mask_time_prob=0.3,
        mask_time_length=2, mask_feature_prob=0.0 if name == "WavLM" else 0.2, mask_feature_length=2, layerdrop=0.0,
        feat_extract_norm="layer", ctc_loss_reduction="mean",
    )  # fmt: skip
    mask = torch.ones(ROWS, 800, dtype=torch.long)
    for row in range(ROWS):
        mask[row, 800 - 40 * (row % 3) :] = 0
    labels = torch.randint(1, 32, (ROWS, 5))
    labels[1::3, 3:] = -100
    model = getattr(transformers, f"{name}ForCTC")(config)
    return called(model, input_values=torch.randn(ROWS, 800), attention_mask=mask, labels=labels)


def boxes(number: int = ROWS) -> list[dict[str, Tensor]]:
    """One to three boxes in every image."""
    return [
        {"class_labels": torch.randint(KINDS, (1 + row % 3,)), "boxes": 0.3 + 0.2 * torch.rand(1 + row % 3, 4)}
        for row in range(number)
    ]


def small_resnet(stages: list[int], out: list[str]) -> dict[str, Any]:
    return {
        "model_type": "resnet", "embedding_size": 16, "hidden_sizes": stages, "depths": [1] * len(stages),
        "layer_type": "basic", "out_features": out,
    }  # fmt: skip


def small_swin(*out: str) -> dict[str, Any]:
    return {
        "model_type": "swin", "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2], "window_size": 2, "out_features": list(out),
    }  # fmt: skip


def detr() -> Case:
    from transformers import DetrConfig, DetrForObjectDetection

    backbone = small_resnet([16, 32], ["stage2"])
    config = DetrConfig(backbone_config=backbone, auxiliary_loss=True, dropout=0.0, **DETECTOR)
    return called(DetrForObjectDetection(config), pixel_values=images(32), labels=boxes())


def deformable_detr() -> Case:
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

    backbone = small_resnet([16, 32, 32], ["stage1", "stage2", "stage3"])
    config = DeformableDetrConfig(
        backbone_config=backbone, auxiliary_loss=True, dropout=0.0, with_box_refine=True, disable_custom_kernels=True,
        num_feature_levels=3, **DETECTOR,
    )  # fmt: skip
    return called(DeformableDetrForObjectDetection(config), pixel_values=images(32), labels=boxes())


def rt_detr() -> Case:
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    backbone = {
        "model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
        "layer_type": "basic", "out_indices": [2, 3, 4],
    }  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[16, 32, 32],
        decoder_in_channels=[32, 32, 32], num_denoising=8, decoder_n_points=2, **DETECTOR,
    )  # fmt: skip
    return called(RTDetrForObjectDetection(config), pixel_values=images(64), labels=boxes())


def mask2former() -> Case:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    config = Mask2FormerConfig(
        backbone_config=small_swin("stage1", "stage2", "stage3", "stage4"), feature_size=32, mask_feature_size=32,
        hidden_dim=32, encoder_feedforward_dim=48, encoder_layers=2, decoder_layers=3, num_attention_heads=4,
        dim_feedforward=48, num_queries=6, train_num_points=24, num_labels=KINDS,
    )  # fmt: skip
    masks = [(torch.rand(1 + row % 3, 32, 32) > 0.5).float() for row in range(ROWS)]
    kinds = [torch.randint(KINDS, (1 + row % 3,)) for row in range(ROWS)]
    return called(
        Mask2FormerForUniversalSegmentation(config), pixel_values=images(32), mask_labels=masks, class_labels=kinds,
    )  # fmt: skip


def grounding_dino() -> Case:
    from transformers import GroundingDinoConfig, GroundingDinoForObjectDetection

    text = {
        "model_type": "bert", "vocab_size": 1040, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    config = GroundingDinoConfig(
        backbone_config=small_swin("stage2", "stage3", "stage4"), text_config=text, dropout=0.0, fusion_droppath=0.0,
        disable_custom_kernels=True, num_feature_levels=3, max_text_len=16, decoder_n_points=2, encoder_n_points=2,
        **{name: number for name, number in DETECTOR.items() if name != "num_labels"},
    )  # fmt: skip
    words = torch.tensor([101, 200, 201, 1012, 202, 1012, 203, 204, 1012, 102]).repeat(ROWS, 1)  # three phrases
    return called(
        GroundingDinoForObjectDetection(config), pixel_values=images(32), input_ids=words,
        attention_mask=torch.ones_like(words), token_type_ids=torch.zeros_like(words), labels=boxes(),
    )  # fmt: skip


MODELS: dict[str, Callable[[], Case]] = {
    "transformers: Whisper with SpecAugment": whisper,
    "transformers: Wav2Vec2 with SpecAugment": partial(waves, "Wav2Vec2"),
    "transformers: HuBERT with SpecAugment": partial(waves, "Hubert"),
    "transformers: WavLM with SpecAugment": partial(waves, "WavLM"),
    "transformers: DETR with its loss": detr,
    "transformers: RT-DETR with its loss": rt_detr,
    "transformers: Deformable DETR with its loss": deformable_detr,
    "transformers: Mask2Former with its loss": mask2former,
    "transformers: Grounding DINO with its loss": grounding_dino,
}

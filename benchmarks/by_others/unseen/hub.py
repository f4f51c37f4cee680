"""Classes of transformers, diffusers and peft that are used less than language models and image classifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, images, states, tokens

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = {"image_size": 32, "patch_size": 8}


def called(model: Any, **kwargs: Any) -> Case:
    np.random.seed(0)
    return Case(model.train(), (), kwargs)


# Speech


def wav2vec2_config(**more: Any) -> Any:
    from transformers import Wav2Vec2Config

    return Wav2Vec2Config(
        **SMALL,
        vocab_size=32,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        num_codevectors_per_group=8,
        codevector_dim=16,
        proj_codevector_dim=16,
        num_negatives=4,
        **more,
    )


def wav2vec2_ctc() -> Case:
    from transformers import Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(wav2vec2_config(mask_time_length=2))
    return called(model, input_values=torch.randn(ROWS, 1600), labels=torch.randint(1, 32, (ROWS, 5)))


def wav2vec2_pretraining() -> Case:
    from transformers import Wav2Vec2ForPreTraining

    model = Wav2Vec2ForPreTraining(wav2vec2_config())
    length = int(model._get_feat_extract_output_lengths(1600))
    mask = torch.arange(length).expand(ROWS, length) % 3 == 1
    negatives = torch.randint(0, ROWS * length, (ROWS, length, 4))
    return called(
        model, input_values=torch.randn(ROWS, 1600), mask_time_indices=mask, sampled_negative_indices=negatives
    )


def text_to_speech() -> Case:
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    config = SpeechT5Config(
        vocab_size=81,
        hidden_size=32,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        speech_decoder_prenet_units=32,
        speaker_embedding_dim=16,
        speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2,
        conv_dim=(16,),
        conv_stride=(5,),
        conv_kernel=(10,),
    )
    return called(
        SpeechT5ForTextToSpeech(config),
        input_ids=torch.randint(4, 81, (ROWS, LENGTH)),
        labels=torch.randn(ROWS, 10, 16),
        speaker_embeddings=torch.randn(ROWS, 16),
        attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.long),
    )


def audio_codec() -> Case:
    from transformers import DacConfig, DacModel

    config = DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=16,
        codebook_dim=4,
        quantizer_dropout=0.5,
    )
    return called(DacModel(config), input_values=torch.randn(ROWS, 1, 64))


# Vision


def masked_autoencoder() -> Case:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        **SMALL,
        **PATCHES,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )
    return called(ViTMAEForPreTraining(config), pixel_values=images(32))


def segformer() -> Case:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
        num_labels=4,
    )
    labels = torch.randint(4, (ROWS, 64, 64)).masked_fill(torch.rand(ROWS, 64, 64) < 0.1, 255)
    return called(SegformerForSemanticSegmentation(config), pixel_values=images(64), labels=labels)


def siglip() -> Case:
    from transformers import SiglipConfig, SiglipModel

    text = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": LENGTH}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config={**SMALL, **PATCHES}))
    return called(model, input_ids=tokens(), pixel_values=images(32), return_loss=True)


def depth_estimation() -> Case:
    from transformers import DPTConfig, DPTForDepthEstimation

    config = DPTConfig(
        **{**SMALL, "num_hidden_layers": 4},
        **PATCHES,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        reassemble_factors=[4, 2, 1, 0.5],
        is_hybrid=False,
        use_auxiliary_head=False,
    )
    return called(DPTForDepthEstimation(config), pixel_values=images(32))


def detection_by_matching() -> Case:
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(
        **SMALL,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=5,
        num_labels=3,
        use_mid_position_embeddings=False,
    )
    labels = [
        {"class_labels": torch.randint(3, (1 + row % 3,)), "boxes": 0.3 + 0.2 * torch.rand(1 + row % 3, 4)}
        for row in range(ROWS)
    ]
    return called(YolosForObjectDetection(config), pixel_values=images(32), labels=labels)


def prompted_masks() -> Case:
    from transformers import SamConfig, SamModel

    config = SamConfig(
        vision_config={
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
            "mlp_dim": 64,
            "window_size": 3,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )
    return called(SamModel(config), pixel_values=images(32), input_points=32 * torch.rand(ROWS, 1, 2, 2))


# Text, documents, tables, series, actions


def layout() -> Case:
    from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

    config = LayoutLMv3Config(
        **SMALL,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        input_size=32,
        patch_size=8,
        coordinate_size=6,
        shape_size=4,
        num_labels=5,
    )
    start = torch.randint(0, 400, (ROWS, LENGTH, 2))
    boxes = torch.cat([start, start + torch.randint(1, 400, (ROWS, LENGTH, 2))], -1)
    labels = torch.randint(5, (ROWS, LENGTH)).masked_fill(torch.rand(ROWS, LENGTH) < 0.2, -100)
    return called(
        LayoutLMv3ForTokenClassification(config), input_ids=tokens(), bbox=boxes, pixel_values=images(32), labels=labels
    )


def table_questions() -> Case:
    from transformers import TapasConfig, TapasForQuestionAnswering

    config = TapasConfig(
        **SMALL,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        type_vocab_sizes=[3, 8, 8, 2, 8, 8, 4],
        max_num_rows=8,
        max_num_columns=8,
    )
    place = torch.arange(LENGTH)
    kinds = torch.stack([(place > 3).long(), (place - 3).clamp(0) % 3, (place - 3).clamp(0) // 3, *[0 * place] * 4], -1)
    kinds = kinds.expand(ROWS, LENGTH, 7).contiguous()
    labels = ((kinds[..., 1] == 1) & (kinds[..., 2] == 1)).long()
    return called(
        TapasForQuestionAnswering(config),
        input_ids=tokens(),
        token_type_ids=kinds,
        labels=labels,
        attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.long),
    )


def longformer_questions() -> Case:
    from transformers import LongformerConfig, LongformerForQuestionAnswering

    config = LongformerConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=64, attention_window=4, sep_token_id=2)
    ids = torch.randint(5, VOCAB, (ROWS, 16))
    for row in range(ROWS):
        ids[row, [3 + row % 3, 4 + row % 3, 15]] = 2
    return called(
        LongformerForQuestionAnswering(config),
        input_ids=ids,
        start_positions=torch.randint(6, 14, (ROWS,)),
        end_positions=torch.randint(6, 14, (ROWS,)),
    )


def patched_series() -> Case:
    from transformers import PatchTSTConfig, PatchTSTForPretraining

    config = PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        random_mask_ratio=0.4,
        do_mask_input=True,
    )
    return called(PatchTSTForPretraining(config), past_values=torch.randn(ROWS, 32, 2))


def series_prediction() -> Case:
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

    config = TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=12,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=16,
        num_static_categorical_features=1,
        cardinality=[5],
        embedding_dimension=[4],
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    return called(
        TimeSeriesTransformerForPrediction(config),
        past_values=torch.randn(ROWS, 15),
        past_time_features=torch.randn(ROWS, 15, 2),
        past_observed_mask=(torch.rand(ROWS, 15) > 0.1).float(),
        static_categorical_features=torch.randint(5, (ROWS, 1)),
        future_values=torch.randn(ROWS, 4),
        future_time_features=torch.randn(ROWS, 4, 2),
    )


def decisions() -> Case:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(state_dim=5, act_dim=2, hidden_size=32, max_ep_len=64, n_layer=2, n_head=4)
    return called(
        DecisionTransformerModel(config),
        states=torch.randn(ROWS, 6, 5),
        actions=torch.randn(ROWS, 6, 2),
        rewards=torch.randn(ROWS, 6, 1),
        returns_to_go=torch.randn(ROWS, 6, 1),
        timesteps=torch.arange(6).expand(ROWS, 6).contiguous(),
        attention_mask=torch.ones(ROWS, 6),
    )


def pretrained_bert() -> Case:
    from transformers import BertConfig, BertForPreTraining

    model = BertForPreTraining(BertConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=64))
    labels = tokens().masked_fill(torch.rand(ROWS, LENGTH) > 0.3, -100)
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (ROWS, 1))).long()
    return called(
        model, input_ids=tokens(), attention_mask=mask, labels=labels, next_sentence_label=torch.randint(2, (ROWS,))
    )


# diffusers


def control_net() -> Case:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
        conditioning_embedding_out_channels=(8, 16),
    )
    return called(
        model,
        sample=images(8, 4),
        timestep=torch.randint(1000, (ROWS,)),
        encoder_hidden_states=states(6, 32),
        controlnet_cond=images(16),
    )


def video_transformer() -> Case:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    )
    return called(
        model,
        hidden_states=torch.randn(ROWS, 2, 4, 8, 8),
        timestep=torch.randint(1000, (ROWS,)),
        encoder_hidden_states=states(8, 16),
    )


def wan_transformer() -> Case:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return called(
        model,
        hidden_states=torch.randn(ROWS, 4, 2, 8, 8),
        timestep=torch.randint(1000, (ROWS,)),
        encoder_hidden_states=states(6, 16),
    )


def deep_autoencoder() -> Case:
    from diffusers import AutoencoderDC

    model = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    return called(model, sample=images(16))


def audio_diffusion() -> Case:
    from diffusers import StableAudioDiTModel

    model = StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        out_channels=4,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=16,
    )
    rotary = torch.randn(9, 8).cos(), torch.randn(9, 8).sin()
    return called(
        model,
        hidden_states=torch.randn(ROWS, 4, 8),
        timestep=torch.rand(ROWS),
        encoder_hidden_states=states(6, 16),
        global_hidden_states=states(1, 16),
        rotary_embedding=rotary,
    )


def motion_unet() -> Case:
    from diffusers import UNetSpatioTemporalConditionModel

    model = UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16,
        num_attention_heads=2,
        projection_class_embeddings_input_dim=24,
        addition_time_embed_dim=8,
        num_frames=2,
    )
    return called(
        model,
        sample=torch.randn(ROWS, 2, 4, 8, 8),
        timestep=torch.randint(1000, (ROWS,)),
        encoder_hidden_states=states(1, 16),
        added_time_ids=torch.randn(ROWS, 3),
    )


# peft


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64))


def adapted(config: Any, model: Any = None, **inputs: Tensor) -> Case:
    from peft import get_peft_model

    ids = tokens()
    return called(get_peft_model(model or small_llama(), config), **{"input_ids": ids, "labels": ids, **inputs})


def dora() -> Case:
    from peft import LoraConfig

    return adapted(
        LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.1,
            use_dora=True,
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "v_proj", "down_proj"],
        )
    )


def ia3() -> Case:
    from peft import IA3Config
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    ids = tokens(8)
    return adapted(IA3Config(task_type="SEQ_2_SEQ_LM"), T5ForConditionalGeneration(config), input_ids=ids, labels=ids)


def prefix_tuning() -> Case:
    from peft import PrefixTuningConfig

    return adapted(
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16)
    )


def prompt_encoder() -> Case:
    from peft import PromptEncoderConfig
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=64, num_labels=CLASSES)
    )
    config = PromptEncoderConfig(
        task_type="SEQ_CLS", num_virtual_tokens=4, encoder_hidden_size=16, encoder_reparameterization_type="LSTM"
    )
    return adapted(
        config, model, labels=torch.randint(CLASSES, (ROWS,)), attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.long)
    )


def orthogonal() -> Case:
    from peft import OFTConfig

    return adapted(OFTConfig(oft_block_size=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def vera() -> Case:
    from peft import VeraConfig

    return adapted(VeraConfig(r=8, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", vera_dropout=0.1))


MODELS: dict[str, Callable[[], Case]] = {
    "transformers: Wav2Vec2ForCTC": wav2vec2_ctc,
    "transformers: Wav2Vec2ForPreTraining": wav2vec2_pretraining,
    "transformers: SpeechT5ForTextToSpeech": text_to_speech,
    "transformers: DacModel": audio_codec,
    "transformers: ViTMAEForPreTraining": masked_autoencoder,
    "transformers: SegformerForSemanticSegmentation": segformer,
    "transformers: SiglipModel": siglip,
    "transformers: DPTForDepthEstimation": depth_estimation,
    "transformers: YolosForObjectDetection": detection_by_matching,
    "transformers: SamModel": prompted_masks,
    "transformers: LayoutLMv3ForTokenClassification": layout,
    "transformers: TapasForQuestionAnswering": table_questions,
    "transformers: LongformerForQuestionAnswering": longformer_questions,
    "transformers: PatchTSTForPretraining": patched_series,
    "transformers: TimeSeriesTransformerForPrediction": series_prediction,
    "transformers: DecisionTransformerModel": decisions,
    "transformers: BertForPreTraining": pretrained_bert,
    "diffusers: ControlNetModel": control_net,
    "diffusers: CogVideoXTransformer3DModel": video_transformer,
    "diffusers: WanTransformer3DModel": wan_transformer,
    "diffusers: AutoencoderDC": deep_autoencoder,
    "diffusers: StableAudioDiTModel": audio_diffusion,
    "diffusers: UNetSpatioTemporalConditionModel": motion_unet,
    "peft: DoRA on Llama": dora,
    "peft: IA3 on T5": ia3,
    "peft: prefix tuning on Llama": prefix_tuning,
    "peft: prompt encoder on BERT": prompt_encoder,
    "peft: OFT on Llama": orthogonal,
    "peft: VeRA on Llama": vera,
}

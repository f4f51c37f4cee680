"""Tiny transformers models that generate: each builder returns the model, an example call, and a prompt."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCAB, PAD, EOS, BOS = 64, 2, 1, 0
TOKENS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, "head_dim": 8}  # fmt: skip
Case = tuple[Any, dict[str, Tensor], dict[str, Tensor]]


def ids(rows: int, tokens: int, low: int = 3) -> Tensor:
    return torch.randint(low, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def finished(model: Any) -> Any:
    """Give every parameter a random value, so that the tokens depend on all of them, in float64."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=0.2 if parameter.dim() == 1 else 0.5)
    model = model.double()
    model.generation_config.pad_token_id = PAD
    return model.train()


def prompt(rows: int = 2, tokens: int = 7) -> dict[str, Tensor]:
    """Prompts of different lengths, padded on the left."""
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[0, :3] = 0
    return {"input_ids": ids(rows, tokens).masked_fill(mask == 0, PAD), "attention_mask": mask}


def causal(model: Any) -> Case:
    tokens = ids(4, 12)
    return finished(model), {"input_ids": tokens, "labels": tokens.clone()}, prompt()


def gpt2() -> Case:
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=128, resid_pdrop=0.1,
                           embd_pdrop=0.1, attn_pdrop=0.1, **TOKENS)  # fmt: skip
    return causal(hf.GPT2LMHeadModel(config))


def llama() -> Case:
    return causal(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **TOKENS)))


def qwen3() -> Case:
    return causal(hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, **TOKENS)))


def gemma3() -> Case:
    """One layer with a window of six tokens, one with full attention."""
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    return causal(hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **TOKENS, **layers)))


def mistral() -> Case:
    return causal(hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **TOKENS, sliding_window=6)))


def mixtral() -> Case:
    return causal(hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **TOKENS, num_local_experts=4,
                                                       experts_implementation="batched_mm")))  # fmt: skip


def gpt_oss() -> Case:
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    return causal(hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, **TOKENS, **layers, num_local_experts=4,
                                                       num_experts_per_tok=2,
                                                       experts_implementation="batched_mm")))  # fmt: skip


def mamba() -> Case:
    config = hf.MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=VOCAB, **TOKENS)
    return causal(hf.MambaForCausalLM(config))


def t5() -> Case:
    config = hf.T5Config(num_layers=2, num_decoder_layers=2, num_heads=4, d_model=32, d_kv=8, d_ff=48,
                         vocab_size=VOCAB, decoder_start_token_id=PAD, eos_token_id=EOS, pad_token_id=PAD)  # fmt: skip
    return finished(hf.T5ForConditionalGeneration(config)), {"input_ids": ids(4, 12), "labels": ids(4, 9)}, prompt()


def bart() -> Case:
    config = hf.BartConfig(encoder_layers=2, decoder_layers=2, d_model=32, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB,
                           max_position_embeddings=128, decoder_start_token_id=EOS, forced_eos_token_id=None,
                           **TOKENS)  # fmt: skip
    model = finished(hf.BartForConditionalGeneration(config))
    return model, {"input_ids": ids(4, 12), "labels": ids(4, 9)}, prompt()


def whisper() -> Case:
    config = hf.WhisperConfig(vocab_size=VOCAB, num_mel_bins=8, encoder_layers=2, decoder_layers=2, d_model=32,
                              encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                              decoder_ffn_dim=48, max_source_positions=16, max_target_positions=64,
                              decoder_start_token_id=5, suppress_tokens=None, begin_suppress_tokens=None,
                              **TOKENS)  # fmt: skip
    sound = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = finished(hf.WhisperForConditionalGeneration(config))
    return model, {"input_features": sound, "labels": ids(4, 9)}, {"input_features": sound[:2]}


def llava() -> Case:
    vision = hf.CLIPVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                 image_size=8, patch_size=4, projection_dim=16)  # fmt: skip
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**SIZES, **TOKENS), image_token_index=63,
                            image_seq_length=4)  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    tokens = ids(4, 12).clamp(max=62)
    tokens[:, 2:6] = 63
    short = tokens[:2, :9].clone()
    model = finished(hf.LlavaForConditionalGeneration(config))
    prompt = {"input_ids": short, "attention_mask": torch.ones_like(short), "pixel_values": pixels[:2]}
    return model, {"input_ids": tokens, "pixel_values": pixels, "labels": tokens.clone()}, prompt


def gpt_neo() -> Case:
    """Computes the positions of its mask from the number of keys, so that a cache of fixed length is not usable."""
    config = hf.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
                             vocab_size=VOCAB, max_position_embeddings=128, window_size=6, **TOKENS)  # fmt: skip
    return causal(hf.GPTNeoForCausalLM(config))


MODELS = {builder.__name__: builder for builder in (
    gpt2, llama, qwen3, gemma3, mistral, mixtral, gpt_oss, mamba, t5, bart, whisper, llava,
)}  # fmt: skip

"""Text and speech: language models, attention of many kinds, experts, state spaces, quantisers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, WIDTH, Case, predicts_tokens, squared, states, tokens

X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, SwiGLU, RMSNorm": {"rotary_pos_emb": True, "ff_glu": True, "ff_swish": True, "use_rmsnorm": True},
    "ALiBi, grouped keys": {"alibi_pos_bias": True, "attn_kv_heads": 2},
    "T5 bias": {"rel_pos_bias": True},
    "q-k norm, talking heads": {"attn_qk_norm": True, "attn_pre_talking_heads": True},
    "macaron": {"macaron": True},
    "memory key-values": {"attn_num_mem_kv": 4},
    "top-k attention": {"attn_sparse_topk": 4},
    "hyper-connections": {"num_residual_streams": 2},
    "flash": {"attn_flash": True},
    "gated residuals": {"gate_residual": True},
    "shifted tokens": {"shift_tokens": 1},
}


def x_transformer(name: str) -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=2, heads=4, attn_dim_head=8, **X_TRANSFORMERS[name])
    model = TransformerWrapper(num_tokens=VOCAB, max_seq_len=32, attn_layers=layers)
    return Case(AutoregressiveWrapper(model), (tokens(),))


def x_encoder_decoder() -> Case:
    from x_transformers import XTransformer

    sizes = {"num_tokens": VOCAB, "depth": 1, "heads": 4, "max_seq_len": 32, "attn_dim_head": 8}
    both = {f"{part}_{key}": value for part in ("enc", "dec") for key, value in sizes.items()}
    return Case(XTransformer(dim=WIDTH, **both), (tokens(), tokens()))


LITGPT: dict[str, dict[str, Any]] = {
    "pythia": {"parallel_residual": True, "rotary_percentage": 0.25, "bias": True},
    "Llama": {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "n_query_groups": 2,
              "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "intermediate_size": 64},
    "Mixtral": {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMoE", "n_query_groups": 2, "n_expert": 4,
                "n_expert_per_token": 2, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
                "intermediate_size": 64},
    "Gemma": {"norm_class_name": "RMSNorm", "mlp_class_name": "GemmaMLP", "rotary_percentage": 1.0, "bias": False,
              "parallel_residual": False, "intermediate_size": 64, "scale_embeddings": True, "head_size": 16},
}  # fmt: skip


def litgpt_model(name: str) -> Case:
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=32, n_layer=2, n_embd=WIDTH, n_head=4, padded_vocab_size=VOCAB, vocab_size=VOCAB, **LITGPT[name]
    )
    return predicts_tokens(GPT(config), tokens())


def linformer() -> Case:
    from linformer import LinformerLM

    return predicts_tokens(LinformerLM(num_tokens=VOCAB, dim=WIDTH, seq_len=LENGTH, depth=2, heads=4, k=6), tokens())


def performer() -> Case:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=VOCAB, max_seq_len=LENGTH, dim=WIDTH, depth=2, heads=4, dim_head=8, causal=False)
    return predicts_tokens(model, tokens())


def reformer(**options: Any) -> Case:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(num_tokens=VOCAB, dim=WIDTH, depth=2, max_seq_len=16, heads=4, dim_head=8, bucket_size=4,
                       n_hashes=2, ff_chunks=1, **options)  # fmt: skip
    return predicts_tokens(model, tokens(16))


def nystromformer() -> Case:
    from nystrom_attention import Nystromformer

    return squared(Nystromformer(dim=WIDTH, depth=2, heads=4, dim_head=8, num_landmarks=4), states())


def local_transformer() -> Case:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=VOCAB, dim=WIDTH, depth=2, heads=4, dim_head=8, max_seq_len=16, local_attn_window_size=4
    )
    return predicts_tokens(model, tokens(16))


def linear_attention() -> Case:
    from linear_attention_transformer import LinearAttentionTransformerLM

    model = LinearAttentionTransformerLM(
        num_tokens=VOCAB, dim=WIDTH, depth=2, heads=4, dim_head=8, max_seq_len=LENGTH, causal=True
    )
    return predicts_tokens(model, tokens())


def h_transformer() -> Case:
    from h_transformer_1d import HTransformer1D

    model = HTransformer1D(num_tokens=VOCAB, dim=WIDTH, depth=2, heads=4, dim_head=8, max_seq_len=16, block_size=4)
    return predicts_tokens(model, tokens(16))


def ring_transformer() -> Case:
    from ring_attention_pytorch import RingTransformer

    model = RingTransformer(num_tokens=VOCAB, dim=WIDTH, depth=2, causal=True, heads=4, dim_head=8, bucket_size=4,
                            ring_attn=False, use_cuda_kernel=False)  # fmt: skip
    return predicts_tokens(model, tokens(16))


def palm() -> Case:
    from palm_pytorch import PaLM

    return predicts_tokens(PaLM(dim=WIDTH, num_tokens=VOCAB, depth=2, heads=4, dim_head=8), tokens())


def megabyte() -> Case:
    from MEGABYTE_pytorch import MEGABYTE

    model = MEGABYTE(num_tokens=VOCAB, dim=(32, 16), depth=(1, 1), max_seq_len=(4, 4), heads=4, dim_head=8)
    return Case(model, (tokens(16),), {"return_loss": True})


def retnet() -> Case:
    from yet_another_retnet.retnet import RetNet

    model = RetNet(num_tokens=VOCAB, d_model=WIDTH, nhead=4, num_layers=2, dim_feedforward=64, dropout=0.0)
    return Case(model, (tokens(), tokens()))


def mamba(two: bool = False, scan: bool = True) -> Case:
    from mambapy.mamba import Mamba, MambaConfig

    return squared(Mamba(MambaConfig(d_model=WIDTH, n_layers=2, d_state=4, pscan=scan)), states())


def jamba() -> Case:
    from mambapy.jamba import Jamba, JambaLMConfig

    config = JambaLMConfig(d_model=WIDTH, n_layers=2, mlp_size=64, num_attention_heads=4, num_key_value_heads=2,
                           num_experts=2, num_experts_per_tok=1, d_state=4, vocab_size=VOCAB)  # fmt: skip
    return squared(First(Jamba(config)), states())


class First(nn.Module):
    """The first of a model's outputs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs = self.model(*args, **kwargs)
        return outputs[0]


def soft_moe() -> Case:
    from soft_moe_pytorch import SoftMoE

    return squared(SoftMoE(dim=WIDTH, seq_len=LENGTH, num_experts=4), states())


def st_moe() -> Case:
    from st_moe_pytorch import MoE, SparseMoEBlock

    moe = MoE(dim=WIDTH, num_experts=4, gating_top_n=2)
    return Case(SparseMoEBlock(moe, add_ff_before=True, add_ff_after=True), (states(),))


def colt5() -> Case:
    from colt5_attention import ConditionalRoutedFeedForward

    return squared(ConditionalRoutedFeedForward(WIDTH, num_heavy_tokens=4), states())


def product_keys() -> Case:
    from product_key_memory import PKM

    return squared(PKM(dim=WIDTH, heads=2, num_keys=8, topk=4, dim_head=16), states())


def quantizer(name: str) -> Case:
    import vector_quantize_pytorch as quantizers

    options: dict[str, dict[str, Any]] = {
        "VectorQuantize": {"dim": WIDTH, "codebook_size": 16},
        "ResidualVQ": {"dim": WIDTH, "codebook_size": 16, "num_quantizers": 2},
        "FSQ": {"levels": [4, 3, 3], "dim": WIDTH},
        "LFQ": {"codebook_size": 16, "dim": WIDTH},
        "ResidualFSQ": {"dim": WIDTH, "levels": [4, 3, 3], "num_quantizers": 2},
        "SimVQ": {"dim": WIDTH, "codebook_size": 16},
    }
    return Case(nn.Sequential(nn.Linear(WIDTH, WIDTH), getattr(quantizers, name)(**options[name])), (states(),))


def coca() -> Case:
    from coca_pytorch.coca_pytorch import CoCa

    model = CoCa(dim=WIDTH, image_dim=WIDTH, num_tokens=VOCAB, unimodal_depth=1, multimodal_depth=1, heads=4,
                 dim_head=8, num_img_queries=4)  # fmt: skip
    call = {"text": torch.randint(1, VOCAB, (ROWS, LENGTH)), "image_tokens": states(16), "return_loss": True}
    return Case(model, kwargs=call)


def x_clip() -> Case:
    from x_clip import CLIP

    sizes = {"dim_text": 32, "dim_image": 32, "dim_latent": 16, "num_text_tokens": VOCAB, "text_enc_depth": 1,
             "text_seq_len": LENGTH, "text_heads": 4, "text_dim_head": 8, "visual_enc_depth": 1, "visual_heads": 4,
             "visual_dim_head": 8, "visual_image_size": 32, "visual_patch_size": 8}  # fmt: skip
    call = {"text": torch.randint(1, VOCAB, (ROWS, LENGTH)), "image": torch.randn(ROWS, 3, 32, 32), "return_loss": True}
    return Case(CLIP(**sizes), kwargs=call)


def g_mlp() -> Case:
    from g_mlp_pytorch import gMLP

    return predicts_tokens(gMLP(num_tokens=VOCAB, dim=WIDTH, depth=2, seq_len=LENGTH), tokens())


def conformer() -> Case:
    from conformer import Conformer

    return squared(Conformer(dim=WIDTH, depth=2, heads=4, dim_head=8, conv_kernel_size=5), states())


def tagger() -> Case:
    from torchcrf import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.scores = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.crf = CRF(CLASSES, batch_first=True)

        def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
            return -self.crf(self.scores(self.words(ids)), tags, reduction="mean")

    return Case(Tagger(), (tokens(), torch.randint(CLASSES, (ROWS, LENGTH))))


def entmax() -> Case:
    from entmax import entmax15

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return entmax15(self.q(x) @ self.k(x).mT / WIDTH**0.5, dim=-1) @ self.v(x)

    return squared(Attention(), states())


def rotary() -> Case:
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.rotary = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), RotaryEmbedding(8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

    return squared(Attention(), states())


def sentence_transformer() -> Case:
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": VOCAB}
            self.bert, self.pool = BertModel(BertConfig(hidden_size=WIDTH, **sizes)), Pooling(WIDTH)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            found = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return self.pool({"token_embeddings": found, "attention_mask": attention_mask})["sentence_embedding"]

    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))).long()
    return squared(Encoder(), tokens(), mask)


def metric_loss(name: str) -> Case:
    from pytorch_metric_learning import losses

    loss = getattr(losses, name)(**({"num_classes": CLASSES, "embedding_size": 16} if "Face" in name else {}))

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 16)), loss

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.net(x), labels)

    return Case(Embedder(), (torch.randn(ROWS, WIDTH), torch.randint(3, (ROWS,))))


MODELS: dict[str, Callable[[], Case]] = {
    **{f"x-transformers: {name}": partial(x_transformer, name) for name in X_TRANSFORMERS},
    "x-transformers: XTransformer": x_encoder_decoder,
    **{f"litgpt: {name}": partial(litgpt_model, name) for name in LITGPT},
    "linformer: LinformerLM": linformer,
    "performer-pytorch: PerformerLM": performer,
    "reformer-pytorch: ReformerLM": reformer,
    "reformer-pytorch: full attention": partial(reformer, use_full_attn=True),
    "nystrom-attention: Nystromformer": nystromformer,
    "local-attention: LocalTransformer": local_transformer,
    "linear-attention-transformer: LM": linear_attention,
    "h-transformer-1d: HTransformer1D": h_transformer,
    "ring-attention-pytorch: RingTransformer": ring_transformer,
    "palm-pytorch: PaLM": palm,
    "megabyte-pytorch: MEGABYTE": megabyte,
    "yet-another-retnet: RetNet": retnet,
    "mambapy: Mamba": mamba,
    "mambapy: Mamba, step by step": partial(mamba, scan=False),
    "mambapy: Jamba": jamba,
    "soft-moe-pytorch: SoftMoE": soft_moe,
    "st-moe-pytorch: SparseMoEBlock": st_moe,
    "colt5-attention: routed feed-forward": colt5,
    "product-key-memory: PKM": product_keys,
    **{
        f"vector-quantize-pytorch: {name}": partial(quantizer, name)
        for name in ("VectorQuantize", "ResidualVQ", "FSQ", "LFQ", "ResidualFSQ", "SimVQ")
    },
    "coca-pytorch: CoCa": coca,
    "x-clip: CLIP": x_clip,
    "g-mlp-pytorch: gMLP": g_mlp,
    "conformer: Conformer": conformer,
    "pytorch-crf: CRF tagger": tagger,
    "entmax: entmax attention": entmax,
    "rotary-embedding-torch: attention": rotary,
    "sentence-transformers: mean of tokens": sentence_transformer,
    **{
        f"pytorch-metric-learning: {name}": partial(metric_loss, name)
        for name in ("ArcFaceLoss", "NTXentLoss", "TripletMarginLoss", "ContrastiveLoss", "MultiSimilarityLoss")
    },
}

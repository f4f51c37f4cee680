"""Text, retrieval, tables, series, recommendation and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, WIDTH, Case, predicts_tokens, squared, tokens, written
from by_others.unseen.numba_import import import_numba

SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


# Text


def curated(name: str) -> Case:
    from curated_transformers import models
    from curated_transformers.layers import AttentionMask

    def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
        output = self.model(ids, AttentionMask(mask))
        return output.logits if name == "Llama" else output.last_hidden_layer_state

    if name == "Llama":
        config: Any = models.LlamaConfig(
            hidden_width=WIDTH,
            intermediate_width=64,
            n_query_heads=4,
            n_key_value_heads=2,
            n_hidden_layers=2,
            n_pieces=VOCAB,
            dtype=torch.float32,
        )
        model: Any = models.LlamaCausalLM(config)
    else:
        config = models.BERTConfig(
            embedding_width=WIDTH,
            hidden_width=WIDTH,
            intermediate_width=64,
            n_attention_heads=4,
            n_hidden_layers=2,
            n_pieces=VOCAB,
        )
        model = models.BERTEncoder(config)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))
    return written(forward, tokens(), mask, model=model)


def entity_spans() -> Case:
    from gliner.config import UniEncoderSpanConfig
    from gliner.modeling.base import UniEncoderSpanModel

    encoder = {"model_type": "bert", **SMALL, "vocab_size": VOCAB, "max_position_embeddings": 64}
    config = UniEncoderSpanConfig(
        max_width=3,
        hidden_size=WIDTH,
        encoder_config=encoder,
        class_token_index=VOCAB - 1,
        vocab_size=VOCAB,
        fine_tune=True,
        num_rnn_layers=1,
    )
    ids = torch.randint(5, VOCAB - 1, (ROWS, 14))
    ids[:, [1, 3]] = VOCAB - 1
    words = torch.zeros(ROWS, 14, dtype=torch.long)
    words[:, 5:13] = torch.arange(1, 9)
    start = torch.arange(8).repeat_interleave(3)
    spans = torch.stack([start, (start + torch.arange(3).repeat(8))], -1).expand(ROWS, 24, 2).contiguous()
    model = UniEncoderSpanModel(config)
    return Case(
        model,
        (),
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "words_mask": words,
            "text_lengths": torch.full((ROWS, 1), 8),
            "span_idx": spans,
            "span_mask": spans[..., 1] < 8,
            "labels": (torch.rand(ROWS, 8, 3, 2) < 0.1).float(),
        },
    )


def dependency_parser() -> Case:
    from stanza.models.common.biaffine import DeepBiaffineScorer
    from stanza.models.common.packed_lstm import PackedLSTM

    def forward(self: Any, ids: Tensor, lengths: list[int], head: Tensor) -> Tensor:
        h = self.lstm(self.words(ids), lengths)[0]
        scores = self.arcs(h, h).squeeze(3)
        diagonal = torch.eye(scores.size(1), dtype=torch.bool).unsqueeze(0)
        scores.masked_fill_(diagonal, -float("inf"))
        return self.criterion(scores[:, 1:].reshape(-1, scores.size(2)), head[:, 1:].reshape(-1))

    lengths = sorted([*torch.randint(4, LENGTH + 1, (ROWS - 1,)).tolist(), LENGTH], reverse=True)
    head = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for row, length in enumerate(lengths):
        head[row] = (torch.arange(LENGTH) + 1) % length
        head[row, length:] = -1
    head[head == torch.arange(LENGTH)] = -1
    return written(
        forward,
        tokens(),
        lengths,
        head,
        words=nn.Embedding(VOCAB, WIDTH),
        criterion=nn.CrossEntropyLoss(ignore_index=-1),
        lstm=PackedLSTM(WIDTH, 16, 1, batch_first=True, bidirectional=True, pad=True),
        arcs=DeepBiaffineScorer(WIDTH, WIDTH, 16, 1, pairwise=True, dropout=0.1),
    )


def sentence_encoder() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model = BertModel(BertConfig(**SMALL, vocab_size=VOCAB), add_pooling_layer=False)

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            found = self.auto_model(features["input_ids"], features["attention_mask"]).last_hidden_state
            return {**features, "token_embeddings": found}

    return SentenceTransformer(modules=[Words(), Pooling(WIDTH)], device="cpu")


def sentence_loss(name: str) -> Case:
    from sentence_transformers import losses

    model = sentence_encoder()
    labels = torch.zeros(ROWS)
    if name == "CosineSimilarityLoss":
        loss: Any = losses.CosineSimilarityLoss(model)
        labels = torch.rand(ROWS)
    elif name == "MatryoshkaLoss":
        loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [WIDTH, 16, 8])
    else:
        loss = getattr(losses, name)(model)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))).long()
    features = [{"input_ids": tokens(), "attention_mask": mask} for _ in range(2)]
    return Case(loss.train(), (features, labels))


def hooked_transformer() -> Case:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=WIDTH,
        n_ctx=LENGTH,
        d_head=8,
        n_heads=4,
        d_vocab=VOCAB,
        act_fn="gelu_new",
        device="cpu",
        seed=0,
    )
    return Case(HookedTransformer(config), (tokens(),), {"return_type": "loss"})


def low_rank_library() -> Case:
    import loralib

    def forward(self: Any, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.words(ids)).view(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(h)

    case = written(
        forward,
        tokens(),
        words=loralib.Embedding(VOCAB, WIDTH, r=2),
        head=loralib.Linear(WIDTH, VOCAB, r=2),
        qkv=loralib.MergedLinear(WIDTH, 3 * WIDTH, r=4, enable_lora=[True, False, True], lora_dropout=0.1),
    )
    loralib.mark_only_lora_as_trainable(case.model)
    return predicts_tokens(case.model, tokens())


# Tables and recommendation


def efficient_ensemble() -> Case:
    from rtdl_num_embeddings import PeriodicEmbeddings
    from tabm import TabM

    model = TabM.make(
        n_num_features=6,
        cat_cardinalities=[3, 5],
        d_out=CLASSES,
        k=4,
        n_blocks=2,
        d_block=16,
        num_embeddings=PeriodicEmbeddings(6, 8, lite=False),
    )

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.repeat_interleave(output.shape[1]))

    categories = torch.stack([torch.randint(3, (ROWS,)), torch.randint(5, (ROWS,))], 1)
    return Case(model, (torch.randn(ROWS, 6), categories), loss_fn=loss, target=torch.randint(CLASSES, (ROWS,)))


def table_frame(name: str) -> Case:
    import torch_frame
    from torch_frame import nn as frames
    from torch_frame.data import TensorFrame
    from torch_frame.data.stats import StatType

    names = {torch_frame.numerical: ["a", "b", "c"], torch_frame.categorical: ["d", "e"]}
    number = {StatType.MEAN: 0.0, StatType.STD: 1.0, StatType.QUANTILES: [-2.0, -1.0, 0.0, 1.0, 2.0]}
    stats: dict[str, dict[Any, Any]] = {column: dict(number) for column in "abc"}
    stats |= {column: {StatType.COUNT: (["x", "y", "z"], [3, 3, 2])} for column in "de"}
    data = {torch_frame.numerical: torch.randn(ROWS, 3), torch_frame.categorical: torch.randint(3, (ROWS, 2))}
    options: dict[str, Any] = {
        "channels": 16,
        "out_channels": CLASSES,
        "num_layers": 2,
        "col_stats": stats,
        "col_names_dict": names,
    }
    if name == "Trompt":
        options["num_prompts"] = 4
    model = getattr(frames, name)(**options)
    return Case(model, (TensorFrame(data, names),))


def factorization() -> Case:
    from torchfm.model.afi import AutomaticFeatureInteractionModel

    model = AutomaticFeatureInteractionModel(
        [5, 6, 7], embed_dim=8, num_heads=2, num_layers=2, mlp_dims=(16,), dropouts=(0.1, 0.1)
    )
    rows = torch.stack([torch.randint(n, (ROWS,)) for n in (5, 6, 7)], 1)
    return Case(model, (rows,), loss_fn=F.binary_cross_entropy, target=torch.randint(2, (ROWS,)).float())


# Series


def fusion_transformer() -> Case:
    import_numba()
    from pytorch_forecasting.data.encoders import TorchNormalizer
    from pytorch_forecasting.metrics import QuantileLoss
    from pytorch_forecasting.models import TemporalFusionTransformer

    model = TemporalFusionTransformer(
        hidden_size=16,
        lstm_layers=1,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=8,
        output_size=3,
        loss=QuantileLoss([0.1, 0.5, 0.9]),
        max_encoder_length=8,
        static_categoricals=["s"],
        static_reals=[],
        time_varying_reals_encoder=["t", "y"],
        time_varying_reals_decoder=["t"],
        time_varying_categoricals_encoder=[],
        time_varying_categoricals_decoder=[],
        x_reals=["t", "y"],
        x_categoricals=["s"],
        embedding_labels={"s": range(5)},
        embedding_sizes={"s": (5, 4)},
        embedding_paddings=[],
        categorical_groups={},
        output_transformer=TorchNormalizer(),
    )
    batch = {
        "encoder_cont": torch.randn(ROWS, 8, 2),
        "decoder_cont": torch.randn(ROWS, 4, 2),
        "encoder_cat": torch.zeros(ROWS, 8, 1, dtype=torch.long),
        "decoder_cat": torch.zeros(ROWS, 4, 1, dtype=torch.long),
        "encoder_lengths": torch.full((ROWS,), 8),
        "decoder_lengths": torch.full((ROWS,), 4),
        "target_scale": torch.tensor([[0.0, 1.0]]).repeat(ROWS, 1),
    }
    return Case(model, (batch,))


def hierarchical_series(name: str) -> Case:
    import_numba()
    from neuralforecast import losses, models

    options: dict[str, Any] = {"h": 4, "input_size": 8, "max_steps": 1}
    if name == "NHITS":
        options |= {"n_pool_kernel_size": [2, 2, 1], "n_freq_downsample": [2, 1, 1], "mlp_units": 3 * [[16, 16]]}
    elif name == "TimesNet":
        options |= {"hidden_size": 8, "conv_hidden_size": 8, "top_k": 2, "num_kernels": 2, "encoder_layers": 1}
    else:
        options |= {
            "hidden_size": 16,
            "linear_hidden_size": 32,
            "factor": 1,
            "n_head": 2,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "MovingAvg_window": 3,
        }
    model = getattr(models, name)(**options, loss=losses.pytorch.MAE())
    future = {"futr_exog": None, "hist_exog": None, "stat_exog": None}
    batch = {"insample_y": torch.randn(ROWS, 8, 1), "insample_mask": torch.ones(ROWS, 8, 1), **future}
    return squared(model, batch)


def tiny_mixer() -> Case:
    from tsfm_public.models.tinytimemixer import TinyTimeMixerConfig, TinyTimeMixerForPrediction

    config = TinyTimeMixerConfig(
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=8,
        num_input_channels=2,
        d_model=16,
        num_layers=2,
        adaptive_patching_levels=1,
        decoder_num_layers=1,
        decoder_d_model=16,
        dropout=0.1,
    )
    model = TinyTimeMixerForPrediction(config)
    return Case(model, (), {"past_values": torch.randn(ROWS, 32, 2), "future_values": torch.randn(ROWS, 8, 2)})


# Graphs

EDGES = torch.stack([torch.arange(24) % 8, (torch.arange(24) * 3 + 1) % 8])


def heterogeneous_graph() -> Case:
    from torch_geometric.nn import HGTConv

    kinds = ["user", "item"], [("user", "buys", "item"), ("item", "of", "user")]

    class HGT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.ModuleDict({kind: nn.Linear(8, 16) for kind in kinds[0]})
            self.convs = nn.ModuleList(HGTConv(16, 16, kinds, heads=2) for _ in range(2))
            self.head = nn.Linear(16, 3)

        def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], label: Tensor) -> Tensor:
            x = {kind: self.lin[kind](value).relu_() for kind, value in x.items()}
            for conv in self.convs:
                x = conv(x, edges)
            return F.cross_entropy(self.head(x["user"]), label)

    x = {kind: torch.randn(8, 8) for kind in kinds[0]}
    return Case(HGT(), (x, dict.fromkeys(kinds[1], EDGES), torch.randint(3, (8,))))


def relational_graph() -> Case:
    from torch_geometric.nn import RGCNConv

    def forward(self: Any, edges: Tensor, kinds: Tensor, head: Tensor, tail: Tensor) -> Tensor:
        x = self.second(self.first(self.nodes, edges, kinds).relu(), edges, kinds)
        positive = (x[head] * self.relation * x[tail]).sum(-1)
        negative = (x[head] * self.relation * x[torch.randint(8, tail.shape)]).sum(-1)
        score, wanted = torch.cat([positive, negative]), torch.cat([torch.ones(6), torch.zeros(6)])
        return F.binary_cross_entropy_with_logits(score, wanted) + 0.01 * x.pow(2).mean()

    return written(
        forward,
        EDGES,
        torch.randint(3, (24,)),
        torch.arange(6),
        torch.arange(6) + 2,
        first=RGCNConv(8, 16, 3, num_bases=2),
        second=RGCNConv(16, 16, 3, num_bases=2),
        nodes=nn.Parameter(torch.randn(8, 8)),
        relation=nn.Parameter(torch.randn(16)),
    )


def graph_transformer() -> Case:
    from torch_geometric.nn import GINEConv, GPSConv, global_add_pool

    class GPS(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes, self.edges, self.head = nn.Embedding(10, 16), nn.Embedding(4, 16), nn.Linear(16, 1)
            steps = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2)]
            self.convs = nn.ModuleList(GPSConv(16, GINEConv(step), heads=2, dropout=0.1) for step in steps)

        def forward(self, x: Tensor, edges: Tensor, kinds: Tensor, batch: Tensor, y: Tensor) -> Tensor:
            h, kinds = self.nodes(x), self.edges(kinds)
            for conv in self.convs:
                h = conv(h, edges, batch, edge_attr=kinds)
            return F.l1_loss(self.head(global_add_pool(h, batch)).squeeze(-1), y)

    batch = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 0, 4, 5, 6, 7, 3]])
    return Case(GPS(), (torch.randint(10, (8,)), edges, torch.randint(4, (8,)), batch, torch.randn(2)))


def graph_autoencoder() -> Case:
    from torch_geometric.nn import VGAE, GCNConv

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mean, self.spread = GCNConv(8, 16), GCNConv(16, 4), GCNConv(16, 4)

        def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x, edges).relu()
            return self.mean(x, edges), self.spread(x, edges)

    def forward(self: Any, x: Tensor, edges: Tensor) -> Tensor:
        z = self.vgae.encode(x, edges)
        return self.vgae.recon_loss(z, edges) + self.vgae.kl_loss() / len(x)

    return written(forward, torch.randn(8, 8), EDGES, vgae=VGAE(Encoder()))


def knowledge_graph(name: str) -> Case:
    from pykeen import models
    from pykeen.triples import CoreTriplesFactory

    triples = CoreTriplesFactory.create(
        torch.stack([torch.arange(20) % 8, torch.arange(20) % 3, torch.arange(20) % 7], 1)
    )
    model = getattr(models, name)(triples_factory=triples, random_seed=0)

    loss = nn.MarginRankingLoss(margin=1.0)

    def ranked(self: Any, positive: Tensor, negative: Tensor) -> Tensor:
        good, bad = self.model.score_hrt(positive), self.model.score_hrt(negative)
        return self.loss(good, bad, torch.ones_like(good))

    negative = triples.mapped_triples.clone()
    negative[:, 2] = torch.randint(8, (20,))
    return written(ranked, triples.mapped_triples[:16], negative[:16], model=model, loss=loss)


MODELS: dict[str, Callable[[], Case]] = {
    "curated-transformers: Llama": lambda: curated("Llama"),
    "curated-transformers: BERT": lambda: curated("BERT"),
    "gliner: span model": entity_spans,
    "stanza: biaffine parser": dependency_parser,
    **{
        f"sentence-transformers: {name}": (lambda name=name: sentence_loss(name))
        for name in ("MultipleNegativesRankingLoss", "CosineSimilarityLoss", "MatryoshkaLoss")
    },
    "transformer-lens: HookedTransformer": hooked_transformer,
    "loralib: attention": low_rank_library,
    "tabm: TabM": efficient_ensemble,
    "pytorch-frame: FTTransformer": lambda: table_frame("FTTransformer"),
    "pytorch-frame: Trompt": lambda: table_frame("Trompt"),
    "torchfm: AutoInt": factorization,
    "pytorch-forecasting: TemporalFusionTransformer": fusion_transformer,
    "neuralforecast: NHITS": lambda: hierarchical_series("NHITS"),
    "neuralforecast: TimesNet": lambda: hierarchical_series("TimesNet"),
    "neuralforecast: Autoformer": lambda: hierarchical_series("Autoformer"),
    "granite-tsfm: TinyTimeMixer": tiny_mixer,
    "torch-geometric: HGT": heterogeneous_graph,
    "torch-geometric: RGCN on links": relational_graph,
    "torch-geometric: GPS": graph_transformer,
    "torch-geometric: VGAE": graph_autoencoder,
    "pykeen: TransE": lambda: knowledge_graph("TransE"),
    "pykeen: ComplEx": lambda: knowledge_graph("ComplEx"),
}

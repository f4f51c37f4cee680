"""Rows of a table, recommendation, time series, recurrent cells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, ROWS, WIDTH, Case, classified, squared, states


def tabnet(mask: str = "sparsemax") -> Case:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(16, CLASSES, cat_idxs=[0], cat_dims=[4], cat_emb_dim=[2], virtual_batch_size=8, mask_type=mask,
                   group_attention_matrix=torch.eye(16))  # fmt: skip
    x = torch.randn(ROWS, 16)
    x[:, 0] = torch.randint(4, (ROWS,))
    return Case(model, (x,), loss_fn=first_classified, target=torch.randint(CLASSES, (ROWS,)))


def first_classified(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


DEEPCTR: dict[str, dict[str, Any]] = {
    "DeepFM": {}, "WDL": {}, "xDeepFM": {"cin_layer_size": (8, 8)}, "DCN": {}, "AutoInt": {}, "NFM": {},
    "FiBiNET": {}, "PNN": {}, "DIFM": {},
}  # fmt: skip


def deepctr_model(name: str) -> Case:
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"item {i}", 20, 4) for i in range(3)] + [DenseFeat("price", 1)]
    taken = {"dnn_feature_columns": columns, "dnn_hidden_units": (32, 16)}
    if name != "PNN":
        taken["linear_feature_columns"] = columns
    x = torch.cat([torch.randint(20, (ROWS, 3)).float(), torch.rand(ROWS, 1)], dim=1)
    model = getattr(models, name)(**taken, **DEEPCTR[name])
    return Case(model, (x,), loss_fn=clicks, target=torch.randint(2, (ROWS, 1)).float())


def clicks(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(output, target.to(output.dtype))


def rechub_model(name: str) -> Case:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models import ranking

    sparse = [SparseFeature(f"item{i}", vocab_size=20, embed_dim=4) for i in range(3)]
    both = [*sparse, DenseFeature("price")]
    layers = {"dims": [16], "dropout": 0.0, "activation": "relu"}
    models: dict[str, Callable[[], nn.Module]] = {
        "DeepFM": lambda: ranking.DeepFM(deep_features=both, fm_features=sparse, mlp_params=layers),
        "WideDeep": lambda: ranking.WideDeep(wide_features=sparse, deep_features=both, mlp_params=layers),
        "DCNv2": lambda: ranking.DCNv2(features=both, n_cross_layers=2, mlp_params=layers),
    }
    batch = {f"item{i}": torch.randint(20, (ROWS,)) for i in range(3)} | {"price": torch.rand(ROWS)}
    return Case(models[name](), (batch,), loss_fn=clicks, target=torch.randint(2, (ROWS,)).float())


def revisited(name: str) -> Case:
    import rtdl_revisiting_models as models

    numbers, categories = torch.randn(ROWS, 6), torch.randint(4, (ROWS, 2))
    if name == "MLP":
        return classified(models.MLP(d_in=6, d_out=CLASSES, n_blocks=2, d_block=32, dropout=0.1), numbers)
    if name == "ResNet":
        model = models.ResNet(d_in=6, d_out=CLASSES, n_blocks=2, d_block=32, d_hidden=None, d_hidden_multiplier=2.0,
                              dropout1=0.1, dropout2=0.0)  # fmt: skip
        return classified(model, numbers)
    sizes = {"n_blocks": 2, "d_block": 32, "attention_n_heads": 4, "attention_dropout": 0.1, "ffn_d_hidden": 64,
             "ffn_d_hidden_multiplier": None, "ffn_dropout": 0.1, "residual_dropout": 0.0}  # fmt: skip
    model = models.FTTransformer(n_cont_features=6, cat_cardinalities=[4, 4], d_out=CLASSES, **sizes)
    return classified(model, numbers, categories)


def numeric_embeddings(name: str) -> Case:
    import rtdl_num_embeddings as embeddings

    if name == "PeriodicEmbeddings":
        first: nn.Module = embeddings.PeriodicEmbeddings(6, 8, lite=False)
    else:
        bins = embeddings.compute_bins(torch.randn(100, 6), n_bins=4)
        first = embeddings.PiecewiseLinearEmbeddings(bins, 8, activation=False, version="B")
    return classified(nn.Sequential(first, nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
                      torch.randn(ROWS, 6))  # fmt: skip


def tab_transformer(name: str) -> Case:
    import tab_transformer_pytorch as models

    sizes = {"categories": (4, 6), "num_continuous": 6, "dim": 16, "dim_out": CLASSES, "depth": 2, "heads": 4}
    model = getattr(models, name)(**sizes, dim_head=4, **({"mlp_act": nn.ReLU()} if name == "TabTransformer" else {}))
    return classified(model, torch.randint(4, (ROWS, 2)), torch.randn(ROWS, 6))


def forecasting_net(name: str) -> Case:
    from pytorch_forecasting.models.temporal_fusion_transformer import sub_modules

    if name == "GatedResidualNetwork":
        return squared(sub_modules.GatedResidualNetwork(WIDTH, 64, WIDTH, dropout=0.1), states())
    model = sub_modules.InterpretableMultiHeadAttention(n_head=4, d_model=WIDTH, dropout=0.0)
    return Case(model, (states(), states(), states()))


def dlinear() -> Case:
    class DLinear(nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.decompose = module(kernel_size=3)
            self.season, self.trend = nn.Linear(12, 4), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            season, trend = self.decompose(x)
            return self.season(season.mT) + self.trend(trend.mT)

    from pytorch_forecasting.layers import SeriesDecomposition

    return squared(DLinear(SeriesDecomposition), states())


def i_transformer() -> Case:
    from iTransformer import iTransformer

    model = iTransformer(num_variates=6, lookback_len=12, dim=32, depth=2, heads=4, dim_head=8, pred_length=4)
    return Case(model, (torch.randn(ROWS, 12, 6), torch.randn(ROWS, 4, 6)))


def chronos() -> Case:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    bolt = {"context_length": 16, "prediction_length": 4, "input_patch_size": 4, "input_patch_stride": 4,
            "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}  # fmt: skip
    config = T5Config(d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=2,
                      pad_token_id=0, decoder_start_token_id=0,
                      chronos_config=bolt, is_encoder_decoder=True)  # fmt: skip
    call = {"context": torch.randn(ROWS, 16), "target": torch.randn(ROWS, 4)}
    return Case(ChronosBoltModelForForecasting(config), kwargs=call)


def gluonts_deepar() -> Case:
    from gluonts.torch.model.deepar.module import DeepARModel

    model = DeepARModel(freq="D", context_length=6, prediction_length=3, num_feat_dynamic_real=1,
                        num_feat_static_real=1, num_feat_static_cat=1, cardinality=[4], hidden_size=16,
                        lags_seq=[1, 2])  # fmt: skip
    past, future = 6 + max(model.lags_seq), 3

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Tensor) -> Tensor:
            return self.model.loss(**batch).mean()

    batch = {
        "feat_static_cat": torch.randint(4, (ROWS, 1)), "feat_static_real": torch.randn(ROWS, 1),
        "past_time_feat": torch.randn(ROWS, past, 1), "past_target": torch.randn(ROWS, past),
        "past_observed_values": torch.ones(ROWS, past), "future_time_feat": torch.randn(ROWS, future, 1),
        "future_target": torch.randn(ROWS, future), "future_observed_values": torch.ones(ROWS, future),
    }  # fmt: skip
    return Case(Loss(), kwargs=batch)


def gluonts_mlp() -> Case:
    from gluonts.torch.model.d_linear.module import DLinearModel

    model = DLinearModel(prediction_length=4, context_length=12, hidden_dimension=16, kernel_size=3)
    return Case(model, (torch.randn(ROWS, 12), torch.ones(ROWS, 12)))


def gluonts_patches() -> Case:
    from gluonts.torch.model.patch_tst.module import PatchTSTModel

    model = PatchTSTModel(prediction_length=4, context_length=16, patch_len=4, stride=4, d_model=16, nhead=4,
                          dim_feedforward=32, dropout=0.0, activation="relu", norm_first=True, num_encoder_layers=2,
                          scaling="mean", padding_patch="end", num_feat_dynamic_real=0)  # fmt: skip
    return Case(model, (torch.randn(ROWS, 16), torch.ones(ROWS, 16)))


def tcn() -> Case:
    from pytorch_tcn import TCN

    return squared(TCN(WIDTH, [16, 16], kernel_size=3, dropout=0.0, causal=True), torch.randn(ROWS, WIDTH, 12))


def liquid(name: str) -> Case:
    from ncps import torch as cells

    return Case(getattr(cells, name)(8, 16), (states(6, 8),))


def kan() -> Case:
    from kan import KAN

    return squared(KAN(width=[4, 5, 1], grid=3, k=3, auto_save=False, symbolic_enabled=False), torch.rand(ROWS, 4))


MODELS: dict[str, Callable[[], Case]] = {
    "pytorch-tabnet: TabNet": tabnet,
    "pytorch-tabnet: entmax": partial(tabnet, "entmax"),
    **{f"deepctr-torch: {name}": partial(deepctr_model, name) for name in DEEPCTR},
    **{f"torch-rechub: {name}": partial(rechub_model, name) for name in ("DeepFM", "WideDeep", "DCNv2")},
    **{f"rtdl-revisiting-models: {name}": partial(revisited, name) for name in ("MLP", "ResNet", "FTTransformer")},
    **{
        f"rtdl-num-embeddings: {name}": partial(numeric_embeddings, name)
        for name in ("PeriodicEmbeddings", "PiecewiseLinearEmbeddings")
    },
    **{
        f"tab-transformer-pytorch: {name}": partial(tab_transformer, name)
        for name in ("TabTransformer", "FTTransformer")
    },
    **{
        f"pytorch-forecasting: {name}": partial(forecasting_net, name)
        for name in ("GatedResidualNetwork", "InterpretableMultiHeadAttention")
    },
    "pytorch-forecasting: SeriesDecomposition": dlinear,
    "iTransformer: iTransformer": i_transformer,
    "chronos-forecasting: Chronos-Bolt": chronos,
    "gluonts: DeepAR": gluonts_deepar,
    "gluonts: DLinear": gluonts_mlp,
    "gluonts: PatchTST": gluonts_patches,
    "pytorch-tcn: TCN": tcn,
    **{f"ncps: {name}": partial(liquid, name) for name in ("LTC", "CfC")},
    "pykan: KAN": kan,
}

"""Models of packages that are in no other list: vision, sound, language, tables, molecules, graphs, quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCAB,
    Case,
    D,
    classified,
    images,
    linear,
    predicts_tokens,
    rows,
    states,
    tokens,
    written,
)  # fmt: skip
from by_others.unseen.numba_import import import_numba

# Vision


def zoo(name: str) -> Case:
    from pytorchcv.model_provider import get_model

    return Case(get_model(name), (images(32),), loss_fn=F.cross_entropy, target=torch.randint(10, (ROWS,)))


def unet_3d() -> Case:
    from unet import UNet3D

    model = UNet3D(
        out_channels_first_layer=4, num_encoding_blocks=2, normalization="batch", upsampling_type="linear",
        residual=True, padding=1, activation="PReLU", dropout=0.1,
    )  # fmt: skip
    target = torch.randint(2, (ROWS, 8, 8, 8))
    return Case(model, (torch.randn(ROWS, 1, 8, 8, 8),), loss_fn=F.cross_entropy, target=target)


def image_quality(name: str, size: int, **more: Any) -> Case:
    import piq

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x).sigmoid(), y)

    net = nn.Conv2d(3, 3, 3, padding=1)
    return written(forward, images(size), torch.rand(ROWS, 3, size, size), net=net, loss=getattr(piq, name)(**more))


def halo_attention() -> Case:
    from halonet_pytorch import HaloAttention

    return Case(HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2), (images(8, 16),))


def divided_space_and_time() -> Case:
    from timesformer_pytorch import TimeSformer

    model = TimeSformer(
        dim=32, image_size=16, patch_size=8, num_frames=4, num_classes=CLASSES, depth=2, heads=2, dim_head=8,
    )  # fmt: skip
    mask = torch.ones(ROWS, 4, dtype=torch.bool)
    mask[::2, 3] = False
    return classified(model, torch.randn(ROWS, 4, 3, 16, 16), mask)


def video(which: str) -> Case:
    from pytorchvideo.models import slowfast, vision_transformers, x3d

    if which == "x3d":
        model = x3d.create_x3d(
            input_clip_length=4, input_crop_size=32, model_num_class=CLASSES, width_factor=0.5, depth_factor=0.5,
            head_activation=None,
        )  # fmt: skip
        return Case(model, (torch.randn(ROWS, 3, 4, 32, 32),), loss_fn=F.cross_entropy, target=labels())
    if which == "mvit":
        model = vision_transformers.create_multiscale_vision_transformers(
            spatial_size=32, temporal_size=4, depth=2, patch_embed_dim=16, num_heads=2, head_num_classes=CLASSES,
            pool_q_stride_size=[[1, 1, 2, 2]], pool_kv_stride_adaptive=[1, 2, 2], pool_kvq_kernel=[3, 3, 3],
            droppath_rate_block=0.1,
        )  # fmt: skip
        return classified(model, torch.randn(ROWS, 3, 4, 32, 32))
    model = slowfast.create_slowfast(
        model_depth=18, model_num_class=CLASSES, slowfast_fusion_conv_stride=(4, 1, 1),
        stem_dim_outs=(8, 1), head_pool_kernel_sizes=((2, 1, 1), (8, 1, 1)),
    )  # fmt: skip
    return classified(model, [torch.randn(ROWS, 3, 2, 32, 32), torch.randn(ROWS, 3, 8, 32, 32)])


def episodes() -> Case:
    from easyfsl.methods import PrototypicalNetworks

    def forward(self: Any, support: Tensor, kinds: Tensor, query: Tensor, label: Tensor) -> Tensor:
        self.few.process_support_set(support, kinds)
        return F.cross_entropy(self.few(query), label)

    few = PrototypicalNetworks(nn.Sequential(nn.Flatten(), nn.Linear(192, D)))
    kinds = torch.arange(ROWS) % 4
    return written(forward, images(8), kinds, images(8), torch.randint(4, (ROWS,)), few=few)


def labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,))


# Sound


def separation(name: str) -> Case:
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet, DPRNNTasNet

    def forward(self: Any, mixed: Tensor, sources: Tensor) -> Tensor:
        return self.loss(self.net(mixed), sources)

    if name == "ConvTasNet":
        net = ConvTasNet(2, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8, n_filters=16)
    else:
        net = DPRNNTasNet(2, bn_chan=8, hid_size=8, chunk_size=10, n_repeats=1, n_filters=16)
    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    return written(forward, torch.randn(ROWS, 1, 200), torch.randn(ROWS, 2, 200), net=net, loss=loss)


def audio_tagging() -> Case:
    import_numba()
    from panns_inference.models import Cnn14

    model = Cnn14(8000, 256, 80, 64, 50, 4000, CLASSES)
    target = torch.rand(ROWS, CLASSES).round()
    return Case(
        model, (torch.randn(ROWS, 6400),), loss_fn=lambda out, y: F.binary_cross_entropy(out["clipwise_output"], y),
        target=target,
    )  # fmt: skip


# Language


def media_between_words() -> Case:
    from flamingo_pytorch import GatedCrossAttentionBlock, PerceiverResampler

    def forward(self: Any, text: Tensor, media: Tensor, at: Tensor) -> Tensor:
        return self.attend(text, self.resample(media), media_locations=at)

    resample = PerceiverResampler(dim=32, depth=1, dim_head=8, heads=2, num_latents=4, num_media_embeds=3)
    attend = GatedCrossAttentionBlock(dim=32, dim_head=8, heads=2)
    attend.attn_gate.data.fill_(0.5)
    at = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    at[:, [1, 6]] = True
    return written(forward, states(), torch.randn(ROWS, 2, 5, 32), at, resample=resample, attend=attend)


class Encoder(nn.Module):
    def __init__(self, out: int):
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCAB, 32), nn.LayerNorm(32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)
        self.head = nn.Linear(32, out)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.words(ids))))


def replaced_tokens() -> Case:
    from electra_pytorch import Electra

    model = Electra(Encoder(VOCAB), Encoder(1), num_tokens=VOCAB, mask_token_id=2, pad_token_id=0, mask_prob=0.3)
    return Case(model, (torch.randint(3, VOCAB, (ROWS, LENGTH)),))


def moving_average_gates() -> Case:
    from mega_pytorch.mega_pytorch import Mega

    return predicts_tokens(
        Mega(num_tokens=VOCAB, dim=32, depth=2, ema_heads=4, attn_dim_qk=16, attn_dim_value=32), tokens()
    )


def recurrent_memory() -> Case:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    model = RecurrentMemoryTransformer(
        num_tokens=VOCAB, num_memory_tokens=3, dim=32, depth=2, seq_len=LENGTH, dim_head=8, heads=2, causal=True,
    )  # fmt: skip
    return Case(model, (tokens(),), {"labels": tokens()})


def memory_as_context() -> Case:
    from titans_pytorch import MemoryAsContextTransformer

    model = MemoryAsContextTransformer(
        num_tokens=VOCAB, dim=32, depth=2, segment_len=6, num_longterm_mem_tokens=2, num_persist_mem_tokens=2,
        dim_head=8, heads=2, neural_memory_layers=(2,), neural_memory_segment_len=4,
        neural_memory_kwargs={"dim_head": 8, "heads": 2},
    )  # fmt: skip
    return Case(model, (tokens(13),), {"return_loss": True})


# Tables and series


def survival(name: str) -> Case:
    import_numba()
    if name == "DeepHit":
        from pycox.models.data import pair_rank_mat
        from pycox.models.loss import DeepHitSingleLoss

        def forward(self: Any, x: Tensor, time: Tensor, event: Tensor, ranks: Tensor) -> Tensor:
            return self.loss(self.net(x), time, event, ranks)

        time, event = torch.randint(6, (ROWS,)), torch.randint(2, (ROWS,)).float()
        ranks = torch.from_numpy(pair_rank_mat(time.numpy(), event.numpy()))
        return written(forward, rows(), time, event, ranks, net=nn.Linear(D, 6), loss=DeepHitSingleLoss(0.2, 0.1))
    from torchsurv.loss.cox import neg_partial_log_likelihood

    def likelihood(self: Any, x: Tensor, event: Tensor, time: Tensor) -> Tensor:
        return neg_partial_log_likelihood(self.net(x), event, time, ties_method="efron")

    event, time = torch.randint(2, (ROWS,)).bool(), torch.randint(1, 6, (ROWS,)).float()
    event[0] = True
    return written(likelihood, rows(), event, time, net=nn.Linear(D, 1))


def imputation(name: str) -> Case:
    x, mask = torch.randn(ROWS, 6, 4), (torch.rand(ROWS, 6, 4) < 0.8).float()
    if name == "SAITS":
        from pypots.nn.modules.saits import BackboneSAITS

        model = BackboneSAITS(
            n_steps=6, n_features=4, n_layers=1, d_model=16, n_heads=2, d_k=8, d_v=8, d_ffn=16, dropout=0.1,
            attn_dropout=0.0,
        )  # fmt: skip
        return Case(model, (x * mask, mask))
    from pypots.nn.modules.brits import BackboneBRITS

    gaps = torch.rand(ROWS, 6, 4)
    one = {"X": x * mask, "missing_mask": mask, "deltas": gaps}
    other = {"X": (x * mask).flip(1), "missing_mask": mask.flip(1), "deltas": gaps.flip(1)}
    return Case(BackboneBRITS(6, 4, 8), ({"forward": one, "backward": other},))


# Molecules, points, graphs


def equivariant_attention() -> Case:
    from se3_transformer_pytorch import SE3Transformer

    model = SE3Transformer(
        dim=8, heads=2, depth=1, dim_head=4, num_degrees=2, valid_radius=10, output_degrees=2, num_neighbors=3,
        reduce_dim_out=True,
    )  # fmt: skip
    mask = torch.ones(ROWS, 6, dtype=torch.bool)
    return Case(model, (torch.randn(ROWS, 6, 8), torch.randn(ROWS, 6, 3), mask))


def invariant_points() -> Case:
    from invariant_point_attention import IPABlock

    rotations = torch.linalg.qr(torch.randn(ROWS, 6, 3, 3))[0]
    return Case(
        IPABlock(dim=16, heads=2, pairwise_repr_dim=8), (torch.randn(ROWS, 6, 16),),
        {
            "pairwise_repr": torch.randn(ROWS, 6, 6, 8), "rotations": rotations,
            "translations": torch.randn(ROWS, 6, 3), "mask": torch.ones(ROWS, 6, dtype=torch.bool),
        },
    )  # fmt: skip


def attention_of_points() -> Case:
    from point_transformer_pytorch import PointTransformerLayer

    model = PointTransformerLayer(dim=16, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2, num_neighbors=4)
    return Case(model, (torch.randn(ROWS, 10, 16), torch.randn(ROWS, 10, 3)))


def atoms_with_forces(name: str) -> Case:
    import schnetpack
    from schnetpack import properties

    basis = schnetpack.nn.radial.GaussianRBF(n_rbf=8, cutoff=5.0)
    kind = getattr(schnetpack.representation, name)
    model = schnetpack.model.NeuralNetworkPotential(
        representation=kind(
            n_atom_basis=16, n_interactions=2, radial_basis=basis,
            cutoff_fn=schnetpack.nn.cutoff.CosineCutoff(5.0),
        ),
        input_modules=[schnetpack.atomistic.PairwiseDistances()],
        output_modules=[
            schnetpack.atomistic.Atomwise(n_in=16, output_key="energy"),
            schnetpack.atomistic.Forces(energy_key="energy", force_key="forces"),
        ],
    )  # fmt: skip
    molecule = torch.arange(ROWS).repeat_interleave(3)
    pairs = torch.tensor([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])
    pairs = (pairs[None] + 3 * torch.arange(ROWS)[:, None, None]).flatten(0, 1)
    batch = {
        properties.Z: torch.randint(1, 9, (24,)), properties.R: torch.randn(24, 3), properties.idx_m: molecule,
        properties.idx_i: pairs[:, 0], properties.idx_j: pairs[:, 1], properties.offsets: torch.zeros(len(pairs), 3),
        properties.n_atoms: torch.full((ROWS,), 3),
    }  # fmt: skip

    def forward(self: Any, batch: dict[str, Tensor], energy: Tensor, forces: Tensor) -> Tensor:
        found = self.model(dict(batch))
        return F.mse_loss(found["energy"], energy) + F.mse_loss(found["forces"], forces)

    return written(forward, batch, torch.randn(ROWS), torch.randn(24, 3), model=model)


def translated_entities(name: str) -> Case:
    from torchkge import models
    from torchkge.utils.losses import MarginLoss

    net = models.TransEModel(D, 20, 4, "L2") if name == "TransE" else models.TransHModel(D, 20, 4)

    def forward(self: Any, h: Tensor, t: Tensor, r: Tensor, other_h: Tensor, other_t: Tensor) -> Tensor:
        return self.loss(*self.net(h, t, r, other_h, other_t))

    args = [torch.randint(20, (ROWS,)) for _ in range(4)]
    return written(forward, *args[:2], torch.randint(4, (ROWS,)), *args[2:], net=net, loss=MarginLoss(0.5))


# Flows, Bayes, spikes, quantization, actions


def coupled_flow() -> Case:
    import FrEIA.framework as framework
    import FrEIA.modules as modules

    def net(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Linear(before, 16), nn.ReLU(), nn.Linear(16, after))

    flow = framework.SequenceINN(D)
    for kind in (modules.AllInOneBlock, modules.GLOWCouplingBlock):
        flow.append(kind, subnet_constructor=net)

    def forward(self: Any, x: Tensor) -> Tensor:
        z, logdet = self.flow(x)
        return (0.5 * z.pow(2).sum(1) - logdet).mean()

    return written(forward, flow=flow)


def bayesian_layers() -> Case:
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    @variational_estimator
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = BayesianLinear(D, 16), BayesianLinear(16, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.second(F.relu(self.first(x)))
            return F.mse_loss(out, y) + self.nn_kl_divergence() / len(x)

    return Case(Net(), (rows(), torch.randn(ROWS, 1)))


def spiking_network() -> Case:
    import norse.torch as norse

    net = norse.SequentialState(
        nn.Conv2d(1, 4, 3), norse.LIFCell(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 8), norse.LICell(),
    )  # fmt: skip

    def forward(self: Any, x: Tensor) -> Tensor:
        state, out = None, []
        for step in x:
            v, state = self.net(step, state)
            out.append(v)
        return torch.stack(out).max(0)[0].log_softmax(-1)

    return written(forward, torch.rand(3, ROWS, 1, 8, 8), net=net)


def spikes_by_surrogates() -> Case:
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    net = nn.Sequential(
        layer.Linear(D, 16), neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan()), layer.Linear(16, 4),
        neuron.LIFNode(tau=2.0, surrogate_function=surrogate.Sigmoid()),
    )  # fmt: skip

    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        functional.reset_net(self.net)
        rate = sum(self.net(x) for _ in range(3)) / 3
        return F.mse_loss(rate, F.one_hot(label, 4).float())

    return written(forward, rows(), torch.randint(4, (ROWS,)), net=net)


def quantized_layers() -> Case:
    import brevitas.nn as quantized

    net = nn.Sequential(
        quantized.QuantIdentity(bit_width=8), quantized.QuantConv2d(3, 8, 3, weight_bit_width=4),
        nn.BatchNorm2d(8), quantized.QuantReLU(bit_width=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        quantized.QuantLinear(8, CLASSES, bias=True, weight_bit_width=4),
    )  # fmt: skip
    return classified(net, images(8))


def neural_equation() -> Case:
    from torchdyn.core import NeuralODE

    net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, D))
    ode = NeuralODE(net, sensitivity="autograd", solver="rk4", return_t_eval=False)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(self.ode(x, torch.linspace(0, 1, 4))[-1])

    return written(forward, ode=ode, out=linear())


MODELS: dict[str, Callable[[], Case]] = {
    "pytorchcv: Shake-Shake": lambda: zoo("shakeshakeresnet20_2x16d_cifar10"),
    "pytorchcv: DIA-ResNet": lambda: zoo("diaresnet20_cifar10"),
    "pytorchcv: X-DenseNet": lambda: zoo("xdensenet40_2_k24_bc_cifar10"),
    "unet: 3D with residuals": unet_3d,
    "piq: SSIM loss": lambda: image_quality("SSIMLoss", 24, kernel_size=7),
    "piq: VIF loss": lambda: image_quality("VIFLoss", 48),
    "piq: FSIM loss": lambda: image_quality("FSIMLoss", 32),
    "piq: GMSD loss": lambda: image_quality("GMSDLoss", 16),
    "halonet-pytorch: HaloAttention": halo_attention,
    "timesformer-pytorch: TimeSformer": divided_space_and_time,
    "pytorchvideo: X3D": lambda: video("x3d"),
    "pytorchvideo: MViT": lambda: video("mvit"),
    "pytorchvideo: SlowFast": lambda: video("slowfast"),
    "easyfsl: PrototypicalNetworks": episodes,
    "asteroid: ConvTasNet with PIT": lambda: separation("ConvTasNet"),
    "asteroid: DPRNN with PIT": lambda: separation("DPRNN"),
    "panns-inference: Cnn14": audio_tagging,
    "flamingo-pytorch: gated cross-attention": media_between_words,
    "electra-pytorch: Electra": replaced_tokens,
    "mega-pytorch: Mega": moving_average_gates,
    "recurrent-memory-transformer-pytorch: RMT": recurrent_memory,
    "titans-pytorch: memory as context": memory_as_context,
    "pycox: DeepHit": lambda: survival("DeepHit"),
    "torchsurv: Cox": lambda: survival("Cox"),
    "pypots: SAITS": lambda: imputation("SAITS"),
    "pypots: BRITS": lambda: imputation("BRITS"),
    "se3-transformer-pytorch: SE3Transformer": equivariant_attention,
    "invariant-point-attention: IPABlock": invariant_points,
    "point-transformer-pytorch: layer": attention_of_points,
    "schnetpack: SchNet with forces": lambda: atoms_with_forces("SchNet"),
    "schnetpack: PaiNN with forces": lambda: atoms_with_forces("PaiNN"),
    "torchkge: TransE": lambda: translated_entities("TransE"),
    "torchkge: TransH": lambda: translated_entities("TransH"),
    "freia: coupling blocks": coupled_flow,
    "blitz-bayesian-pytorch: Bayesian layers": bayesian_layers,
    "norse: LIF cells": spiking_network,
    "spikingjelly: LIF nodes": spikes_by_surrogates,
    "brevitas: quantized layers": quantized_layers,
    "torchdyn: neural ODE": neural_equation,
}

"""Graphs, molecules, neural operators, diffusion, flows, differential equations, Gaussian processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, ROWS, WIDTH, Case, images, squared, states

NODES, EDGES = 16, 40


def graph() -> tuple[Tensor, Tensor]:
    """Features of 16 nodes, and 40 edges."""
    return torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES))


def graph_net(name: str) -> Case:
    from torch_geometric import nn as nets

    more: dict[str, Any] = {"PNA": {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"],
                                    "deg": torch.tensor([0, 4, 6, 6])}}.get(name, {})  # fmt: skip
    model = getattr(nets, name)(WIDTH, 32, num_layers=2, out_channels=CLASSES, **more)
    return Case(model, graph(), loss_fn=F.cross_entropy, target=torch.randint(CLASSES, (NODES,)))


def graph_convolution(name: str) -> Case:
    """One of torch_geometric's layers between two linear ones, and a sum over two graphs."""
    from torch_geometric import nn as layers

    class Net(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.first, self.layer, self.head = nn.Linear(WIDTH, 32), layer, nn.Linear(32, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            x = self.layer(self.first(x).relu(), edge_index)
            return self.head(layers.global_add_pool(x.relu(), batch, size=2))

    made: dict[str, Callable[[], nn.Module]] = {
        "GATv2Conv": lambda: layers.GATv2Conv(32, 8, heads=4),
        "TransformerConv": lambda: layers.TransformerConv(32, 8, heads=4),
        "GraphConv": lambda: layers.GraphConv(32, 32),
        "ChebConv": lambda: layers.ChebConv(32, 32, K=2),
        "TAGConv": lambda: layers.TAGConv(32, 32),
        "ResGatedGraphConv": lambda: layers.ResGatedGraphConv(32, 32),
    }
    x, edge_index = graph()
    batch = torch.arange(NODES) // (NODES // 2)
    return Case(Net(made[name]()), (x, edge_index, batch), loss_fn=F.cross_entropy, target=torch.randint(CLASSES, (2,)))


def graph_u_net() -> Case:
    from torch_geometric.nn import GraphUNet

    return Case(GraphUNet(WIDTH, 32, CLASSES, depth=2), graph())


def light_gcn() -> Case:
    from torch_geometric.nn import LightGCN

    return Case(LightGCN(NODES, 32, num_layers=2), (torch.randint(NODES, (2, EDGES)),))


def attentive() -> Case:
    from torch_geometric.nn import AttentiveFP

    x, edge_index = graph()
    model = AttentiveFP(WIDTH, 32, CLASSES, edge_dim=4, num_layers=2, num_timesteps=2)
    return Case(model, (x, edge_index, torch.randn(EDGES, 4), torch.arange(NODES) // 4))


def sg_former() -> Case:
    from torch_geometric.nn.models import SGFormer

    x, edge_index = graph()
    model = SGFormer(WIDTH, 32, CLASSES, trans_dropout=0.0, gnn_dropout=0.0)
    return Case(model, (x, edge_index, torch.zeros(NODES, dtype=torch.long)))


def schnet_layer() -> Case:
    from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.species, self.expand = nn.Embedding(10, 32), GaussianSmearing(0.0, 5.0, 8)
            self.blocks = nn.ModuleList(InteractionBlock(32, 8, 32, 5.0) for _ in range(2))

        def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
            x, (row, col) = self.species(z), edge_index
            distance = (pos[row] - pos[col]).norm(dim=-1)
            for block in self.blocks:
                x = x + block(x, edge_index, distance, self.expand(distance))
            return x.sum()

    edges = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    return Case(Net(), (torch.randint(10, (NODES,)), torch.randn(NODES, 3), edges))


def egnn(nearest: int = 0) -> Case:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=20, dim=WIDTH, depth=2, num_nearest_neighbors=nearest)
    return Case(model, (torch.randint(20, (ROWS, 8)), torch.randn(ROWS, 8, 3)))


def e3nn_net() -> Case:
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("8x0e + 4x1o", "1x0e + 1x1o", "8x0e + 4x1o")
            self.linear, self.radial = o3.Linear("8x0e + 4x1o", "16x0e"), FullyConnectedNet([3, 16, 1], torch.relu)

        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            direction = o3.spherical_harmonics("1x0e + 1x1o", pos, normalize=True)
            return self.linear(self.product(x, direction) * self.radial(pos))

    return squared(Net(), torch.randn(ROWS, 20), torch.randn(ROWS, 3))


def neural_operator(name: str) -> Case:
    from neuralop import models

    sizes: dict[str, Any] = {
        "n_modes": (4, 4),
        "hidden_channels": 16,
        "in_channels": 2,
        "out_channels": 1,
        "n_layers": 2,
    }
    if name == "UNO":
        sizes = {"in_channels": 2, "out_channels": 1, "hidden_channels": 16, "lifting_channels": 16, "n_layers": 3,
                 "projection_channels": 16, "uno_out_channels": [16, 16, 16], "uno_n_modes": [[4, 4]] * 3,
                 "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], "channel_mlp_skip": "linear"}  # fmt: skip
    return squared(getattr(models, name)(**sizes), images(12, 2))


def diffusion(name: str = "GaussianDiffusion") -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    if name == "Unet":
        return Case(net, (images(16), torch.randint(100, (ROWS,))))
    return Case(GaussianDiffusion(net, image_size=16, timesteps=20), (torch.rand(ROWS, 3, 16, 16),))


def rectified_flow() -> Case:
    from rectified_flow_pytorch import RectifiedFlow, Unet

    return Case(RectifiedFlow(Unet(dim=8, dim_mults=(1, 2))), (torch.rand(ROWS, 3, 16, 16),))


def x_unet() -> Case:
    from x_unet import XUnet

    return squared(XUnet(dim=8, dim_mults=(1, 2), num_blocks_per_stage=(1, 1), num_self_attn_per_stage=(0, 1),
                         nested_unet_depths=(0, 0), attn_heads=2, attn_dim_head=8), images(16))  # fmt: skip


def diffusers_model(name: str) -> Case:
    import diffusers

    if name == "AutoencoderKL":
        model = diffusers.AutoencoderKL(
            block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, layers_per_block=1,
        )  # fmt: skip
        return Case(model, (images(16),))
    if name == "VQModel":
        model = diffusers.VQModel(
            block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, num_vq_embeddings=16,
        )  # fmt: skip
        return Case(model, (images(16),))
    if name == "PixArt":
        model = diffusers.PixArtTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
            cross_attention_dim=32, caption_channels=16,
        )  # fmt: skip
        more = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        call = {"encoder_hidden_states": states(6, 16), "timestep": torch.randint(1000, (ROWS,)), **more}
        return Case(model, (images(8, 4),), call)
    if name == "SD3":
        model = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        )  # fmt: skip
        call = {"encoder_hidden_states": states(6, 16), "pooled_projections": torch.randn(ROWS, 16)}
        return Case(model, (images(8, 4),), {**call, "timestep": torch.randint(1000, (ROWS,))})
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    call = {
        "encoder_hidden_states": states(6, 32), "pooled_projections": torch.randn(ROWS, 32),
        "timestep": torch.rand(ROWS), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    return Case(model, (states(16, 4),), call)


class Likelihood(nn.Module):
    """The mean negative log-likelihood of a flow."""

    def __init__(self, flow: nn.Module, log_prob: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.flow, self.log_prob = flow, log_prob

    def forward(self, x: Tensor) -> Tensor:
        return -self.log_prob(self.flow, x).mean()


def zuko_flow(name: str) -> Case:
    import zuko

    flow = getattr(zuko.flows, name)(
        features=4, hidden_features=(16, 16), **({} if name == "CNF" else {"transforms": 2})
    )
    return Case(Likelihood(flow, lambda flow, x: flow().log_prob(x)), (torch.randn(ROWS, 4),))


def nflows_flow(name: str) -> Case:
    from nflows import transforms
    from nflows.distributions.normal import StandardNormal
    from nflows.flows import Flow
    from nflows.nn.nets import ResidualNet

    if name == "autoregressive":
        step: Any = transforms.MaskedAffineAutoregressiveTransform(features=4, hidden_features=16)
    else:
        step = transforms.PiecewiseRationalQuadraticCouplingTransform(
            mask=torch.tensor([1, 0, 1, 0]), tails="linear", tail_bound=3.0, num_bins=4,
            transform_net_create_fn=lambda i, o: ResidualNet(i, o, hidden_features=16),
        )  # fmt: skip
    flow = Flow(transforms.CompositeTransform([transforms.ReversePermutation(4), step]), StandardNormal([4]))
    return Case(Likelihood(flow, lambda flow, x: flow.log_prob(x)), (torch.randn(ROWS, 4),))


def normflows_flow(name: str) -> Case:
    import normflows as nf

    if name == "RealNVP":
        half = nf.nets.MLP([2, 16, 4], init_zeros=False)
        steps: list[Any] = [nf.flows.AffineCouplingBlock(half), nf.flows.Permute(4, mode="swap")]
    else:
        steps = [nf.flows.AutoregressiveRationalQuadraticSpline(4, 1, 16)]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(4), steps)
    return Case(Likelihood(flow, lambda flow, x: flow.log_prob(x)), (torch.randn(ROWS, 4),))


class Field(nn.Module):
    """The right-hand side of a differential equation."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spread = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), nn.Linear(4, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.spread(y).sigmoid()


def differential(method: str) -> Case:
    from torchdiffeq import odeint, odeint_adjoint

    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, y: Tensor) -> Tensor:
            times = torch.linspace(0, 1, 3).to(y)
            solve = odeint_adjoint if method == "adjoint" else odeint
            return solve(self.field, y, times, method="rk4" if method == "adjoint" else method)[-1]

    return squared(Solved(), torch.randn(ROWS, 4))


def stochastic() -> Case:
    from torchsde import sdeint

    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, y: Tensor) -> Tensor:
            return sdeint(self.field, y, torch.linspace(0, 1, 3).to(y), dt=0.5, method="euler")[-1]

    return squared(Solved(), torch.randn(ROWS, 4))


def controlled() -> Case:
    import torchcde

    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.first = nn.Linear(4, 12), nn.Linear(3, 4)

        def forward(self, coefficients: Tensor) -> Tensor:
            path = torchcde.LinearInterpolation(coefficients)
            field = lambda t, z: self.net(z).tanh().view(*z.shape, 3)  # noqa: E731
            start = self.first(path.evaluate(path.interval[0]))
            return torchcde.cdeint(path, field, start, path.interval, adjoint=False, method="rk4")[:, -1]

    return squared(Solved(), torch.randn(ROWS, 5, 3))


def gaussian_process(name: str) -> Case:
    import gpytorch

    x, y = torch.linspace(0, 1, ROWS), torch.randn(ROWS)

    class Kernel(nn.Module):
        """The negative log-likelihood of an exact process with learned features."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            covariance = self.kernel(self.features(x[:, None])).to_dense() + 0.1 * torch.eye(len(x)).to(x)
            factor = torch.linalg.cholesky(covariance)
            weights = torch.cholesky_solve(y[:, None], factor)[:, 0]
            return 0.5 * (y * weights).sum() + factor.diagonal().log().sum()

    class Exact(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Marginal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.process = Exact()
            self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(self.process.likelihood, self.process)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return -self.likelihood(self.process(x), y)

    return Case(Kernel() if name == "deep kernel" else Marginal(), (x, y))


def siren() -> Case:
    from siren_pytorch import SirenNet

    return squared(SirenNet(dim_in=2, dim_hidden=32, dim_out=3, num_layers=3), torch.randn(ROWS, 2))


MODELS: dict[str, Callable[[], Case]] = {
    **{f"torch-geometric: {name}": partial(graph_net, name) for name in ("GCN", "GAT", "GIN", "GraphSAGE", "PNA")},
    **{
        f"torch-geometric: {name}": partial(graph_convolution, name)
        for name in ("GATv2Conv", "TransformerConv", "GraphConv", "ChebConv", "TAGConv", "ResGatedGraphConv")
    },
    "torch-geometric: GraphUNet": graph_u_net,
    "torch-geometric: LightGCN": light_gcn,
    "torch-geometric: AttentiveFP": attentive,
    "torch-geometric: SGFormer": sg_former,
    "torch-geometric: SchNet blocks": schnet_layer,
    "egnn-pytorch: EGNN": egnn,
    "egnn-pytorch: EGNN, nearest neighbours": partial(egnn, 3),
    "e3nn: tensor product": e3nn_net,
    **{f"neuraloperator: {name}": partial(neural_operator, name) for name in ("FNO", "TFNO", "UNO")},
    "denoising-diffusion-pytorch: Unet": partial(diffusion, "Unet"),
    "denoising-diffusion-pytorch: GaussianDiffusion": diffusion,
    "rectified-flow-pytorch: RectifiedFlow": rectified_flow,
    "x-unet: XUnet": x_unet,
    **{
        f"diffusers: {name}": partial(diffusers_model, name)
        for name in ("AutoencoderKL", "VQModel", "PixArt", "SD3", "Flux")
    },
    **{f"zuko: {name}": partial(zuko_flow, name) for name in ("MAF", "NSF", "NICE", "CNF")},
    **{f"nflows: {name}": partial(nflows_flow, name) for name in ("autoregressive", "spline coupling")},
    **{f"normflows: {name}": partial(normflows_flow, name) for name in ("RealNVP", "neural spline")},
    **{f"torchdiffeq: {name}": partial(differential, name) for name in ("rk4", "dopri5", "adjoint")},
    "torchsde: euler": stochastic,
    "torchcde: rk4": controlled,
    **{f"gpytorch: {name}": partial(gaussian_process, name) for name in ("deep kernel", "exact process")},
    "siren-pytorch: SirenNet": siren,
}

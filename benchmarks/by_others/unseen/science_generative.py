"""Molecules, equations, probability, generative models and reinforcement learning."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, WIDTH, Case, D, images, rows, squared, written

# Molecules and proteins


def protein_language() -> Case:
    import esm

    model = esm.ESM2(num_layers=2, embed_dim=WIDTH, attention_heads=4, alphabet="ESM-1b", token_dropout=True)
    ids = torch.randint(4, 24, (ROWS, LENGTH))
    ids[:, 0], ids[:, 5] = model.cls_idx, model.mask_idx

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())

    return Case(model, (ids,), {"repr_layers": [2]}, loss, torch.randint(4, 24, (ROWS, LENGTH)))


def protein_alignment() -> Case:
    from types import SimpleNamespace

    import esm

    options = SimpleNamespace(
        embed_dim=WIDTH,
        attention_heads=4,
        layers=2,
        logit_bias=True,
        ffn_embed_dim=64,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        max_tokens_per_msa=1024,
        max_tokens=1024,
        max_positions=64,
        embed_positions_msa=True,
    )
    alphabet = esm.data.Alphabet.from_architecture("msa_transformer")
    options.embed_positions_msa_dim = WIDTH
    model = esm.model.msa_transformer.MSATransformer(options, alphabet)
    ids = torch.randint(4, 24, (4, 3, LENGTH))
    ids[:, :, 0] = alphabet.cls_idx
    return Case(model, (ids,), {"repr_layers": [2], "return_contacts": False})


def atoms(count: int = 8) -> tuple[Tensor, Tensor]:
    positions = 2.0 * torch.rand(count, 3)
    pairs = torch.tensor([(i, j) for i in range(count) for j in range(count) if i != j and i // 4 == j // 4]).T
    return positions, pairs


def equivariant_potential() -> Case:
    from e3nn import o3
    from mace.modules import MACE, interaction_classes

    block = interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = MACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("8x0e + 8x1o"),
        MLP_irreps=o3.Irreps("8x0e"),
        atomic_energies=np.zeros(2),
        avg_num_neighbors=3.0,
        atomic_numbers=[1, 8],
        correlation=2,
        gate=F.silu,
    )
    positions, pairs = atoms()
    batch = {
        "positions": positions,
        "edge_index": pairs,
        "batch": torch.arange(8) // 4,
        "ptr": torch.tensor([0, 4, 8]),
        "node_attrs": F.one_hot(torch.arange(8) % 2, 2).float(),
        "shifts": torch.zeros(pairs.shape[1], 3),
        "unit_shifts": torch.zeros(pairs.shape[1], 3),
        "cell": torch.zeros(6, 3),
        "head": torch.zeros(2, dtype=torch.long),
    }

    def forward(self: Any, data: dict[str, Tensor], energy: Tensor, forces: Tensor) -> Tensor:
        found = self.model(data, training=True, compute_force=True)
        return F.mse_loss(found["energy"], energy) + 10 * F.mse_loss(found["forces"], forces)

    return written(forward, batch, torch.randn(2), torch.randn(8, 3), model=model.float())


def organic_potential() -> Case:
    from torchani.arch import simple_ani

    model = simple_ani(
        ("H", "C", "O"),
        "wb97x-631gd",
        radial_shifts=4,
        angular_shifts=2,
        sections=2,
        repulsion=False,
        strategy="pyaev",
        self_energies={"H": -0.5, "C": -38.0, "O": -75.0},
    )

    def forward(self: Any, species: Tensor, coordinates: Tensor, energy: Tensor) -> Tensor:
        return F.mse_loss(self.model((species, coordinates)).energies, energy)

    species = torch.tensor([6, 1, 1, 8]).expand(ROWS, 4).contiguous()
    return written(forward, species, 1.5 * torch.randn(ROWS, 4, 3), torch.randn(ROWS), model=model)


def genome() -> Case:
    from enformer_pytorch import Enformer

    model = Enformer.from_hparams(
        dim=96, depth=1, heads=4, output_heads={"human": 5}, target_length=4, num_downsamples=3, dim_divisible_by=4
    )
    return Case(model, (torch.randint(0, 5, (2, 64)),), {"head": "human", "target": torch.rand(2, 4, 5)})


# Equations


def physics_informed() -> Case:
    os.environ.setdefault("DDE_BACKEND", "pytorch")
    import deepxde as dde

    net = dde.nn.pytorch.FNN([2, 16, 16, 1], "tanh", "Glorot normal")

    def forward(self: Any, inside: Tensor, edge: Tensor, value: Tensor) -> Tensor:
        inside = inside.requires_grad_()
        y = self.net(inside)
        dy_t = dde.grad.jacobian(y, inside, i=0, j=1)
        dy_xx = dde.grad.hessian(y, inside, i=0, j=0)
        dde.grad.clear()
        return (dy_t - 0.1 * dy_xx).square().mean() + (self.net(edge) - value).square().mean()

    return written(forward, torch.rand(ROWS, 2), torch.rand(ROWS, 2), torch.randn(ROWS, 1), net=net)


def operator_learning() -> Case:
    os.environ.setdefault("DDE_BACKEND", "pytorch")
    import deepxde as dde

    net = dde.nn.pytorch.DeepONetCartesianProd([10, 16, 16], [2, 16, 16], "relu", "Glorot normal")
    return squared(net, (torch.randn(ROWS, 10), torch.rand(12, 2)))


def quantum_circuit() -> Case:
    import pennylane as qml

    device = qml.device("default.qubit", wires=2)

    @qml.qnode(device, interface="torch")
    def circuit(inputs: Any, weights: Any) -> Any:
        qml.AngleEmbedding(inputs, wires=range(2))
        qml.BasicEntanglerLayers(weights, wires=range(2))
        return [qml.expval(qml.PauliZ(wires=i)) for i in range(2)]

    layer = qml.qnn.TorchLayer(circuit, {"weights": (2, 2)})
    return squared(nn.Sequential(nn.Linear(D, 2), layer, nn.Linear(2, 1)), rows())


# Probability and geometry


def variational_inference() -> Case:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample

    class Regression(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = PyroModule[nn.Linear](D, 1)
            self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, D]).to_event(2))

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            mean = self.linear(x).squeeze(-1)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("obs", dist.Normal(mean, 0.5), obs=y)
            return mean

    pyro.clear_param_store()
    model = Regression()
    guide = AutoNormal(model)
    guide(rows(), torch.randn(ROWS))
    return Case(Trace_ELBO()(model, guide), (rows(), torch.randn(ROWS)))


def gaussian_process() -> Case:
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x, y = torch.rand(ROWS, 3, dtype=torch.double), torch.randn(ROWS, 1, dtype=torch.double)
    model = SingleTaskGP(x, y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def forward(self: Any) -> Tensor:
        return -self.mll(self.mll.model(*self.mll.model.train_inputs), self.mll.model.train_targets)

    return Case(written(forward, mll=mll).model)


def hyperbolic() -> Case:
    import geoopt

    ball = geoopt.PoincareBall(c=1.0)

    def forward(self: Any, ids: Tensor, others: Tensor) -> Tensor:
        near, far = self.points[ids], self.points[others]
        center = ball.mobius_add(near, ball.expmap0(self.shift))
        distance = ball.dist(center.unsqueeze(1), far)
        return F.cross_entropy(-distance, torch.zeros(len(ids), dtype=torch.long))

    points = geoopt.ManifoldParameter(ball.random(20, D), manifold=ball)
    return written(
        forward,
        torch.randint(20, (ROWS,)),
        torch.randint(20, (ROWS, 5)),
        points=points,
        shift=nn.Parameter(0.1 * torch.randn(D)),
    )


def optimal_transport() -> Case:
    from geomloss import SamplesLoss

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)

    return written(forward, rows(), rows(), net=nn.Linear(D, D), loss=SamplesLoss("sinkhorn", p=2, blur=0.5))


# Generative models


def learned_compression(name: str) -> Case:
    from compressai import models

    model = getattr(models, name)(8, 12) if name == "ScaleHyperprior" else getattr(models, name)(N=8)

    def forward(self: Any, x: Tensor) -> Any:
        out = self.model(x)
        bits = sum(torch.log(p).sum() for p in out["likelihoods"].values()) / (-np.log(2) * x.numel())
        return 0.01 * 255**2 * F.mse_loss(out["x_hat"], x) + bits, self.model.aux_loss()

    return written(forward, torch.rand(2, 3, 64, 64), model=model)


def autoencoder(name: str) -> Case:
    from pythae import models

    options: dict[str, Any] = {"input_dim": (1, 4, 4), "latent_dim": 8}
    config_name = {"VQVAE": "VQVAEConfig", "VAE_IAF": "VAE_IAF_Config"}[name]
    if name == "VQVAE":
        options |= {"num_embeddings": 16, "use_ema": True}
    model = getattr(models, name)(getattr(models, config_name)(**options))
    return Case(model, ({"data": torch.rand(ROWS, 1, 4, 4)},))


def flow_matching() -> Case:
    from flow_matching.path import AffineProbPath
    from flow_matching.path.scheduler import CondOTScheduler

    path = AffineProbPath(scheduler=CondOTScheduler())

    def forward(self: Any, x1: Tensor) -> Tensor:
        x0, t = torch.randn_like(x1), torch.rand(x1.shape[0], device=x1.device)
        sample = path.sample(t=t, x_0=x0, x_1=x1)
        return (self.net(torch.cat([sample.x_t, sample.t[:, None]], 1)) - sample.dx_t).pow(2).mean()

    return written(forward, rows(), net=nn.Sequential(nn.Linear(D + 1, 16), nn.SiLU(), nn.Linear(16, D)))


def conditional_flow() -> Case:
    from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
    from torchcfm.models.unet import UNetModel

    matcher = ConditionalFlowMatcher(sigma=0.1)

    def forward(self: Any, x1: Tensor, label: Tensor) -> Tensor:
        t, xt, ut = matcher.sample_location_and_conditional_flow(torch.randn_like(x1), x1)
        return torch.mean((self.net(t, xt, label) - ut) ** 2)

    net = UNetModel(
        dim=(1, 8, 8),
        num_channels=32,
        num_res_blocks=1,
        num_classes=10,
        class_cond=True,
        channel_mult=(1, 2),
        attention_resolutions="4",
    )
    return written(forward, images(8, 1), torch.randint(10, (ROWS,)), net=net)


def codec_with_residuals() -> Case:
    from dac import DAC

    model = DAC(
        encoder_dim=8,
        encoder_rates=[2, 4],
        decoder_dim=32,
        decoder_rates=[4, 2],
        n_codebooks=2,
        codebook_size=16,
        codebook_dim=4,
        quantizer_dropout=0.5,
    )
    return Case(model, (torch.randn(ROWS, 1, 64), 44100))


def trained_spectrogram() -> Case:
    from nnAudio.features import MelSpectrogram

    mel = MelSpectrogram(
        sr=800, n_fft=64, n_mels=8, hop_length=32, trainable_mel=True, trainable_STFT=True, verbose=False
    )
    net = nn.Sequential(mel, nn.Flatten(), nn.Linear(8 * 11, CLASSES))
    return Case(net, (torch.randn(ROWS, 320),), loss_fn=F.cross_entropy, target=torch.randint(CLASSES, (ROWS,)))


# Reinforcement learning


def actor_critic() -> Case:
    import gymnasium as gym
    from stable_baselines3.common.policies import ActorCriticPolicy

    policy = ActorCriticPolicy(gym.spaces.Box(-1, 1, (D,)), gym.spaces.Discrete(4), lambda _: 1e-3, net_arch=[16])

    def forward(self: Any, seen: Tensor, actions: Tensor, before: Tensor, advantage: Tensor, returns: Tensor) -> Tensor:
        values, logp, entropy = self.policy.evaluate_actions(seen, actions)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = torch.exp(logp - before)
        loss = -torch.min(advantage * ratio, advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        return loss + 0.5 * F.mse_loss(returns, values.flatten()) - 0.01 * torch.mean(entropy)

    args = (rows(), torch.randint(4, (ROWS,)), -torch.rand(ROWS), torch.randn(ROWS), torch.randn(ROWS))
    return written(forward, *args, policy=policy)


def soft_actor_critic() -> Case:
    import gymnasium as gym
    from stable_baselines3.sac.policies import SACPolicy

    policy = SACPolicy(gym.spaces.Box(-1, 1, (D,)), gym.spaces.Box(-1, 1, (2,)), lambda _: 1e-3, net_arch=[16])

    def forward(self: Any, seen: Tensor, actions: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            next_actions, logp = self.policy.actor.action_log_prob(after)
            target = torch.cat(self.policy.critic_target(after, next_actions), dim=1).min(dim=1, keepdim=True)[0]
            target = reward + 0.99 * (target - 0.1 * logp.reshape(-1, 1))
        critic = 0.5 * sum(F.mse_loss(q, target) for q in self.policy.critic(seen, actions))
        pi, logp = self.policy.actor.action_log_prob(seen)
        q = torch.cat(self.policy.critic(seen, pi), dim=1).min(dim=1, keepdim=True)[0]
        return critic + (0.1 * logp.reshape(-1, 1) - q).mean()

    args = (rows(), torch.rand(ROWS, 2), torch.randn(ROWS, 1), rows())
    return written(forward, *args, policy=policy)


def clipped_objective() -> Case:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    policy = TensorDictModule(nn.Linear(D, 4), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(policy, in_keys=["logits"], distribution_class=OneHotCategorical)
    loss = ClipPPOLoss(actor, ValueOperator(nn.Linear(D, 1), in_keys=["observation"]))
    batch = TensorDict(
        {
            "observation": rows(),
            "action": F.one_hot(torch.randint(4, (ROWS,)), 4),
            "action_log_prob": -torch.rand(ROWS),
            "advantage": torch.randn(ROWS, 1),
            "value_target": torch.randn(ROWS, 1),
        },
        [ROWS],
    )
    return Case(loss, (batch,))


def named_tensors() -> Case:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    first = TensorDictModule(nn.Linear(D, 16), in_keys=["x"], out_keys=["h"])
    second = TensorDictModule(nn.Linear(16, CLASSES), in_keys=["h"], out_keys=["logits"])

    def forward(self: Any, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.net(TensorDict({"x": x}, [len(x)]))["logits"], label)

    net = TensorDictSequential(first, second)
    return written(forward, rows(), torch.randint(CLASSES, (ROWS,)), net=net)


def robot_policy() -> Case:
    from rsl_rl.models import MLPModel
    from tensordict import TensorDict

    seen = TensorDict({"policy": rows()}, [ROWS])
    model = MLPModel(seen, {"actor": ["policy"]}, "actor", 2, (16, 16), obs_normalization=True)
    return Case(model, (seen,))


MODELS: dict[str, Callable[[], Case]] = {
    "fair-esm: ESM-2": protein_language,
    "fair-esm: MSA Transformer": protein_alignment,
    "mace-torch: MACE with forces": equivariant_potential,
    "torchani: ANI": organic_potential,
    "enformer-pytorch: Enformer": genome,
    "deepxde: a network informed by an equation": physics_informed,
    "deepxde: DeepONet": operator_learning,
    "pennylane: a circuit as a layer": quantum_circuit,
    "pyro-ppl: ELBO of a regression": variational_inference,
    "botorch: SingleTaskGP": gaussian_process,
    "geoopt: distances in the Poincare ball": hyperbolic,
    "geomloss: Sinkhorn divergence": optimal_transport,
    "compressai: ScaleHyperprior": lambda: learned_compression("ScaleHyperprior"),
    "compressai: Cheng2020Attention": lambda: learned_compression("Cheng2020Attention"),
    "pythae: VQVAE": lambda: autoencoder("VQVAE"),
    "pythae: VAE with IAF": lambda: autoencoder("VAE_IAF"),
    "flow-matching: affine path": flow_matching,
    "torchcfm: conditional flow with UNetModel": conditional_flow,
    "descript-audio-codec: DAC": codec_with_residuals,
    "nnaudio: a trained spectrogram": trained_spectrogram,
    "stable-baselines3: ActorCriticPolicy": actor_critic,
    "stable-baselines3: SACPolicy": soft_actor_critic,
    "torchrl: ClipPPOLoss": clipped_objective,
    "tensordict: TensorDictSequential": named_tensors,
    "rsl-rl-lib: MLPModel": robot_policy,
}

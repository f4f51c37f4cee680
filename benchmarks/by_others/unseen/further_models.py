"""Losses, routers and graphs of research code, and models of packages, that no earlier list has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, D, images, linear, rows, states, tokens, written
from by_others.unseen.hub import PATCHES, SMALL, adapted, called

# Losses


def both_players() -> Case:
    """The losses of a discriminator and of a generator in one forward."""

    def forward(self: Any, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.g(noise)
        on_real, on_fake = self.d(real), self.d(fake.detach())
        d_loss = F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean()
        for p in self.d.parameters():
            p.requires_grad_(False)
        g_loss = -self.d(fake).mean()
        for p in self.d.parameters():
            p.requires_grad_(True)
        return d_loss + g_loss

    d = nn.Sequential(linear(), nn.LeakyReLU(0.2), nn.Linear(D, 1))
    return written(forward, rows(), rows(), g=nn.Sequential(linear(), nn.ReLU(), linear()), d=d)


def negative_binomial() -> Case:
    """scVI: counts of genes, with zeros that are inflated."""

    def forward(self: Any, x: Tensor) -> Tensor:
        size = x.sum(-1, keepdim=True).log()
        mean, log_var = self.encoder(torch.log1p(x)).chunk(2, -1)
        z = torch.distributions.Normal(mean, (0.5 * log_var).exp()).rsample()
        h = self.decoder(z).relu()
        mu = size.exp() * self.scale(h).softmax(-1)
        zero, theta = self.dropout(h), self.log_theta.exp()
        free = F.softplus(-zero)
        log_theta = torch.log(theta + mu + 1e-8)
        at_zero = theta * (torch.log(theta + 1e-8) - log_theta)
        case_zero = F.softplus(at_zero - zero) - free
        case = -free - zero + at_zero + x * (torch.log(mu + 1e-8) - log_theta)
        case = case + torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)
        likelihood = torch.where(x < 1e-8, case_zero, case).sum(-1)
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, (0.5 * log_var).exp()), torch.distributions.Normal(0, 1)
        ).sum(-1)
        return (kl - likelihood).mean()

    parts = {"encoder": nn.Linear(D, 8), "decoder": nn.Linear(4, D), "scale": linear(), "dropout": linear()}
    return written(forward, torch.poisson(3 * torch.rand(ROWS, D)), log_theta=nn.Parameter(torch.randn(D)), **parts)


def sliced_wasserstein() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        directions = F.normalize(torch.randn(16, D, dtype=x.dtype), dim=1)
        a = (self.net(x) @ directions.T).sort(dim=0).values
        b = (y @ directions.T).sort(dim=0).values
        return (a - b).pow(2).mean()

    return written(forward, rows(), rows(), net=linear())


def soft_time_warping() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(self.net(x), y).square()
        n, rows_, columns = cost.shape
        table = [[cost.new_full((n,), 1e8) for _ in range(columns + 1)] for _ in range(rows_ + 1)]
        table[0][0] = cost.new_zeros(n)
        for i in range(1, rows_ + 1):
            for j in range(1, columns + 1):
                before = torch.stack([table[i - 1][j - 1], table[i - 1][j], table[i][j - 1]])
                table[i][j] = cost[:, i - 1, j - 1] - 0.5 * torch.logsumexp(-before / 0.5, 0)
        return table[-1][-1].mean()

    return written(forward, states(5, D), states(4, D), net=linear())


def gaussian_process() -> Case:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.net(x)
        kernel = self.log_scale.exp() * torch.exp(-0.5 * torch.cdist(h, h).square())
        kernel = kernel + (self.log_noise.exp() + 1e-4) * torch.eye(len(x), dtype=x.dtype)
        lower = torch.linalg.cholesky(kernel)
        alpha = torch.cholesky_solve(y.unsqueeze(1), lower)
        return 0.5 * (y @ alpha).sum() + lower.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)

    scale, noise = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(-1.0))
    return written(forward, rows(), torch.randn(ROWS), net=linear(), log_scale=scale, log_noise=noise)


def kalman_filter() -> Case:
    def forward(self: Any, seen: Tensor) -> Tensor:
        n, eye, total = seen.shape[0], torch.eye(3, dtype=seen.dtype), 0.0
        q, r = torch.diag(self.log_q.exp()), torch.diag(self.log_r.exp())
        mean, cov = seen.new_zeros(n, 3), eye.repeat(n, 1, 1)
        for t in range(seen.shape[1]):
            mean, cov = mean @ self.a.T, self.a @ cov @ self.a.T + q
            s = self.c @ cov @ self.c.T + r
            gain = torch.linalg.solve(s, self.c @ cov).transpose(1, 2)
            away = seen[:, t] - mean @ self.c.T
            total = total + 0.5 * (away * torch.linalg.solve(s, away)).sum(-1) + 0.5 * torch.linalg.slogdet(s)[1]
            mean = mean + (gain @ away.unsqueeze(-1)).squeeze(-1)
            cov = (eye - gain @ self.c) @ cov
        return total.mean()

    parts = {"a": 0.4 * torch.randn(3, 3), "c": torch.randn(2, 3), "log_q": torch.zeros(3), "log_r": torch.zeros(2)}
    return written(forward, torch.randn(ROWS, 4, 2), **{name: nn.Parameter(value) for name, value in parts.items()})


def weighted_noise_schedule() -> Case:
    """Min-SNR weights of drawn steps, a schedule in buffers, and v-prediction."""

    def forward(self: Any, clean: Tensor, label: Tensor) -> Tensor:
        step = torch.randint(0, 100, (clean.shape[0],))
        noise = torch.randn_like(clean)
        alpha = self.products.gather(0, step).reshape(-1, 1, 1, 1)
        label = torch.where(torch.rand(len(label)) < 0.1, torch.full_like(label, CLASSES), label)
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
        wanted = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
        angles = step[:, None].to(clean.dtype) * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.labels(label)
        h = F.silu(self.norm(self.a(noisy)) * (1 + condition[:, :, None, None]))
        ratio = alpha / (1 - alpha)
        weight = torch.minimum(ratio, torch.full_like(ratio, 5.0)) / (ratio + 1)
        return (weight * (self.b(h) - wanted).square()).mean()

    products = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    return written(
        forward, images(8), torch.randint(CLASSES, (ROWS,)), products=products, time=linear(), norm=nn.GroupNorm(2, D),
        labels=nn.Embedding(CLASSES + 1, D), a=nn.Conv2d(3, D, 3, padding=1), b=nn.Conv2d(D, 3, 3, padding=1),
    )  # fmt: skip


# Routers, graphs and layers


def router_with_capacity() -> Case:
    """Switch: one expert of each token, at most so many tokens of an expert, and a loss of the balance."""

    def forward(self: Any, x: Tensor) -> Any:
        flat = x.reshape(-1, D)
        gates = self.router(flat).softmax(-1)
        capacity = math.ceil(1.25 * len(flat) / 4)
        gate, expert = gates.max(-1)
        mask = F.one_hot(expert, 4).to(x.dtype)
        balance = 4 * (gates.mean(0) * mask.mean(0)).sum()
        position = (mask.cumsum(0) * mask).sum(-1).long() - 1
        kept = position < capacity
        slots = F.one_hot(position.clamp(max=capacity - 1), capacity).to(x.dtype) * kept[:, None]
        dispatch = mask.unsqueeze(-1) * slots.unsqueeze(1)
        inner = torch.einsum("td,tec->ecd", flat, dispatch)
        inner = torch.einsum("ecf,efd->ecd", torch.einsum("ecd,edf->ecf", inner, self.a).relu(), self.b)
        return torch.einsum("ecd,tec->td", inner, dispatch * gate[:, None, None]).view_as(x), balance

    a, b = nn.Parameter(torch.randn(4, D, 16)), nn.Parameter(torch.randn(4, 16, D))
    return written(forward, states(LENGTH, D), router=nn.Linear(D, 4), a=a, b=b)


def experts_of_sorted_tokens() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weight, chosen = self.router(flat).softmax(-1).topk(2, -1)
        order = chosen.view(-1).argsort()
        ordered = flat[order // 2]
        ends = chosen.new_zeros(4).scatter_add_(0, chosen.view(-1), torch.ones_like(chosen.view(-1))).cumsum(0)
        outputs, start = [], 0
        for i, end in enumerate(ends.tolist()):
            if end > start:
                outputs.append(self.experts[i](ordered[start:end]))
            start = end
        y = torch.empty_like(ordered)
        y[order] = torch.cat(outputs)
        return (y.view(-1, 2, D) * weight.unsqueeze(-1)).sum(1).view_as(x)

    return written(
        forward, states(LENGTH, D), router=nn.Linear(D, 4), experts=nn.ModuleList(linear() for _ in range(4))
    )


def attention_of_edges() -> Case:
    """A graph attention layer by scatter: a softmax over the edges of each node."""

    def forward(self: Any, x: Tensor, edges: Tensor) -> Tensor:
        source, to = edges
        h = self.net(x).view(-1, 2, D // 2)
        score = F.leaky_relu((h[source] * self.a).sum(-1) + (h[to] * self.b).sum(-1), 0.2)
        index = to[:, None].expand(-1, 2)
        top = torch.zeros(len(x), 2, dtype=x.dtype).scatter_reduce(0, index, score, "amax", include_self=False)
        chance = (score - top.detach()[to]).exp()
        total = torch.zeros_like(top).scatter_add(0, index, chance)
        message = h[source] * (chance / (total[to] + 1e-16)).unsqueeze(-1)
        return torch.zeros_like(h).index_add(0, to, message).flatten(1)

    a, b = nn.Parameter(torch.randn(2, D // 2)), nn.Parameter(torch.randn(2, D // 2))
    return written(forward, torch.randn(24, D), torch.randint(24, (2, 60)), net=linear(), a=a, b=b)


def capsules() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        votes = torch.einsum("nid,iodk->niok", x, self.w)
        logits = votes.new_zeros(votes.shape[:3])
        for i in range(3):
            coupling = logits.softmax(-1).unsqueeze(-1)
            s = (coupling * (votes if i == 2 else votes.detach())).sum(1)
            square = s.square().sum(-1, keepdim=True)
            v = square / (1 + square) * s / (square + 1e-8).sqrt()
            if i < 2:
                logits = logits + (votes.detach() * v.detach().unsqueeze(1)).sum(-1)
        return v.norm(dim=-1)

    return written(forward, states(6, D), w=nn.Parameter(torch.randn(6, 3, D, 4)))


def pooled_and_unpooled() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        size = h.size()
        h, index = F.max_pool2d(h, 2, 2, return_indices=True)
        return self.b(F.max_unpool2d(self.norm(h), index, 2, 2, output_size=size))

    parts = {"a": nn.Conv2d(3, D, 3), "b": nn.ConvTranspose2d(D, 3, 3)}
    return written(forward, images(11), norm=nn.InstanceNorm2d(D, affine=True, track_running_stats=True), **parts)


def folded_patches() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1, stride=2)
        patches = self.net(patches.transpose(1, 2)).transpose(1, 2)
        overlap = F.fold(F.unfold(torch.ones_like(x), 3, padding=1, stride=2), x.shape[-2:], 3, padding=1, stride=2)
        return F.fold(patches, x.shape[-2:], 3, padding=1, stride=2) / overlap

    return written(forward, images(8), net=nn.Linear(27, 27))


def odd_layers() -> Case:
    """Layers of torch.nn that are rarely used."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.bilinear(x, y)
        near = self.cosine(h, x) + self.distance(h, y)
        h, _ = self.attention(h[:, None], y[:, None], y[:, None], need_weights=False)
        h = self.lrn(h.transpose(1, 2)).squeeze(-1)
        return self.glu(torch.cat([h, self.prelu(x)], -1)) * near.unsqueeze(-1)

    attention = nn.MultiheadAttention(D, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    return written(
        forward, rows(), rows(), bilinear=nn.Bilinear(D, D, D), cosine=nn.CosineSimilarity(),
        lrn=nn.LocalResponseNorm(3), distance=nn.PairwiseDistance(), attention=attention, glu=nn.GLU(),
        prelu=nn.PReLU(D),
    )  # fmt: skip


# Packages


def speech_to_text() -> Case:
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", 2), ("ffn_dim", 32), ("attention_heads", 2))}  # fmt: skip
    config = Speech2TextConfig(vocab_size=VOCAB, d_model=32, input_feat_per_channel=8, conv_channels=16, **sides)
    mask = torch.ones(ROWS, 40, dtype=torch.long)
    mask[1::2, 32:] = 0
    model = Speech2TextForConditionalGeneration(config)
    return called(model, input_features=torch.randn(ROWS, 40, 8), attention_mask=mask, labels=tokens(6))


def squeezed_speech() -> Case:
    from transformers import SEWConfig, SEWForCTC

    config = SEWConfig(
        **SMALL, vocab_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), squeeze_factor=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
    )  # fmt: skip
    return called(SEWForCTC(config), input_values=torch.randn(ROWS, 800), labels=torch.randint(1, 32, (ROWS, 5)))


def spectrogram_transformer() -> Case:
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(**SMALL, max_length=64, num_mel_bins=32, num_labels=CLASSES)
    return called(ASTForAudioClassification(config), input_values=torch.randn(ROWS, 64, 32),
                  labels=torch.randint(CLASSES, (ROWS,)))  # fmt: skip


def characters() -> Case:
    from transformers import CanineConfig, CanineForSequenceClassification

    config = CanineConfig(
        **SMALL, max_position_embeddings=64, num_hash_buckets=64, num_labels=3, local_transformer_stride=16
    )
    return called(CanineForSequenceClassification(config), input_ids=torch.randint(1000, (ROWS, 32)),
                  attention_mask=torch.ones(ROWS, 32, dtype=torch.long), labels=torch.randint(3, (ROWS,)))  # fmt: skip


def recurring_spans() -> Case:
    from transformers import SplinterConfig, SplinterForPreTraining

    ids = tokens(16)
    ids[:, 3], ids[:, 7] = 104, 104
    starts, ends = torch.randint(16, (ROWS, 2)), torch.randint(16, (ROWS, 2))
    config = SplinterConfig(**SMALL, vocab_size=VOCAB, max_position_embeddings=32, question_token_id=104)
    positions = torch.tensor([[3, 7]]).repeat(ROWS, 1)
    return called(SplinterForPreTraining(config), input_ids=ids, start_positions=starts, end_positions=ends,
                  question_positions=positions)  # fmt: skip


def masked_video() -> Case:
    from transformers import VideoMAEConfig, VideoMAEForPreTraining

    config = VideoMAEConfig(
        **SMALL, **PATCHES, num_frames=4, decoder_num_attention_heads=2, decoder_hidden_size=16,
        decoder_num_hidden_layers=1, decoder_intermediate_size=32,
    )  # fmt: skip
    mask = torch.stack([torch.randperm(32) < 20 for _ in range(ROWS)])
    return called(VideoMAEForPreTraining(config), pixel_values=torch.randn(ROWS, 4, 3, 32, 32), bool_masked_pos=mask)


def mixed_series() -> Case:
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    config = PatchTSMixerConfig(
        context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=16, num_layers=2,
        prediction_length=8, mode="mix_channel", gated_attn=True, scaling="std",
    )  # fmt: skip
    return called(PatchTSMixerForPrediction(config), past_values=torch.randn(ROWS, 32, 3),
                  future_values=torch.randn(ROWS, 8, 3))  # fmt: skip


def sparse_series() -> Case:
    from transformers import InformerConfig, InformerForPrediction

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", 2), ("ffn_dim", 32), ("attention_heads", 2))}  # fmt: skip
    config = InformerConfig(prediction_length=6, context_length=16, lags_sequence=[1, 2], num_time_features=2,
                            d_model=16, num_static_categorical_features=0,
                            num_static_real_features=0, **sides)  # fmt: skip
    past = {"past_values": torch.randn(ROWS, 18), "past_time_features": torch.randn(ROWS, 18, 2)}
    future = {"future_values": torch.randn(ROWS, 6), "future_time_features": torch.randn(ROWS, 6, 2)}
    return called(InformerForPrediction(config), past_observed_mask=torch.ones(ROWS, 18), **past, **future)


def prompted_segments() -> Case:
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation

    text = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1}
    config = CLIPSegConfig(text_config=text, vision_config={**SMALL, **PATCHES}, projection_dim=32,
                           extract_layers=[0, 1], reduce_dim=16,
                           decoder_num_attention_heads=2, decoder_intermediate_size=32)  # fmt: skip
    ids = tokens()
    ids[:, -1] = VOCAB - 1
    return called(CLIPSegForImageSegmentation(config), input_ids=ids, pixel_values=images(32),
                  labels=torch.rand(ROWS, 32, 32).round())  # fmt: skip


def grouped_patches() -> Case:
    from transformers import GroupViTConfig, GroupViTModel

    text = {**SMALL, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": VOCAB - 1}
    vision = {**PATCHES, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "depths": [1, 1],
              "num_group_tokens": [8, 0], "num_output_groups": [8, 4], "num_hidden_layers": 2}  # fmt: skip
    config = GroupViTConfig(text_config=text, vision_config=vision, projection_dim=32, projection_intermediate_dim=48)
    ids = tokens()
    ids[:, -1] = VOCAB - 1
    return called(GroupViTModel(config), input_ids=ids, pixel_values=images(32), return_loss=True)


def enlarged_images() -> Case:
    from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

    config = Swin2SRConfig(image_size=16, embed_dim=16, depths=[2], num_heads=[2], window_size=4, upscale=2)
    model = Swin2SRForImageSuperResolution(config)
    return Case(model.train(), (), {"pixel_values": torch.rand(ROWS, 3, 16, 16)})


def waveform_unet() -> Case:
    from diffusers import UNet1DModel

    model = UNet1DModel(
        sample_size=32, in_channels=2, out_channels=2, extra_in_channels=64, block_out_channels=(32, 32),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"), up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip
    return Case(model.train(), (torch.randn(ROWS, 2, 32), torch.randint(100, (ROWS,))))


def linear_diffusion() -> Case:
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12,
    )  # fmt: skip
    condition = {"encoder_hidden_states": torch.randn(ROWS, 6, 12), "timestep": torch.randint(1000, (ROWS,))}
    return Case(model.train(), (), {"hidden_states": torch.randn(ROWS, 4, 8, 8), **condition})


def image_prior() -> Case:
    from diffusers import PriorTransformer

    model = PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=7
    )
    inputs = {"timestep": torch.randint(1000, (ROWS,)), "proj_embedding": torch.randn(ROWS, 16)}
    return Case(model.train(), (torch.randn(ROWS, 16),), {**inputs, "encoder_hidden_states": torch.randn(ROWS, 7, 16)})


def adapters_of_adaptive_rank() -> Case:
    from peft import AdaLoraConfig

    return adapted(
        AdaLoraConfig(target_modules=["q_proj", "v_proj"], init_r=4, target_r=2, total_step=10, task_type="CAUSAL_LM")
    )


IDIOMS: dict[str, Callable[[], Case]] = {
    "both players of a game": both_players,
    "a negative binomial of counts": negative_binomial,
    "a sliced Wasserstein distance": sliced_wasserstein,
    "soft dynamic time warping": soft_time_warping,
    "a Gaussian process by Cholesky": gaussian_process,
    "a Kalman filter": kalman_filter,
    "a weighted noise schedule": weighted_noise_schedule,
    "a router with capacity": router_with_capacity,
    "experts of sorted tokens": experts_of_sorted_tokens,
    "attention of edges": attention_of_edges,
    "capsules": capsules,
    "pooled and unpooled": pooled_and_unpooled,
    "folded patches": folded_patches,
    "odd layers of torch": odd_layers,
}
MODELS: dict[str, Callable[[], Case]] = {
    **{f"plain: {name}": build for name, build in IDIOMS.items()},
    "transformers: Speech2TextForConditionalGeneration": speech_to_text,
    "transformers: SEWForCTC": squeezed_speech,
    "transformers: ASTForAudioClassification": spectrogram_transformer,
    "transformers: CanineForSequenceClassification": characters,
    "transformers: SplinterForPreTraining": recurring_spans,
    "transformers: VideoMAEForPreTraining": masked_video,
    "transformers: PatchTSMixerForPrediction": mixed_series,
    "transformers: InformerForPrediction": sparse_series,
    "transformers: CLIPSegForImageSegmentation": prompted_segments,
    "transformers: GroupViTModel": grouped_patches,
    "transformers: Swin2SRForImageSuperResolution": enlarged_images,
    "diffusers: UNet1DModel": waveform_unet,
    "diffusers: SanaTransformer2DModel": linear_diffusion,
    "diffusers: PriorTransformer": image_prior,
    "peft: AdaLoRA on Llama": adapters_of_adaptive_rank,
}

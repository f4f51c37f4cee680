"""Models outside transformers: five written in plain PyTorch, two of diffusers, LoRA on Llama by peft.

All are small. The plain PyTorch models return their loss.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NanoGPT(nn.Module):
    """A decoder as Karpathy's nanoGPT: fused q|k|v, learned positions, the head tied to the embedding."""

    def __init__(self, vocab: int, hidden: int, heads: int, layers: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(NanoBlock(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


class NanoBlock(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(hidden, dim=2)
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return x + self.mlp(self.norm2(x))


class ResNet(nn.Module):
    """Residual blocks of two convolutions with batch norm, the second halving the image."""

    def __init__(self, widths: tuple[int, ...], classes: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]))
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(ResBlock(a, b, 1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


class ResBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.skip(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021): one MLP over patches, one over channels."""

    def __init__(self, patch: int, image: int, hidden: int, layers: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.blocks = nn.ModuleList(MixerBlock((image // patch) ** 2, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), targets)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.over_patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.over_channels = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class LSTMClassifier(nn.Module):
    """Embedding, a two-layer LSTM, a class from its last state."""

    def __init__(self, vocab: int, hidden: int, classes: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(tokens))
        return F.cross_entropy(self.head(states[:, -1]), targets)


class UNet(nn.Module):
    """Down and up again with skips (Ronneberger et al. 2015), group norm; a class for every pixel."""

    def __init__(self, widths: tuple[int, ...], classes: int):
        super().__init__()
        self.first = double_conv(3, widths[0])
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(double_conv(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(double_conv(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.first(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return F.cross_entropy(self.head(x), targets)


def double_conv(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers)


Inputs = dict[str, Tensor]
ROWS, LENGTH, VOCAB, CLASSES = 8, 12, 160, 12


def nanogpt() -> tuple[nn.Module, Inputs]:
    tokens = torch.randint(VOCAB, (ROWS, LENGTH))
    targets = torch.randint(VOCAB, (ROWS, LENGTH)).masked_fill(torch.rand(ROWS, LENGTH) < 0.3, -100)
    return NanoGPT(VOCAB, 64, 4, 2, LENGTH), {"tokens": tokens, "targets": targets}


def images(size: int) -> Inputs:
    return {"images": torch.randn(ROWS, 3, size, size), "targets": torch.randint(CLASSES, (ROWS,))}


def resnet() -> tuple[nn.Module, Inputs]:
    return ResNet((16, 32, 32), CLASSES), images(20)


def mixer() -> tuple[nn.Module, Inputs]:
    return Mixer(4, 24, 32, 2, CLASSES), images(24)


def lstm() -> tuple[nn.Module, Inputs]:
    tokens = torch.randint(VOCAB, (ROWS, LENGTH))
    return LSTMClassifier(VOCAB, 32, CLASSES), {"tokens": tokens, "targets": torch.randint(CLASSES, (ROWS,))}


def unet() -> tuple[nn.Module, Inputs]:
    return UNet((16, 24, 32), CLASSES), {**images(16), "targets": torch.randint(CLASSES, (ROWS, 16, 16))}


class Denoiser(nn.Module):
    """A diffusion model with the loss it is trained by: the mean squared error of the predicted noise."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, noise: Tensor, sample: Tensor, timestep: Tensor, condition: Tensor) -> Tensor:
        return F.mse_loss(self.model(sample, timestep, condition).sample, noise)


def diffusion_inputs(channels: int, condition: Tensor) -> Inputs:
    noise, sample = torch.randn(2, ROWS, channels, 16, 16)
    return {"noise": noise, "sample": sample, "timestep": torch.randint(1000, (ROWS,)), "condition": condition}


def diffusers_dit() -> tuple[nn.Module, Inputs]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=12, in_channels=4, num_layers=2, sample_size=16, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    return Denoiser(model), diffusion_inputs(4, torch.randint(10, (ROWS,)))


def diffusers_unet() -> tuple[nn.Module, Inputs]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    return Denoiser(model), diffusion_inputs(4, torch.randn(ROWS, 6, 24))


def peft_lora() -> tuple[nn.Module, Inputs]:
    """Adapters on every matrix of a Llama whose own weights are frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    ids = torch.randint(VOCAB, (ROWS, LENGTH))
    return get_peft_model(LlamaForCausalLM(config), lora), {"input_ids": ids, "labels": ids.clone()}


OTHER_MODELS = {
    "plain: nanoGPT": nanogpt,
    "plain: ResNet": resnet,
    "plain: MLP-Mixer": mixer,
    "plain: LSTM": lstm,
    "plain: U-Net": unet,
    "diffusers: DiT": diffusers_dit,
    "diffusers: U-Net": diffusers_unet,
    "peft: LoRA on Llama": peft_lora,
}

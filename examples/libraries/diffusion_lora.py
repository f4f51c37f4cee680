"""Train LoRA adapters of a small diffusion U-Net, as in diffusers' train_text_to_image_lora.py."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
unet = UNet2DConditionModel(sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8,
                            block_out_channels=(16, 32), cross_attention_dim=16, attention_head_dim=4,
                            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
noise = DDPMScheduler(num_train_timesteps=100)
data = [{"latents": torch.randn(4, 8, 8), "text": torch.randn(5, 16)} for _ in range(32)]
loader = DataLoader(data, 8, shuffle=True)
optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-2)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
draws = torch.Generator().manual_seed(1)
for batch in loader:
    target = torch.randn(batch["latents"].shape, generator=draws)
    steps = torch.randint(100, (8,), generator=draws)
    noisy = noise.add_noise(batch["latents"], target, steps)
    loss = F.mse_loss(unet(noisy, steps, batch["text"], return_dict=False)[0], target)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"result: loss {float(loss):.3f}")

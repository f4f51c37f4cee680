"""Train a small vision transformer on images with Lightning."""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                           image_size=16, patch_size=4, num_labels=3)  # fmt: skip
        self.model = ViTForImageClassification(config)

    def training_step(self, batch, batch_idx):
        images, classes = batch
        loss = F.cross_entropy(self.model(pixel_values=images).logits, classes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
images = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))
loader = DataLoader(list(zip(images, torch.arange(32) % 3, strict=True)), batch_size=8, shuffle=True)
trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False)  # fmt: skip
trainer.fit(Classifier(), loader)
if trainer.is_global_zero:
    print(f"result: loss {float(trainer.callback_metrics['loss']):.3f}")

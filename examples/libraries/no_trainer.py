"""Train a small GPT-2 in a loop with accelerate, as in transformers' run_clm_no_trainer.py."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
torch.manual_seed(0)
tokens = torch.randint(64, (48, 12), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=12, use_cache=False,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
model = GPT2LMHeadModel(config)
train, evaluation = DataLoader(data[:40], 8, shuffle=True), DataLoader(data[40:], 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=6)
model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
for _ in range(2):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**batch).loss) for batch in evaluation]
accelerator.print(f"result: loss {float(loss):.3f}, evaluation {float(torch.stack(losses).mean()):.3f}")

"""Fine-tune a small BERT with transformers' Trainer, as in transformers' run_glue.py."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
tokens = torch.randint(1, 99, (64, 12), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "attention_mask": torch.ones(12, dtype=torch.long), "labels": row[0] % 3} for row in tokens]
config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)  # fmt: skip
model = BertForSequenceClassification(config)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


args = TrainingArguments("out", per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-3, report_to=[],
                         use_cpu=True, disable_tqdm=True, save_strategy="no", eval_strategy="epoch")  # fmt: skip
trainer = Trainer(model, args, train_dataset=data[:48], eval_dataset=data[48:], compute_metrics=accuracy)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"result: loss {result.training_loss:.3f}, evaluation {trainer.state.log_history[-2]['eval_loss']:.3f}")

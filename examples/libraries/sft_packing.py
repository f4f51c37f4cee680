"""Train a small Llama on packed texts with TRL's SFTTrainer, as in TRL's sft.py."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
texts = [{"text": " ".join(f"w{2 + (7 * i + j * j) % 60}" for j in range(5 + i % 9))} for i in range(200)]
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     max_position_embeddings=32, pad_token_id=0, eos_token_id=1, use_cache=False)  # fmt: skip
model = LlamaForCausalLM(config)
args = SFTConfig("out", packing=True, packing_strategy="wrapped", max_length=16, per_device_train_batch_size=8,
                 max_steps=8, learning_rate=1e-3, bf16=False, gradient_checkpointing=False, report_to=[], use_cpu=True,
                 disable_tqdm=True, save_strategy="no")  # fmt: skip
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(texts), processing_class=tokenizer)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"result: loss {result.training_loss:.3f}")

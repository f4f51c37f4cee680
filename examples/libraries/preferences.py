"""Train a small Llama on preferences with TRL's DPOTrainer, as in TRL's dpo.py."""

import copy

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

torch.manual_seed(0)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
pairs = [{"prompt": f"w{2 + i} ", "chosen": f"w{3 + i} w{4 + i}", "rejected": f"w{9 + i} w{2 + i}"} for i in range(48)]
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     max_position_embeddings=32, pad_token_id=0, eos_token_id=1, use_cache=False)  # fmt: skip
model = LlamaForCausalLM(config)
reference = copy.deepcopy(model)
args = DPOConfig("out", per_device_train_batch_size=8, max_steps=6, learning_rate=1e-3, bf16=False, report_to=[],
                 gradient_checkpointing=False, use_cpu=True, disable_tqdm=True, save_strategy="no")  # fmt: skip
trainer = DPOTrainer(model, reference, args, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"result: loss {result.training_loss:.3f}")

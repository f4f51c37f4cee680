"""Command line, model (a small Llama) and text of `train_text.py`."""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from autopart.options import OPTIONS


def read_arguments(description: str) -> tuple[argparse.Namespace, dict]:
    """The command line, and what of it is passed on to `parallelize`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mesh", default=f"dp{os.environ.get('WORLD_SIZE', 1)}", help="such as dp2,tp2")
    for name, default in {"steps": 50, "batch": 16, "sequence": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[default: {default}]")
    parser.add_argument("--dtype", default="float32", help="float64: losses agree to 1e-10 on all meshes")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="[default: adamw]")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="to go on from, and to save in at the end")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="to write scalars to")
    passed_on = [name for name in ("zero", "precision", "microbatches", "hardware") if name in OPTIONS]
    for name in passed_on:
        parser.add_argument(f"--{name}", type=int if OPTIONS[name].form is int else str, help=OPTIONS[name].text)
    parser.set_defaults(hardware=None if torch.cuda.is_available() else "cpu-gloo")
    arguments = parser.parse_args()
    return arguments, {name: getattr(arguments, name) for name in passed_on}


def small_llama(dtype: str) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every rank, on the GPU if there is one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))
    model.loss_function = next_token_loss
    if dtype == "float64":  # the norms of transformers are in float32 too
        for name, module in list(model.named_modules()):
            if isinstance(module, LlamaRMSNorm):
                model.set_submodule(name, nn.RMSNorm(module.weight.numel(), module.variance_epsilon))
    return model.to("cuda" if torch.cuda.is_available() else "cpu", getattr(torch, dtype))


def next_token_loss(logits: Tensor, labels: Tensor, **_: object) -> Tensor:
    """In float32, or in float64 of a model in that. That of transformers is always in float32: meshes would differ from
    the eighth digit on."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def rows_of_text(length: int) -> Tensor:
    """The Python language reference (`help('for')` reads it), a byte a token: int64 [rows, length]."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.tensor(list(text[: len(text) // length * length])).view(-1, length)


def scalars_to(folder: Path | None):
    """TensorBoard's writer; None where none is asked for, on other ranks than the first, or without TensorBoard."""
    if folder is None or os.environ.get("RANK", "0") != "0":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed (pip install tensorboard): no scalars are written")
        return None
    return SummaryWriter(folder)

"""Save random training runs on one mesh, load them on another, and compare all values bit for bit.

Each pair draws two meshes of at most eight ranks, each with a ZeRO stage and recomputation, a model and an optimizer.
`autopart.verify_resume` trains two steps in float64 on the first mesh, with all ranks in this process. It saves and
loads with the code of `pm.save` and `pm.load`. Parameters, buffers and optimizer state must be equal bit for bit, and
the loss of the next step up to 1e-10.

    python benchmarks/resumed.py [--pairs N] [--seed N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from typing import Any

import torch

import autopart
from autopart.errors import AutopartError

MESHES = ["dp2", "dp3", "dp4", "tp2", "tp4", "pp2", "cp2", "dp2,tp2", "pp2,tp2", "pp2,dp2", "dp2,cp2", "cp2,tp2",
          "dp4,tp2", "dp2,tp4", "pp2,dp2,tp2", "dpr2,dp2", "dpr2,dp2,tp2"]  # fmt: skip
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {}),
    "Llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}),
    "BERT": ("BertForMaskedLM", {**SIZES, "intermediate_size": 64}),
    "Mixtral": ("MixtralForCausalLM", {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64,
                                       "num_local_experts": 4}),
}  # fmt: skip
OPTIMIZERS: dict[str, Any] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}
ROWS, LENGTH = 12, 16
ROW = "{:8} {:>5} {:8} {:18} {:12} {:28} -> {:12} {:28} {}"


@functools.cache
def model_and_batch(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    import transformers

    kind, sizes = MODELS[name]
    config_class = getattr(transformers, kind).config_class
    sizes = sizes or {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": LENGTH}
    torch.manual_seed(0)
    config = config_class(**sizes, use_cache=False)
    model = getattr(transformers, kind)(config).eval()
    ids = torch.randint(1, 64, (ROWS, LENGTH))
    return model, {"input_ids": ids, "labels": ids}


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a random pair. Settings that a mesh does not have are left out."""

    def settings(mesh: str) -> dict[str, Any]:
        options: dict[str, Any] = {"recompute": rng.choice(["none", "full", "selective"])}
        if "dp" in mesh:
            options["zero"] = rng.choice([0, 1, 3])
        return options

    first, second = rng.choice(MESHES), rng.choice(MESHES)
    return {"model": rng.choice(list(MODELS)), "optimizer": rng.choice(list(OPTIMIZERS)), "first": first,
            "second": second, "options": settings(first), "options_b": settings(second)}  # fmt: skip


def result_of(pair: dict[str, Any]) -> dict[str, Any]:
    model, batch = model_and_batch(pair["model"])
    options_b = {name: None for name in pair["options"]} | pair["options_b"]
    options_b = {name: value for name, value in options_b.items() if name != "recompute" or value}
    try:
        found = autopart.verify_resume(
            model, pair["first"], pair["second"], example_kwargs=batch, steps=2,
            optimizer=OPTIMIZERS[pair["optimizer"]], options_b=options_b, **pair["options"],
        )  # fmt: skip
    except AutopartError as error:
        return {**pair, "result": "refused", "text": str(error).splitlines()[0]}
    result = "equal" if found.ok else "WRONG"
    text = "" if found.ok else str(found)
    return {**pair, "result": result, "values": found.num_values, "loss_error": found.loss_error, "text": text}


def text_of(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two pairs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    rows = []
    for _ in range(2 if arguments.quick else arguments.pairs):
        row = result_of(drawn(rng))
        rows.append(row)
        print(ROW.format(
            row["result"], row.get("values", ""), row["model"], row["optimizer"],
            row["first"], text_of(row["options"]), row["second"], text_of(row["options_b"]), row["text"],
        ), flush=True)  # fmt: skip
    counts = {name: sum(row["result"] == name for row in rows) for name in ("equal", "WRONG", "refused")}
    values = sum(row.get("values", 0) for row in rows)
    largest = max((row["loss_error"] for row in rows if "loss_error" in row), default=0.0)
    print(f"{len(rows)} pairs: {counts}, {values} tensors compared, largest error of the next loss {largest:.1e}")
    if arguments.json:
        print(json.dumps({"benchmark": "resumed", "seed": arguments.seed, **counts, "values": values, "rows": rows}))
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())

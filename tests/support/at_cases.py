"""`Plan.cost.at` beside plans that are made anew at those sizes: the cases, and their table.

python tests/support/at_cases.py [--only llama] [--hardware cpu-gloo]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.recipe.compiler import make_plan, prepare
from autopart.tracing.trace_model import bind_call


def gpt2(rows=16, tokens=1024):
    config = GPT2Config(
        n_embd=1024, n_layer=4, n_head=16, vocab_size=32000, n_positions=4096, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return language_model(GPT2LMHeadModel, config, rows, tokens, torch.float32)


def llama(rows=16, tokens=2048):
    """Two heads of queries for one of keys and values."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return language_model(LlamaForCausalLM, config, rows, tokens, torch.bfloat16)


def bert(rows=16, tokens=512):
    config = BertConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
        max_position_embeddings=4096, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return language_model(BertForMaskedLM, config, rows, tokens, torch.float32)


def mixtral(rows=16, tokens=1024):
    config = MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=4096,
        use_cache=False,
    )  # fmt: skip
    return language_model(MixtralForCausalLM, config, rows, tokens, torch.bfloat16)


def language_model(kind, config, rows, tokens, dtype):
    with torch.device("meta"):
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        return kind(config).to(dtype), {"input_ids": ids, "labels": ids.clone()}


def vit(rows=16):
    config = ViTConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, image_size=224,
        patch_size=14, num_labels=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = ViTForImageClassification(config)
        return model, {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}


HARDWARE = ("a100-80gb-sxm", "cpu-gloo")
MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "mixtral": mixtral}

TOKENS = ("gpt2", "llama", "bert", "mixtral")

SEQUENCE = {"sequence_parallel": True}
PIPED = {"microbatches": 4}
FULL = {"recompute": "full"}
LOW = {"zero": 3, "recompute": "full"}

CASES: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("dp1", {}, {"dp": 2}), ("dp2", {}, {"dp": 4}), ("dp2", {}, {"dp": 1}), ("dp2", {"zero": 1}, {"dp": 4}),
    ("dp2", {"zero": 2}, {"dp": 4}), ("dp2", {"zero": 3}, {"dp": 8}), ("dp8", {"zero": 3}, {"dp": 2}),
    ("dp2", {}, {"b": 4}), ("dp2", {"zero": 3}, {"m": 4}), ("dp1", PIPED, {"m": 8}), ("dp1", {}, {"m": 4}),
    ("dp1", PIPED, {"m": 1}), ("dp2", LOW, {"b": 2}), ("dp2", {}, {"s": 2.0}), ("tp2", {}, {"s": 0.25}),
    ("tp2", SEQUENCE, {"s": 0.25}), ("dp1", FULL, {"s": 4.0}), ("dp1", {"recompute": "selective"}, {"s": 2.0}),
    ("pp2", PIPED, {"s": 2.0}), ("tp2", {}, {"tp": 4}), ("tp2", {}, {"tp": 8}), ("tp4", {}, {"tp": 2}),
    ("tp2", {}, {"tp": 1}), ("tp2", SEQUENCE, {"tp": 4}), ("tp2", SEQUENCE, {"tp": 8}), ("tp4", SEQUENCE, {"tp": 2}),
    ("tp8", SEQUENCE, {"tp": 2}), ("tp2", SEQUENCE, {"b": 4}), ("tp2", FULL, {"b": 4}),
    ("tp2", {"compile": True}, {"dp": 2}), ("tp2", {}, {"dp": 2}), ("tp2", {}, {"pp": 2, "m": 4}),
    ("dp2,tp2", LOW, {"tp": 4}), ("pp2", PIPED, {"m": 8}), ("pp2", PIPED, {"pp": 4}), ("pp4", PIPED, {"pp": 2}),
    ("pp2", PIPED, {"pp": 1}), ("dp1", PIPED, {"pp": 2}), ("pp2", PIPED, {"v": 2}), ("pp2", PIPED | FULL, {"pp": 4}),
    ("pp2", PIPED | {"schedule": "gpipe"}, {"pp": 4}), ("dp2,pp2", PIPED | {"zero": 3}, {"pp": 4}),
    ("pp2,tp2", PIPED, {"tp": 4}), ("pp2,tp2", PIPED | SEQUENCE, {"pp": 4}), ("pp2", PIPED, {"b": 4}),
    ("dp2,pp2,tp2", LOW | PIPED, {"dp": 4, "m": 8}), ("cp2", {}, {"cp": 4}), ("cp2", FULL, {"b": 4}),
    ("cp4", {}, {"cp": 2}), ("cp2,tp2", {}, {"cp": 4}), ("cp2", {}, {"s": 2.0}), ("cp2", {}, {"cp": 1}),
    ("ep2", {}, {"ep": 4}), ("ep4", {}, {"ep": 2}), ("dp2,ep2", {}, {"ep": 4}), ("ep2", {}, {"b": 4}),
    ("ep2", {}, {"s": 2.0}), ("ep2", {}, {"ep": 1}),
]  # fmt: skip
"""(mesh, options of the plan, sizes that are asked of it; `s` in how many times its tokens)."""


class Beside(NamedTuple):
    """What a plan says of other sizes, over what a plan made there does; whether both have the same layouts, and
    whether `at` says that they may not."""

    step: float
    memory: float
    same_layouts: bool
    noted: bool

    @property
    def off(self) -> float:
        return max(abs(self.step - 1), abs(self.memory - 1))


@cache
def traced(name: str, **sizes: int) -> Any:
    model, batch = MODELS[name](**sizes)
    return model, prepare(model, bind_call(model, (), batch))


@cache
def _planned(name: str, mesh: str, options: tuple[tuple[str, Any], ...], sizes: tuple[tuple[str, int], ...]) -> Any:
    model, trace = traced(name, **dict(sizes))
    return make_plan(model, trace, Mesh.parse(mesh), Options(**dict(options)))


def planned(name: str, mesh: str, options: dict[str, Any], **sizes: int) -> Any:
    return _planned(name, mesh, tuple(sorted(options.items())), tuple(sorted(sizes.items())))


def beside(name: str, mesh: str, options: dict[str, Any], changed: dict[str, Any]) -> Beside:
    plan = planned(name, mesh, options)
    sizes = dict(changed)
    if "s" in sizes:
        sizes["s"] = int(plan.cost.table.s * sizes["s"])
    other = Mesh.parse({**plan.mesh, **{axis: n for axis, n in sizes.items() if len(axis) == 2}})
    asked = {**options, "microbatches": sizes.get("m", plan.schedule.microbatches)}
    if other.size("pp") == 1:
        asked.pop("schedule", None)
    asked |= {"schedule": "interleaved_1f1b", "virtual_stages": sizes["v"]} if "v" in sizes else {}
    rows = int(sizes.get("b", plan.cost.table.b) * other.data_parallel_size * asked["microbatches"])
    tokens = {"tokens": sizes["s"]} if "s" in sizes else {}
    new = planned(name, str(other), asked, rows=rows, **tokens)
    figures = plan.cost.at(**sizes)
    fullest = max(row["total"] for row in new.memory)
    same = (
        _without_rows(plan.operators) == _without_rows(new.operators)
        and plan.parameters.keys() == new.parameters.keys()
    )
    return Beside(
        figures.step_time_s / new.cost["step_time_s"], figures.memory_bytes / fullest, same, bool(figures.notes)
    )


def _without_rows(operators: Any) -> Any:
    """Rows and positions in one dim are cut in as many sections as there are rows."""
    return {name: {axis: re.sub(r"; sections=\d+", "", str(text)) for axis, text in on.items()}
            for name, on in operators.items()}  # fmt: skip


def cases(only: str = "", hardware: str = "") -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    for name in MODELS:
        for mesh, options, sizes in CASES:
            if ("ep" in mesh and name != "mixtral") or ("s" in sizes and name not in TOKENS):
                continue
            if only in ("", name):
                yield name, mesh, {**options, **({"hardware": hardware} if hardware else {})}, sizes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--hardware", default="")
    parser.add_argument("--off", type=float, default=0.05)
    args = parser.parse_args()
    for name, mesh, options, sizes in cases(args.only, args.hardware):
        label = f"{name:9}{mesh:12}{options!s:60}{sizes!s:24}"
        try:
            found = beside(name, mesh, options, sizes)
        except Exception as error:
            print(label, "-", type(error).__name__, str(error).splitlines()[0], flush=True)
            continue
        layouts = "" if found.same_layouts else "other layouts" + ", noted" * found.noted
        mark = "<<<" if found.off > args.off else ""
        print(f"{label} step {found.step:.3f}  memory {found.memory:.3f}  {layouts:20}{mark}", flush=True)


if __name__ == "__main__":
    main()

"""Measure guards on Python values: per call, in a trace, and with a number that changes every step.

guards us         comparing all values that a trace read, per call: the median of rounds; all times are of the processor
trace ratio       a trace with recording over one without, in turn
step ms           a training step on one rank with the same number in each step
changing ms       the same step with another number (`num_items_in_batch`) in each step, once it is an input

python benchmarks/guards.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopart
from autopart.recipe.make_plan import prepare
from autopart.tracing.python.guards import Guards
from autopart.tracing.python.recorded_reads import record_reads
from autopart.tracing.trace_model import bind_call

ROWS, TOKENS, VOCABULARY = 4, 32, 256


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=VOCABULARY))


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of the processor."""
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def row(name: str, model: nn.Module, rounds: int) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    call = bind_call(model.train(), (), batch)

    def recorded() -> None:
        with record_reads():
            prepare(model, call)

    prepare(model, call)
    ratios = [seconds_of(recorded) / seconds_of(lambda: prepare(model, call)) for _ in range(rounds)]
    with record_reads() as reads:
        prepare(model, call)
    guards = Guards(reads, model, [])
    holds = [seconds_of(lambda: [guards.hold() for _ in range(200)]) / 200 for _ in range(rounds)]

    pm = autopart.parallelize(model, "dp1", example_kwargs={**batch, "num_items_in_batch": 100})

    def step(number: int) -> None:
        pm.step(**batch, num_items_in_batch=number)

    same = [seconds_of(lambda: step(100)) for _ in range(3 * rounds)]
    step(101)
    changing = [seconds_of(lambda n=n: step(n)) for n in range(102, 102 + 3 * rounds)]
    return {
        "model": name, "values": guards.num_values, "guards_us": 1e6 * statistics.median(holds),
        "trace_ratio": statistics.median(ratios), "step_ms": 1e3 * statistics.median(same),
        "changing_ms": 1e3 * statistics.median(changing),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    layers, rounds = (2, 1) if options.quick else (12, 5)
    rows = [row(f"{make.__name__}, {layers} layers", make(layers), rounds) for make in (llama, gpt2)]
    print(f"{'model':<18}{'values':>8}{'guards us':>11}{'trace ratio':>13}{'step ms':>9}{'changing ms':>13}")
    for r in rows:
        print(f"{r['model']:<18}{r['values']:>8}{r['guards_us']:>11.1f}{r['trace_ratio']:>13.2f}{r['step_ms']:>9.1f}"
              f"{r['changing_ms']:>13.1f}")  # fmt: skip
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()

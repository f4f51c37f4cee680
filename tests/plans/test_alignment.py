"""Notes of weights whose sizes slow matrix units down, and what they cost."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopart
from autopart.common.matrix_alignment import unaligned

H200 = "h200-141gb-sxm"


def gpt2(vocab, dtype=torch.bfloat16, inner=None):
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=vocab, n_positions=32, use_cache=False,
                        bos_token_id=0, eos_token_id=0, n_inner=inner)  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(8, 32, dtype=torch.long)
        return GPT2LMHeadModel(config).to(dtype), {"input_ids": ids, "labels": ids}


def plan_of(vocab, mesh="dp1", hardware=H200, dtype=torch.bfloat16, inner=None, **options):
    model, batch = gpt2(vocab, dtype, inner)
    return autopart.plan(model, mesh, example_kwargs=batch, hardware=hardware, **options)


def notes(*args, **options):
    return [note for note in plan_of(*args, **options).notes if "not a multiple of" in note]


@pytest.mark.large
def test_a_vocabulary_that_is_no_multiple():
    (odd,) = notes(501)
    assert odd == (
        "transformer.wte.weight: dim 0 of 501 in bfloat16 is not a multiple of 8, so its products run at 18 % of the "
        "full rate; 504 would run at the full rate"
    )
    (even,) = notes(502)
    assert "run at 32 % of the full rate; 504 would" in even
    assert not notes(504)


def test_shards_decide():
    """504 on four ranks are shards of 126, which is even; what fits is a multiple of 8 on each."""
    (note,) = notes(504, "tp4")
    assert "is not a multiple of 32" in note and "512 would" in note
    assert not notes(512, "tp4")


def test_repeated_blocks_share_a_line():
    lines = notes(512, inner=250)
    assert len(lines) == 2 and all("transformer.h.*.mlp" in line for line in lines)


@pytest.mark.parametrize("case", [{"dtype": torch.float32}, {"hardware": "a100-80gb-sxm"}], ids=str)
def test_none_where_nothing_is_slowed(case):
    assert not notes(501, **case)


def test_in_mixed_precision_it_is_what_is_computed():
    (note,) = notes(501, dtype=torch.float32, precision="bf16")
    assert "501 in bfloat16" in note


@pytest.mark.large
def test_such_products_are_priced():
    """Products take longer than with a larger, even vocabulary, and `simulate` and `cost.at` predict equal steps."""
    odd, even = (plan_of(vocab, "dp2,tp2") for vocab in (4001, 4032))
    simulation = autopart.simulate(odd)
    assert simulation.parts["matmul"] > autopart.simulate(even).parts["matmul"]
    assert odd.cost.at().step_time_s == pytest.approx(simulation.step_time_s, rel=1e-9)


def test_how_rows_are_loaded():
    assert [unaligned([size]) for size in (8, 16, 12, 2, 7, 50257, 30522)] == [0, 0, 2, 2, 3, 3, 2]
    assert unaligned([8, 16]) == 0 and unaligned([8, 12]) == 2 and unaligned([12, 7]) == 3

"""The cases of `test_errors.py` about parameters that are cut over `dp`: the call, and the exact text it must give."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from pin_errors import pinned
from torch import Tensor, nn
from zoo import skip_mlp

import autopart
from autopart.plans.plan import Plan

LEVELS = "\n  try    0 (no sharding), 1 (shards optimizer state), 2 (also gradients) or 3 (also parameters)"
AGAIN = "\n  try    leave zero out, or make a new plan"


def planned(mesh: str, **options: Any) -> Callable[[], Any]:
    """A case: plan a model under these options."""

    def case() -> Any:
        model, batch = skip_mlp()
        return autopart.plan(model, mesh, example_kwargs=batch, **options)

    return case


class ReadTwice(nn.Module):
    """A weight of rows that multiplies what tp cuts, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.rows = nn.Linear(8, 64), nn.Linear(64, 8), nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down((self.up(x) * self.rows).relu()) * self.rows).square().mean()


def read_twice() -> Any:
    pins = {"up.weight": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}
    return autopart.plan(ReadTwice(), "dp2,tp2", example_kwargs={"x": torch.ones(8, 8, 8)}, zero=1, precision="bf16",
                         dp_sync="*.bias=all_reduce,*=top_k:0.1", pins=pins)  # fmt: skip


def odd() -> Any:
    return autopart.plan(nn.Linear(3, 5), "dp2", example_kwargs={"input": torch.ones(2, 3)}, zero=3)


def followed(made: int, asked: int) -> Callable[[], Any]:
    """A case: follow a plan made with one stage of ZeRO, asking for another."""

    def case() -> Any:
        model, batch = skip_mlp()
        plan = autopart.plan(model, "dp2", example_kwargs=batch, zero=made)
        return autopart.verify(model, "dp2", example_kwargs=batch, plan=plan, zero=asked)

    return case


def edited(name: str, entry: dict[str, str]) -> Callable[[], Any]:
    """A case: follow a plan in which a parameter's entry was edited."""

    def case() -> Any:
        model, batch = skip_mlp()
        data = json.loads(autopart.plan(model, "dp2,tp2", example_kwargs=batch, zero=3).to_json())
        data["parameters"][name] = entry
        return autopart.verify(model, "dp2,tp2", example_kwargs=batch, plan=Plan.from_json(json.dumps(data)))

    return case


ZERO_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "zero: 4": (planned("dp2", zero=4), f"OptionError: unknown zero=4{LEVELS}"),
    "zero: 1 without dp": (planned("tp2", zero=1),
        "OptionError: zero=1 needs an axis to shard parameters over\n  why    the mesh tp2 has no axis dp or cp or ep"
        "\n  try    mesh='dp2,tp2', or leave zero= out"),
    "zero: over replicas alone": (planned("dpr2", zero=1),
        "OptionError: zero=1 needs an axis to shard parameters over\n  why    the mesh dpr2 has no axis dp or cp or ep"
        "\n  try    mesh='dpr2,dp2', or leave zero= out"),
    "zero: another level than the plan's": (followed(1, 2),
        "OptionError: zero=2 contradicts the plan, which has zero=1\n  try    leave zero out, or edit "
        "the plan"),
    "prefetch: negative": (planned("dp2", zero=3, prefetch=-1),
        "OptionError: prefetch=-1 is not a number of blocks\n  why    it is how many blocks ahead parameters are "
        "all-gathered\n  try    1, or 0 for no prefetching"),
    "zero: unknown": (planned("dp2", zero="3"),
        f"OptionError: unknown zero='3'{LEVELS}"),
    "zero: bool": (planned("dp2", zero=True),
        f"OptionError: unknown zero=True{LEVELS}"),
    "zero: without dp": (planned("pp2,tp2", zero=3),
        "OptionError: zero=3 needs an axis to shard parameters over\n  why    the mesh pp2,tp2 has no axis dp "
        "or cp or ep"
        "\n  try    mesh='pp2,dp2,tp2', or leave zero= out"),
    "zero: nothing divides": (odd,
        "LayoutError: zero=3 finds no parameter to shard over dp=2\n  why    no parameter with two or more dims "
        "has a dim that is divisible by 2 and that tp does not shard\n  try    another size of dp, or zero=0"),
    "zero: a plan without it": (followed(0, 3),
        f"OptionError: zero=3 contradicts the plan, which shards no parameters over dp{AGAIN}"),
    "zero: a plan with it": (followed(3, 0),
        f"OptionError: zero=0 contradicts the plan, which shards parameters over dp{AGAIN}"),
    # methods of dp_sync
    **{f"zero: {how} with a method": (planned("dp2", dp_sync="top_k:0.1", **options),
        f"OptionError: dp_sync='top_k:0.1' cannot be combined with sharded parameters ({how})\n  why    '{first}' is "
        "sharded "
        "over dp: its gradient is reduce-scattered, and no rank has all of it\n  try    zero=1, or a mesh with two "
        "data axes such as 'dpr2,dp4': parameters are sharded over dp, dp_sync uses dpr")
       for how, first, options in (("zero=2", "head.bias", {"zero": 2}), ("zero=3", "head.weight", {"zero": 3}),
                                   ("by a pin", "head.weight", {"pins": {"head.weight": {"dp": "S(0)"}}}))},
    "zero: 1 with a method of models": (planned("dp2", zero=1, dp_sync="local:4"),
        "OptionError: dp_sync='local:4' cannot be combined with sharded parameters (zero=1)\n  why    'head.bias' is "
        "sharded "
        "over dp: ranks store shards of one model, and no rank has a separate model\n  try    zero=0, or a mesh "
        "with two data axes such as 'dpr2,dp4': parameters are sharded over dp, dp_sync uses dpr"),
    "zero: 1 with a method, read in two layouts": (read_twice,
        "OptionError: dp_sync='*.bias=all_reduce,*=top_k:0.1' cannot be combined with zero=1 for 'rows'\n  why    it "
        "is used in "
        "more than one layout, and each use gathers its shards and reduces its gradient separately\n  try    zero=0, "
        "or "
        "an exact reduction: dp_sync='rows=all_reduce,*.bias=all_reduce,*=top_k:0.1'"),
    # plans edited by hand
    "zero: edited, cut by tp": (edited("head.weight", {"dp": "S(0)", "tp": "S(0)"}),
        "PlanError: the plan's layout S(0) of 'head.weight' on dp is not possible\n  why    tp shards dim 0 "
        "already\n  where  line 1\n  "
        "try    S(1) or R"),
    "zero: edited, a sum": (edited("head.weight", {"dp": "P", "tp": "R"}),
        "PlanError: the plan's layout P of 'head.weight' on dp is not possible\n  why    a weight is not a partial "
        "sum\n  where  line 1\n"
        "  try    S(0), S(1) or R"),
    "zero: edited, no dim": (edited("head.bias", {"dp": "S(1)", "tp": "R"}),
        "PlanError: the plan's layout S(1) of 'head.bias' on dp is not possible\n  why    its shape is [32], it has "
        "no dim 1\n  where  line 1\n  try    S(0) or R"),
    # pins
    "zero: pinned in sections": (pinned({"head.weight": {"dp": "S(0; sections=2)"}}, "dp2"),
        "LayoutError: cannot pin 'head.weight' as S(0; sections=2) on dp\n  why    head.weight: a dim with sections "
        "cannot be sharded over dp\n  try    S(0), S(1) or R"),
    "zero: pinned twice": (pinned({"head.*": {"dp": "S(0)"}, "*.weight": {"dp": "R"}}, "dp2"),
        "LayoutError: these pins conflict: 'head.*' as S(0) on dp; '*.weight' as R on dp\n  why    "
        "head.weight can have only one layout\n  try    leave one of them out"),
    "zero: pinned where tp cuts": (pinned({"head.weight": {"dp": "S(1)", "tp": "S(1)"}}, "dp2,tp2"),
        "LayoutError: these pins conflict: 'head.weight' as S(1) on dp; 'head.weight' as S(1) on tp\n  "
        "why    head.weight: only one axis can shard a dim\n  try    leave one of them out"),
    "zero: a pinned module": (pinned({"head": {"dp": "S(0)"}}, "dp2"),
        "LayoutError: cannot pin the module 'head' as S(0) on dp\n  why    only R fits all its weights and "
        "operators\n  try    pin 'head.weight', 'head.bias', 'head/linear', 'head/add'"),
    "zero: a pinned operator": (pinned({"head/linear": {"dp": "S(0)"}}, "dp2"),
        "OptionError: the pin 'head/linear' as S(0) on dp is impossible\n  why    the placements of an operator on dp "
        "follow from the batch\n  try    R, or a pin for tp"),
}  # fmt: skip

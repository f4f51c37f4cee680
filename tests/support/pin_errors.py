"""The cases of `test_errors.py` about pins: the call, and the exact text it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from zoo import SkipMLP, gpt2, llama, skip_mlp

import autopart

FORM = "'model.layers.*.mlp.down_proj.weight': {'tp': 'S(1)'}, 'stages': {'cut_before': ['model.layers.16']}}"
STAGES = "'stages': {'cut_before': ['model.layers.16'], 'together': [['model.norm', 'lm_head']]}"
LINEAR = "linear at zoo.py:{skip_line}"
H, WTE, FC = "transformer.h.*", "transformer.wte.weight", "transformer.h.0.mlp.c_fc"
TIED = f"{WTE} (tied: one weight with lm_head.weight)"
AS_STORED = "but a weight is used as it is stored, or gathered\n  try    leave one of them out"
UP, DOWN = "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"


def pinned(pins: Any, mesh: str = "tp2", build: Callable[[], Any] = skip_mlp, **options: Any) -> Callable[[], Any]:
    """A case: plan a model under these pins."""

    def case() -> Any:
        model, batch = build()
        return autopart.plan(model, mesh, example_kwargs=batch, pins=pins, **options)

    return case


def narrow() -> tuple[nn.Module, dict]:
    _, batch = skip_mlp()
    return SkipMLP(4, 6).to(batch["x"].dtype), {name: value[:, :6] for name, value in batch.items()}


def of_another_plan() -> Any:
    model, batch = skip_mlp()
    made = autopart.plan(model, "tp2", example_kwargs=batch)
    return autopart.verify(model, "tp2", example_kwargs=batch, plan=made, pins={"head": {"tp": "R"}})


PIN_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # the form
    "pins: no mapping": (pinned([1]),
        f"OptionError: pins=[1] cannot be read\n  why    pins must be a dict or a path, not a list\n  try    "
        f"pins={{{FORM}"),
    "pins: no file": (pinned("nowhere.json"),
        f"OptionError: there is no file of pins at nowhere.json\n  try    a JSON file like {{{FORM}"),
    "pins: no axis": (pinned({"head": "R"}),
        f"OptionError: the pin 'head' names no mesh axis: 'R'\n  try    pins={{{FORM}"),
    "pins: unknown axis": (pinned({"head": {"xp": "R"}}),
        "OptionError: the pin 'head' names an unknown axis 'xp'\n  why    the axes are pp, dpr, dp, cp, ep, tp"),
    "pins: placement": (pinned({"head.weight": {"tp": "column"}}),
        "OptionError: the pin 'head.weight' has the invalid placement 'column'\n  why    'column' is not a placement; "
        "try R, R(grad P), P, S(0) or S(0; sections=3)\n  try    R, or S(d) to shard dim d: S(0) for the weight of a "
        "column-parallel "
        "nn.Linear, S(1) of a row-parallel"),
    "pins: stages": (pinned({"stages": {"before": []}}, "pp2"),
        f"OptionError: pins['stages'] = {{'before': []}} cannot be read\n  why    its keys are 'cut_before' and "
        f"'together'\n  "
        f"try    {STAGES}"),
    "pins: cut_before": (pinned({"stages": {"cut_before": "head"}}, "pp2"),
        f"OptionError: cut_before = 'head' is not a list of names\n  try    {STAGES}"),
    "pins: together": (pinned({"stages": {"together": ["head"]}}, "pp2"),
        f"OptionError: together = ['head'] is not a list of lists of names\n  try    {STAGES}"),
    "pins: mixed *": (pinned({"stages": {"together": [["layers.*", "head"]]}}, "pp2"),
        "OptionError: together 'layers.*', 'head' mixes names with and without *\n  why    each match of * is a "
        "separate pin, so all names of a list need as many *"),
    # the model and the mesh
    "pins: no match": (pinned({"layers.*.wieght": {"tp": "R"}}),
        "OptionError: the pin 'layers.*.wieght' as R on tp matches nothing in the model\n  try    layers.*.weight, "
        "layers.*.bias, layers.*, layers"),
    "pins: no operator": (pinned({"head/liner": {"tp": "R"}}),
        "OptionError: the pin 'head/liner' as R on tp matches nothing in the model\n  try    head/linear, "
        "layers.*/linear, head/add"),
    "pins: no module to cut before": (pinned({"stages": {"cut_before": ["layer.3"]}}, "pp2"),
        "OptionError: the pin cut_before 'layer.3' matches nothing in the model\n  try    layers.*, layers"),
    "pins: mesh": (pinned({"head": {"tp": "R"}}, "pp2"),
        "OptionError: the pin 'head' as R on tp is for an axis that the mesh pp2 lacks\n  try    leave it out, or "
        "mesh='pp2,tp2'"),
    "pins: mesh without stages": (pinned({"stages": {"cut_before": ["head"]}}),
        "OptionError: the pin cut_before 'head' is for an axis that the mesh tp2 lacks: pp\n  try    leave it out, or "
        "mesh='pp2,tp2'"),
    "pins: pp": (pinned({"head.weight": {"pp": "R"}}, "pp2"),
        "OptionError: the pin 'head.weight' as R on pp is impossible\n  why    stages are not layouts\n  try    "
        "'stages': "
        "{'cut_before': [...]}"),
    "pins: does not divide": (pinned({"layers.*.weight": {"tp": "S(1)"}}, "tp4", narrow),
        "LayoutError: cannot pin 'layers.*.weight' as S(1) on tp\n  why    layers.0.weight: dim 1 has "
        "size 6, which cannot be sharded like this over tp=4\n  try    R"),
    "pins: no dim": (pinned({"head.weight": {"tp": "S(2)"}}),
        "LayoutError: cannot pin 'head.weight' as S(2) on tp\n  why    head.weight: its shape is [32, 64], it has no "
        "dim 2\n  try    S(0), S(1) or R"),
    "pins: a stored sum": (pinned({"head.weight": {"tp": "P"}}),
        "LayoutError: cannot pin 'head.weight' as P on tp\n  why    head.weight: a weight is not a "
        "partial sum\n  try    S(0), S(1) or R"),
    "pins: module": (pinned({"head": {"tp": "S(0)"}}),
        "LayoutError: cannot pin the module 'head' as S(0) on tp\n  why    only R fits all its weights and "
        "operators\n  try    pin 'head.weight', 'head.bias', 'head/linear', 'head/add'"),
    "pins: not in the rule": (pinned({"layers.3/linear": {"tp": "S(0)"}}),
        f"LayoutError: cannot pin 'layers.3/linear' as S(0) on tp\n  why    {LINEAR} (layers.3): dim 0 of its "
        "output is the batch, which dp shards\n  try    R | R(grad P) | P | S(1)"),
    "pins: an operator has no dim": (pinned({"head/linear": {"tp": "S(3)"}}),
        "LayoutError: cannot pin 'head/linear' as S(3) on tp\n  why    linear at zoo.py:{skip_head_line} (head): its "
        "output has shape [8, 32], no dim 3\n  try    R | R(grad P) | P | S(1)"),
    "pins: kv heads": (pinned({"model.layers.*.self_attn/transpose#1": {"tp": "S(1)"}}, "tp4", llama),
        "LayoutError: cannot pin 'model.layers.*.self_attn/transpose#1' as S(1) on tp\n  why    transpose at "
        "modeling_llama.py:{key_line} (model.layers.0.self_attn): dim 1 of its output has size 2, which tp=4 does not "
        "divide\n  try    R | R(grad P) | P | S(2) | S(3) | S(3; sections=2)"),
    "pins: not in its rule": (pinned({f"{UP}.weight": {"tp": "S(0)"}, "model.layers.*.mlp/mul": {"tp": "P, P -> P"}},
                                     build=llama),
        "LayoutError: cannot pin 'model.layers.*.mlp/mul' as P, P -> P on tp\n  why    mul at "
        "modeling_llama.py:{gated_line} (model.layers.0.mlp) has no such strategy on tp=2\n  try    R, R -> R | "
        "R(grad P), R(grad P) -> R(grad P) | P, R(grad P) -> P | R(grad P), P -> P | S(1), S(1) -> S(1) | "
        "S(2), S(2) -> S(2)"),
    "pins: sequence parallelism": (
        pinned({f"{H}.ln_2/layer_norm": {"tp": "S(1)"}}, build=gpt2, sequence_parallel=False),
        "LayoutError: this pin is impossible: 'transformer.h.*.ln_2/layer_norm' as S(1) on tp\n  why    layer_norm at "
        "modeling_gpt2.py:{norm_line} (transformer.h.0.ln_2) can have this layout only with sequence parallelism\n  "
        "try    sequence_parallel='auto' or True"),
    "pins: cut at the start": (pinned({"stages": {"cut_before": ["layers.0"]}}, "pp2"),
        f"StageError: cannot cut_before 'layers.0'\n  why    the model begins with it: a stage would be empty\n  where "
        f" {LINEAR} (layers.0)\n  try    begin the stage a few operators later"),
    # pins at odds
    "pins: two layouts": (
        pinned({f"{UP}.weight": {"tp": "S(0)"}, f"{DOWN}.weight": {"tp": "S(0)"}, "model.layers.1": {"tp": "R"}},
               build=llama),
        "LayoutError: these pins conflict: 'model.layers.*.mlp.down_proj.weight' as S(0) on tp; "
        "'model.layers.1' as R on tp\n  why    model.layers.1.mlp.down_proj.weight can have only one layout\n  try    "
        "leave one of them out"),
    "pins: weight and operator": (
        pinned({f"{UP}.weight": {"tp": "S(0)"}, f"{DOWN}.weight": {"tp": "S(0)"}, f"{DOWN}/linear": {
            "tp": "S(2), S(1) -> P"}}, build=llama),
        "LayoutError: these pins conflict: 'model.layers.*.mlp.down_proj.weight' as S(0) on tp; "
        "'model.layers.*.mlp.down_proj/linear' as S(2), S(1) -> P on tp\n  why    linear at "
        "modeling_llama.py:{llama_line} (model.layers.0.mlp.down_proj) then takes "
        "model.layers.0.mlp.down_proj.weight as S(1), but a weight is used as it is stored, or gathered\n  try  "
        "  leave "
        "one of them out"),
    "pins: a tied weight": (pinned({"lm_head.weight": {"tp": "S(1)"}, WTE: {"tp": "S(0)"}}, build=gpt2),
        "LayoutError: these pins conflict: 'lm_head.weight' as S(1) on tp; 'transformer.wte.weight' as "
        f"S(0) on tp\n  why    {TIED} can have only one layout\n  try    leave one of them out"),
    "pins: a tied weight and an operator": (pinned({"lm_head/linear": {"tp": "S(2)"}, WTE: {"tp": "S(1)"}}, build=gpt2),
        "LayoutError: these pins conflict: 'lm_head/linear' as S(2) on tp; 'transformer.wte.weight' as "
        f"S(1) on tp\n  why    linear at modeling_gpt2.py:{{head_line}} (lm_head) then takes {TIED} as S(0), "
        f"{AS_STORED}"),
    "pins: two of one operator": (
        pinned({"model.layers.*.mlp/mul": {"tp": "S(2)"}, "model.layers.1.mlp": {"tp": "R"}, "lm_head": {"tp": "R"}},
               build=llama),
        "LayoutError: these pins conflict: 'model.layers.*.mlp/mul' as S(2) on tp; 'model.layers.1.mlp' as "
        "R on tp\n  why    mul at modeling_llama.py:{gated_line} (model.layers.1.mlp) can have only one layout\n "
        " try    "
        "leave one of them out"),
    "pins: two of six": (
        pinned({"transformer.ln_f": {"tp": "R"}, f"{H}.mlp.c_fc.weight": {"tp": "S(0)"}, WTE: {"tp": "S(0)"},
                f"{H}.mlp.c_proj.weight": {"tp": "S(0)"}, f"{H}.mlp.c_fc/linear": {"tp": "S(2)"},
                "transformer.h.1.attn": {"tp": "R"}}, build=gpt2),
        "LayoutError: these pins conflict: 'transformer.h.*.mlp.c_fc.weight' as S(0) on tp; "
        "'transformer.h.*.mlp.c_fc/linear' as S(2) on tp\n  why    linear at pytorch_utils.py:{conv1d_line} "
        f"({FC}) then takes {FC}.weight, through t, as S(0), {AS_STORED}"),
    "pins: a view of a weight": (
        pinned({f"{H}.mlp.c_fc/t": {"tp": "S(1)"}, f"{H}.mlp.c_fc/linear": {"tp": "S(2)"}}, build=gpt2),
        "LayoutError: these pins conflict: 'transformer.h.*.mlp.c_fc/t' as S(1) on tp; "
        f"'transformer.h.*.mlp.c_fc/linear' as S(2) on tp\n  why    t at pytorch_utils.py:{{conv1d_line}} ({FC}) then "
        f"gives {FC}.weight as S(1), linear at pytorch_utils.py:{{conv1d_line}} ({FC}) then takes {FC}.weight, "
        f"through t, as S(0), {AS_STORED}"),
    "pins: more cuts than stages": (pinned({"stages": {"cut_before": ["layers.2", "layers.3", "layers.4"]}}, "pp3"),
        "StageError: these pins conflict: cut_before 'layers.2'; cut_before 'layers.3'; cut_before "
        "'layers.4'\n  why    they request 3 stage boundaries; 3 stages (pp times virtual_stages) have 2\n  try    "
        "leave one of them out"),
    "pins: a cut within": (
        pinned({"stages": {"cut_before": ["layers.2", "layers.3"], "together": [["layers.2", "layers.5"]]}}, "pp4"),
        "StageError: these pins conflict: cut_before 'layers.3'; together 'layers.2', 'layers.5'\n  why    "
        f"{LINEAR} (layers.3) is between modules that are kept on one stage\n  try    leave one "
        "of them out"),
    "pins: a cut between": (
        pinned({"stages": {"cut_before": ["transformer.h.1"], "together": [["transformer.wte", "lm_head"]]}}, "pp2",
               gpt2),
        "StageError: these pins conflict: cut_before 'transformer.h.1'; together 'transformer.wte', "
        "'lm_head'\n  why    layer_norm at modeling_gpt2.py:{begin_line} (transformer.h.1.ln_1) is between modules "
        "that are kept on one stage\n  try    leave one of them out"),
    "pins: the fewest": (
        pinned({"stages": {"cut_before": ["layers.3", "layers.4", "layers.5"], "together": [["layers.2", "layers.3"]]}},
               "pp3"),
        "StageError: these pins conflict: cut_before 'layers.3'; together 'layers.2', 'layers.3'\n  why    "
        f"{LINEAR} (layers.3) is kept on one stage with the operators before it\n  try    leave one of them out"),
    "pins: all together": (pinned({"stages": {"together": [["layers.0", "head"]]}}, "pp6"),
        "StageError: this pin is impossible: together 'layers.0', 'head'\n  why    operators between modules that are "
        "kept on one stage are on this stage too; possible stage boundaries left: 3, and 6 stages (pp times "
        "virtual_stages) need 5\n  try  "
        "  other modules, or another number of stages"),
    "pins: another plan": (of_another_plan,
        "OptionError: pins= contradict the plan, which was made with none\n  try    leave pins out, edit the plan, or "
        "make a new one"),
}  # fmt: skip

"""Every sharding rule is proven by execution, both ways: what it claims holds, and what holds it claims.

`rule_samples/` has at least one call of every operator in the rule tables. For every strategy of every call, a program
with this one operator cut as the strategy says runs on all ranks; its outputs and the gradients of all its inputs must
be those of the operator on whole inputs. Then every way of sharding the call is tried without asking the rule: what
holds must be claimed, or stand in `NOT_CLAIMED` with its reason.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from rule_samples import (
    NOT_CLAIMED,
    PROGRAMS_WITH_ITSELF,
    SAMPLES,
    TRIED,
    WITH_ITSELF,
    Sample,
    bools,
    call,
    data,
    ints,
    x,
)
from torch import fx

from autopart.compat.torch_internals import tree_map
from autopart.ir.decisions import Strategy
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name, operators, shape, tensor_inputs
from autopart.ir.layout import Placement
from autopart.ir.mesh import Mesh
from autopart.passes.facts.strategies import ANY_KIND, strategies
from autopart.passes.rules.factors import output_shapes
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.tables import RULES
from autopart.proof.comparison import relative
from autopart.proof.rules.check_rule import Proof, backward
from autopart.proof.rules.rule_candidates import candidates

WITH_RULE = {name for name, row in RULES.items() if row.is_for_sharding}
OF_GENERATION = "autopart::update_cache"  # writes to a cache: proven with whole models, test_generate.py
FORMS = [
    pytest.param(name, rule, text, id=f"{name} {text}")
    for name, row in RULES.items()
    if name != OF_GENERATION
    for rule in (row, *row.otherwise)
    if rule.text
    for text in (rule.text, *rule.also)
]


def called(sample: Sample) -> tuple:
    name, _, overload = sample.operator.partition(".")
    namespace, packet = name.split("::") if "::" in name else ("aten", name)
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return operator, sample.args, sample.kwargs


def proof_of(sample: Sample) -> Proof:
    return Proof.of(*called(sample))


PROOFS: dict[int, Proof] = {}


def known_proof(sample: Sample) -> Proof:
    """That of one of `SAMPLES`, made once: to be read and checked, never written to."""
    if id(sample) not in PROOFS:
        PROOFS[id(sample)] = proof_of(sample)
    return PROOFS[id(sample)]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_normal_form_computes_what_the_operator_computes(sample):
    proof = known_proof(sample)
    target, args, kwargs = called(sample)
    leaves: list[torch.Tensor] = []

    def fresh(argument):
        if isinstance(argument, torch.Tensor):
            leaves.append(argument.detach().clone().requires_grad_(argument.requires_grad))
            return leaves[-1]
        return argument

    made = target(*tree_map(fresh, args), **tree_map(fresh, kwargs))
    outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    backward(outputs)
    pairs = [(f"output {i}", *both) for i, both in enumerate(zip(proof.outputs, outputs, strict=True))]
    own = {f"p{i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
    pairs += [(f"gradient {n}", proof.grads.get(n, torch.zeros_like(grad)), grad) for n, grad in own.items()]
    wrong = [f"{name} by {relative(a, b):.2g}" for name, a, b in pairs if relative(a, b) > 1e-12]
    assert not wrong, f"{sample} as {proof.nodes}: {', '.join(wrong)}"


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.whole), 3])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_strategy_computes_what_the_operator_computes(sample, num_ranks):
    proof = known_proof(sample)
    wrong = []
    for node in proof.nodes:
        for strategy in strategies(node, num_ranks, ANY_KIND):
            error = proof.error(Mesh({"tp": num_ranks}), {"tp": {node: strategy}})
            wrong += [f"{operator_name(node)} as {strategy}: {error}"] * bool(error)
    assert not wrong, "\n".join([str(sample), *wrong])


# --- one tensor as several operands ----------------------------------------------------------------------------------


@cache
def proof_with_itself(number: int) -> Proof:
    return proof_of(WITH_ITSELF[number])


def repeats_an_operand(node: fx.Node) -> bool:
    return len(set(tensor_inputs(node))) < len(tensor_inputs(node))


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.whole), 3])
@pytest.mark.parametrize("number", range(len(WITH_ITSELF)), ids=lambda number: str(WITH_ITSELF[number]))
def test_one_tensor_may_be_several_operands(number, num_ranks):
    """A strategy converts the tensor to a placement per operand: `searchsorted(v, v)` needs v sharded and whole."""
    proof = proof_with_itself(number)
    wrong = []
    for node in filter(repeats_an_operand, proof.nodes):
        for strategy in strategies(node, num_ranks, ANY_KIND):
            error = proof.error(Mesh({"tp": num_ranks}), {"tp": {node: strategy}})
            wrong += [f"{operator_name(node)} as {strategy}: {error}"] * bool(error)
    assert not wrong, "\n".join([str(WITH_ITSELF[number]), *wrong])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sample", PROGRAMS_WITH_ITSELF, ids=str)
def test_a_value_may_meet_a_function_of_itself(sample, num_ranks):
    proof = proof_of(sample)
    assert len(proof.nodes) > 1
    wrong = []
    for node in proof.nodes:
        for strategy in strategies(node, num_ranks, ANY_KIND):
            error = proof.error(Mesh({"tp": num_ranks}), {"tp": {node: strategy}})
            wrong += [f"{operator_name(node)} as {strategy}: {error}"] * bool(error)
    assert not wrong, "\n".join([str(sample), *wrong])


OTHER_OPERANDS = {
    "aten::_sparse_mm": "one operand is sparse",
    "aten::nll_loss_nd": "labels are integers",
    "aten::select_scatter": "one operand lacks a dim",
    "autopart::expert_linear": "operands have 1, 2 and 3 dims",
}
"""{operator with several operands: why one tensor cannot be two of them}."""


def test_every_rule_of_several_operands_has_a_sample_with_one_tensor():
    several = {name for name, nodes in nodes_of_samples().items() if any(len(tensor_inputs(n)) > 1 for n in nodes)}
    proofs = map(proof_with_itself, range(len(WITH_ITSELF)))
    proven = {operator_name(node) for proof in proofs for node in proof.nodes if repeats_an_operand(node)}
    assert several - proven == OTHER_OPERANDS.keys()


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_two_axes_may_cut_two_factors(sample):
    """An operator cut on one axis may be cut on another one by what the same rule says: a rule mentions no mesh."""
    proof = known_proof(sample)
    wrong = []
    for node in proof.nodes:
        found = [s for s in strategies(node, 2, ANY_KIND) if s.factor and "+" not in str(s)]
        for dp, tp in itertools.permutations(found, 2):
            if dp.factor != tp.factor:
                error = proof.error(Mesh({"dp": 2, "tp": 2}), {"dp": {node: dp}, "tp": {node: tp}})
                wrong += [f"{operator_name(node)} as {dp} on dp and {tp} on tp: {error}"] * bool(error)
    assert not wrong, "\n".join([str(sample), *wrong])


@cache
def nodes_of_samples() -> dict[str, list[fx.Node]]:
    """By operator: those of the samples' normal forms that have a rule."""
    found = defaultdict(list)
    for sample in SAMPLES:
        for node in operators(known_proof(sample).trace.graph):
            if facts(node)["pattern"] is not None:
                found[operator_name(node)].append(node)
    return found


def test_every_rule_has_a_sample():
    proven = nodes_of_samples().keys()
    of_models = {"autopart::positions"}  # of unequal shards: proven with whole models, test_counted.py
    assert WITH_RULE - proven == of_models | {OF_GENERATION}, (
        "no call of the samples uses these rules: add one, or remove the rule"
    )


@pytest.mark.parametrize(("name", "rule", "text"), FORMS)
def test_every_form_of_a_rule_has_a_sample(name, rule, text):
    nodes = nodes_of_samples()[name]
    form = replace(rule, text=text, also=())
    fitted = [form.instantiate([shape(i) for i in tensor_inputs(n)], output_shapes(n)) for n in nodes if rule.when(n)]
    patterns = [facts(n)["pattern"] for n in nodes]
    assert any(pattern is not None and pattern in patterns for pattern in fitted)


WITHOUT_A_RULE = [
    call("embedding", x(12, 4), ints(6), -1, True),
    call("scatter_reduce.two", data(6, 4), 1, ints(2, 2, below=4), data(6, 4), "sum"),
    call("masked_scatter", x(6, 4), bools(6, 4), x(24)),
    call("linalg_inv_ex", x(4, 4)),
]


@pytest.mark.parametrize("sample", WITHOUT_A_RULE, ids=str)
def test_what_has_no_rule_runs_replicated(sample):
    """Calls that no line of the tables was written for. Where a rule is added, its sample moves to SAMPLES."""
    node = next(n for n in proof_of(sample).nodes if facts(n)["pattern"] is None)
    assert not any(s.is_sharded for s in strategies(node, 2, ANY_KIND))


# --- what holds is claimed -----------------------------------------------------------------------------------------


def unclaimed(sample: Sample) -> list[tuple[str, str]]:
    """(operator, sharding) of what holds for a call and its rule does not claim."""
    found = []
    for node in known_proof(sample).nodes:
        claimed = strategies(node, 2, ANY_KIND)
        found += [(operator_name(node), str(c)) for c in candidates(node) if not c.is_claimed_by(claimed)]
    return found


def reasons(name: str, sharding: str) -> list[tuple[str, str]]:
    """The entries of `NOT_CLAIMED` that speak of this sharding."""
    return [(name, pattern) for pattern in NOT_CLAIMED.get(name, {}) if fnmatchcase(sharding, pattern)]


@pytest.mark.parametrize("sample", TRIED, ids=str)
def test_what_holds_is_claimed(sample):
    missing = [f"{name} holds as {sharding}" for name, sharding in unclaimed(sample) if not reasons(name, sharding)]
    assert not missing, "\n".join([str(sample), *missing, "add it to the rule, or to NOT_CLAIMED with its reason"])


@pytest.mark.large
def test_every_reason_is_needed():
    """`NOT_CLAIMED` has no entry left over from a rule that has learned to claim it."""
    told = {(name, pattern) for name, patterns in NOT_CLAIMED.items() for pattern in patterns}
    used = {entry for sample in TRIED if any(operator_name(n) in NOT_CLAIMED for n in proof_of(sample).nodes)
            for found in unclaimed(sample) for entry in reasons(*found)}  # fmt: skip
    assert told == used


# --- the proof itself can fail -------------------------------------------------------------------------------------

R_, S0, S1, P_, G = (Placement.parse(text) for text in ("R", "S(0)", "S(1)", "P", "R(grad P)"))
PLANTED = {
    "a sum claimed whole": (call("linear", x(6, 4), x(12, 4)), Strategy((S1, S1), (R_,)), "output 0"),
    "a gradient claimed whole": (call("linear", x(6, 4), x(12, 4)), Strategy((R_, S0), (S1,)), "gradient of p0"),
    "a whole value claimed a sum": (call("tanh", x(6, 4)), Strategy((R_,), (P_,)), "output 0"),
    "a sum through what is not linear": (call("tanh", x(6, 4)), Strategy((P_,), (P_,)), "output 0"),
    "a dim that must be whole": (call("softmax.int", x(6, 4), -1), Strategy((S1,), (S1,)), "output 0"),
    "both factors of a product": (call("mul.Tensor", x(6, 4), x(6, 4)), Strategy((P_, P_), (P_,)), "output 0"),
    "a gradient claimed a sum": (call("tanh", x(6, 4)), Strategy((G,), (R_,)), "gradient of p0"),
    "another dim": (call("reshape", x(6, 4), [6, 2, 2]), Strategy((S1,), (Placement("S", 2),)), "output 0"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_wrong_strategy_is_found(plant):
    sample, strategy, expected = PLANTED[plant]
    proof = proof_of(sample)
    (node,) = proof.nodes
    error = proof.error(Mesh({"tp": 2}), {"tp": {node: strategy}})
    assert expected in error or "Error" in error


def test_a_rule_that_claims_too_little_is_found():
    """Rules of which something is taken away: what they no longer say is found by trying."""
    for sample, line, missing in (
        (call("linear", x(6, 4), x(12, 4)), Rule("... k, n k -> ... n", whole="k"), {"S(1), S(1) -> P"}),
        (call("linear", x(6, 4), x(12, 4)), Rule("... k, n k -> ... n", whole="n"), {"R, S(0) -> S(1)"}),
        (call("tanh", x(6, 4)), Rule("a b -> a b", whole="a b"), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        (call("reshape", x(4, 6), [24]), Rule("a b -> c", whole="a b c"), {"S(0) -> S(0) with other arguments"}),
        (call("neg", x(6, 4)), Rule("... -> ..."), {"P -> P"}),
    ):
        (node,) = proof_of(sample).nodes
        facts(node)["pattern"] = line.instantiate([shape(n) for n in tensor_inputs(node)], [shape(node)])
        claimed = strategies(node, 2, ANY_KIND)
        found = {str(c).replace("R(grad P)", "R") for c in candidates(node) if not c.is_claimed_by(claimed)}
        assert missing <= found, (sample, found)

"""Operators that autopart has no rule for: run whole and exactly, listed in the plan, sharded once a user says how."""

from __future__ import annotations

import pytest
import torch
from custom_ops import F64, CustomModel, custom_model
from dist import run_ranks
from torch import nn
from torch.utils.flop_counter import flop_registry

import autopart
from autopart.cli.main import main
from autopart.errors import PlanError, RuleError, StageError
from autopart.passes.rules.registered_rules import REGISTERED, as_data, call_text, from_data

MATMUL, SUMS = "autopart_test::scaled_mm", "autopart_test::running_sums"
LINE = {"lines": ("... h, h o -> ... o",), "sum": "h", "flops": "... h o"}
MESHES = ("tp2", "dp2", "pp2", "pp2,dp2,tp2")


@pytest.fixture(autouse=True)
def _own_rules():
    """Rules that a test registers are its own."""
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def register() -> None:
    autopart.rule(MATMUL, *LINE["lines"], sum=LINE["sum"], flops=LINE["flops"])


def operands(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.rand(shape, dtype=F64) for shape in shapes]


# --- without a rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mixes", [False, True])
def test_an_operator_without_a_rule_runs_whole_and_exactly(mesh, mixes):
    model, batch = custom_model(mixes)
    result = autopart.verify(model, mesh, example_kwargs=batch)
    assert result.ok, str(result)
    assert result.max_error < 1e-12


def test_microbatches_fall_back_to_one_and_are_refused_when_asked_for():
    model, batch = custom_model(mixes=True)
    made = autopart.plan(model, "pp2", example_kwargs=batch)
    assert (made.schedule.name, made.schedule.microbatches) == ("1f1b", 1)
    with pytest.raises(StageError, match="it has no sharding rule"):
        autopart.plan(model, "pp2", example_kwargs=batch, microbatches=2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(4, 6), kind(6, 6, 2, batch_first=True), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(self.inner(self.into(x))[0]).square().mean()


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_exact(kind, mesh):
    """Lists of weights in, several tensors out."""
    model, batch = Recurrent(kind).double(), {"x": torch.randn(4, 3, 4, dtype=F64)}
    assert autopart.verify(model, mesh, example_kwargs=batch).ok


# --- what the plan says of it --------------------------------------------------------------------------------------


def test_the_plan_lists_what_runs_whole():
    model, batch = custom_model(mixes=True)
    made = autopart.plan(model, "dp2,tp2", example_kwargs=batch)
    assert [(row["operator"], row["count"], row["why"]) for row in made.unsharded] == [
        (MATMUL, 1, "it has no sharding rule"), (SUMS, 1, "it has no sharding rule"),
    ]  # fmt: skip
    matmul, sums = made.unsharded
    assert matmul["shapes"] == "f64[8,3,16], f64[16,8] -> f64[8,3,8]"
    assert matmul["bytes"] == 8 * (8 * 3 * 16 + 16 * 8 + 8 * 3 * 8)
    # dp: rows of its first input are gathered, and the gradient scattered: (2 - 1) / 2 of 3072 bytes, twice
    assert matmul["moved_bytes"] >= 3072
    assert matmul["try"] == f'autopart.rule("{MATMUL}", "b a c, c d -> b a d", sum="c")'
    assert sums["try"] == f'autopart.rule("{SUMS}", "b a c, b a c -> b a c, b a c, b a c")'
    assert autopart.Plan.from_json(made.to_json()) == made
    assert autopart.plan(model, "tp1", example_kwargs=batch).unsharded == ()


def test_the_line_to_try_is_accepted_and_proven():
    model, batch = custom_model()
    (row,) = autopart.plan(model, "tp2", example_kwargs=batch).unsharded
    exec(row["try"])
    assert autopart.check_rule(MATMUL, *operands((2, 6, 12), (12, 24))).ok
    assert autopart.plan(model, "tp2", example_kwargs=batch).unsharded == ()


def test_explain_shows_it(tmp_path, capsys):
    model, batch = custom_model(mixes=True)
    made = autopart.plan(model, "tp2", example_kwargs=batch)
    text = str(made.explain())
    assert "operators that run in full on every rank" in text
    assert f"1 {SUMS}: it has no sharding rule" in text
    assert f"try {made.unsharded[0]['try']}" in text
    made.save(tmp_path / "plan.json")
    main(["explain", str(tmp_path / "plan.json")], standalone_mode=False)
    assert f"1 {SUMS}: it has no sharding rule" in capsys.readouterr().out


def test_repeated_blocks_are_counted_together():
    model = nn.Sequential(*(CustomModelBlock() for _ in range(3))).double()
    made = autopart.plan(model, "tp2", example_kwargs={"input": torch.randn(8, 8, dtype=F64)})
    assert [(row["operator"], row["where"], row["count"]) for row in made.unsharded] == [(MATMUL, "*", 3)]


class CustomModelBlock(CustomModel):
    def forward(self, x):
        return torch.ops.autopart_test.scaled_mm(self.up(x), self.down)


def test_torch_counts_the_flops_it_knows(monkeypatch):
    """A formula of torch's counter, as `torch.utils.flop_counter.register_flop_formula` adds one."""
    monkeypatch.setitem(flop_registry, torch.ops.autopart_test.scaled_mm, lambda x, weight, **kwargs: 1000 * x.shape[0])
    model, batch = custom_model()
    (row,) = autopart.plan(model, "tp2", example_kwargs=batch).unsharded
    assert row["flops"] == 8000


def test_matrix_work_that_tp_cannot_divide_is_listed():
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.odd = nn.Linear(8, 8), nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return self.odd(self.first(x)[..., :3]).square().mean()

    made = autopart.plan(Uneven().double(), "tp2", example_kwargs={"x": torch.randn(8, 8, dtype=F64)})
    (row,) = made.unsharded
    assert (row["operator"], row["where"], row["why"]) == ("aten::linear", "odd", "tp=2 divides none of n=3, k=3")
    assert row["flops"] == 2 * 8 * 3 * 3
    assert row["try"] == "a size that 2 divides: n=4 or k=4"
    assert "autopart.check_rule" not in made.explain()


# --- with a rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
def test_a_registered_rule_shards_the_operator(mesh):
    register()
    model, batch = custom_model()
    made = autopart.plan(model, mesh, example_kwargs=batch)
    assert made.unsharded == ()
    if "tp" in mesh:
        assert made.operators["/scaled_mm"] == {"tp": "S(2), S(0) -> P"}  # row-parallel after a column-parallel layer
        assert made.parameters["down"] == {"tp": "S(0)"}
    if "pp" in mesh:
        assert made.schedule.microbatches > 1
    result = autopart.verify(model, mesh, example_kwargs=batch)
    assert result.ok and result.max_error < 1e-12, str(result)


def step_on_ranks(mesh: str, with_rule: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and all gradients of a training step, on this rank."""
    torch.manual_seed(0)
    model, batch = custom_model(mixes=not with_rule)
    if with_rule:
        register()
    try:
        module = autopart.parallelize(model, mesh, example_kwargs=batch)
        loss = module.step(**batch).item()
        return loss, {name: grad.clone() for name, grad in module.full_grads().items()}
    finally:
        REGISTERED.clear()


@pytest.mark.parametrize("with_rule", [True, False])
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_a_training_step_on_processes_is_the_models_own(mesh, with_rule):
    torch.manual_seed(0)
    model, batch = custom_model(mixes=not with_rule)
    expected = model(**batch)
    expected.backward()
    for loss, grads in run_ranks(step_on_ranks, 2, mesh, with_rule):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_registered_rule_counts_its_flops():
    model, batch = custom_model()
    before = autopart.plan(model, "tp2", example_kwargs=batch).cost["forward_flops"]
    register()
    after = autopart.plan(model, "tp2", example_kwargs=batch).cost["forward_flops"]
    assert after - before == 2 * 8 * 3 * 16 * 8 - 8 * 3 * 8  # in place of one for each entry of the output


def test_a_wrong_rule_is_found_by_verify():
    autopart.rule(SUMS, "b ..., b ... -> b ..., b ..., b ...")
    model, batch = custom_model(mixes=True)
    assert not autopart.verify(model, "dp2", example_kwargs=batch).ok


@pytest.mark.large
def test_a_plan_names_the_rules_it_needs():
    register()
    model, batch = custom_model()
    made = autopart.Plan.from_json(autopart.plan(model, "tp2", example_kwargs=batch).to_json())
    assert made.rules == {MATMUL: {"lines": ["... h, h o -> ... o"], "flops": ["... h o"]}}
    assert autopart.verify(model, "tp2", example_kwargs=batch, plan=made).ok
    REGISTERED.clear()
    with pytest.raises(PlanError, match="that this process does not have"):
        autopart.verify(model, "tp2", example_kwargs=batch, plan=made)
    autopart.rule(MATMUL, "... h, h o -> ... o", sum="h")
    with pytest.raises(PlanError, match=r"it has autopart\.rule"):
        autopart.verify(model, "tp2", example_kwargs=batch, plan=made)


def test_the_same_rule_may_be_registered_again():
    register()
    register()
    with pytest.raises(RuleError, match="another rule already"):
        autopart.rule(MATMUL, "h, h -> ", sum="h")


def test_rules_print_and_read_as_they_were_registered():
    autopart.rule(
        MATMUL, "a k, k b -> a b", "... k, k b -> ... b", sum="k", whole="b", linear=[[0], [1]], flops="a k b"
    )
    made = REGISTERED[MATMUL]
    assert from_data(as_data(made)) == made
    text = call_text(MATMUL, made)
    REGISTERED.clear()
    exec(text)
    assert {MATMUL: made} == REGISTERED


# --- proof ---------------------------------------------------------------------------------------------------------


def test_check_rule_proves_both_ways():
    register()
    found = autopart.check_rule(MATMUL, *operands((6, 12), (12, 24)))
    assert found.ok
    assert {"S(0), R(grad P) -> S(0)", "R(grad P), S(1) -> S(1)", "S(1), S(0) -> P"} <= set(found.right)
    assert found.missing == ("R(grad P), P -> P", "P, R(grad P) -> P")
    assert str(found).startswith(f"{MATMUL}: {len(found.right)} right, 0 wrong, 2 missing\n  right    ")


def test_check_rule_finds_a_wrong_claim():
    autopart.rule(SUMS, "b c, b c -> b c, b c, b c")
    found = autopart.check_rule(SUMS, operands((6, 12), (6, 12)), 3)
    assert not found.ok
    assert [text.split(":")[0] for text in found.wrong if "sections" not in text] == ["S(0), S(0) -> S(0), S(0), S(0)"]
    assert "S(1), S(1) -> S(1), S(1), S(1)" in found.right


def test_check_rule_tells_what_a_rule_could_say():
    assert not autopart.check_rule(MATMUL, *operands((6, 12), (12, 24))).wrong
    found = autopart.check_rule(SUMS, operands((6, 12), (6, 12)), 3)
    assert found.missing == ("S(1), S(1) -> S(1), S(1), S(1)", "P, P -> P, P, P")

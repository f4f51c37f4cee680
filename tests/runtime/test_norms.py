"""The norm of a partitioned model's gradients, and clipping by it, are one device's on every mesh and every rank."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm  # before autopart, on purpose

import autopart
from autopart.errors import AutopartError, InputError, OptionError
from autopart.ir.mesh import Mesh
from autopart.passes.choose.plan_codec import decode
from autopart.passes.write.lower import lower
from autopart.recipe.make_plan import prepare
from autopart.runtime.comm.stage_ranks import stages_at
from autopart.runtime.shards.shard_state import shard_parameters
from autopart.runtime.training import gradient_norms
from autopart.tracing.trace_model import bind_call

TIMEOUT_S = 180.0
NORM_TYPES = (2.0, 1.0, math.inf, 3.0, -math.inf, -1.0)
MESHES = [("tp2", 0), ("pp2", 0), ("dp2", 0), ("dp2", 3), ("pp2,tp2", 0)]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-10, atol=1e-10)


def on_ranks(fn: Callable[..., Any], mesh: str, *args: Any) -> list[Any]:
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, mesh, *args, timeout_s=TIMEOUT_S)


def trained() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with a weight that two stages share, its gradients, and the batch they are of."""
    model, batch = zoo.gpt2(num_layers=1, hidden=16, heads=2, vocab=32, rows=4, seq=6)
    model(**batch).loss.backward()
    return model, batch


def partitioned(model: nn.Module, batch: dict[str, Tensor], mesh: str, zero: int = 0) -> autopart.ParallelModule:
    """`model` on a mesh, with the gradients of a step."""
    fresh = copy.deepcopy(model)
    fresh.zero_grad()
    pm = autopart.parallelize(fresh, mesh, example_kwargs=batch, **({"zero": zero} if zero else {}))
    pm.step(**batch)
    return pm


def with_grad(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


# --- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norms_of_parts_make_up_the_norm(norm_type):
    grads = [torch.randn(size, dtype=torch.float64) for size in (3, 40, 0, 7)]
    parts = [grads[:1], [], grads[1:]]
    found = gradient_norms.norm_of([gradient_norms.local_norm(part, norm_type).item() for part in parts], norm_type)
    close(found, torch.linalg.vector_norm(torch.cat(grads), norm_type).item())


def test_a_norm_that_is_not_finite_stays_so():
    assert math.isnan(gradient_norms.norm_of([1.0, math.nan, math.inf]))
    assert gradient_norms.norm_of([1.0, math.inf]) == math.inf and gradient_norms.norm_of([]) == 0.0
    assert math.isnan(gradient_norms.norm_of([math.nan, 1.0], math.inf))
    assert gradient_norms.norm_of([3e200, 4e200], 3.0) < math.inf  # 3e200 to the third power is not a float


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float16, torch.float32), (torch.complex64,)])
def test_a_norm_has_the_dtype_that_torch_gives(dtypes):
    grads = [torch.randn(9).to(dtype) for dtype in dtypes]
    expected = get_total_norm(grads)
    assert gradient_norms.norm_dtype(grad.dtype for grad in grads) == expected.dtype
    exact = torch.cat([grad.flatten().abs().double() for grad in grads]).norm()
    torch.testing.assert_close(
        gradient_norms.local_norm(grads), exact, rtol=1e-6, atol=0.0
    )  # halves are not summed as halves


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "zero", "schedule"), [
    ("tp4", 0, None), ("dp4", 0, None), ("dp4", 3, None), ("pp4", 0, None), ("pp2", 0, "zbv"),
    ("dp2,pp2,tp2", 0, None), ("dp2,pp2,tp2", 3, None), ("tp3", 0, None),
])  # fmt: skip
def test_norms_in_lockstep_are_one_devices(mesh, zero, schedule):
    """The gradients of all ranks are the model's own, cut as the ranks store them."""
    model, batch = zoo.gpt2(num_layers=4, hidden=16, heads=2, vocab=32, rows=8, seq=6)
    model(**batch).loss.backward()
    sizes = Mesh.parse(mesh)
    options = {"zero": zero, "schedule": schedule} if sizes.size("pp") > 1 else {"zero": zero}
    plan = autopart.plan(model, sizes, example_kwargs=batch, **options)
    trace = prepare(model, bind_call(model, (), batch))
    program = lower(trace, decode(trace, plan, sizes), [trace.graph.output_node().args[0][0]], whole_outputs=False)
    stage_style = "V" if schedule == "zbv" else "loop"
    of_grads = copy.deepcopy(model)
    for copied, parameter in zip(of_grads.parameters(), model.parameters(), strict=True):
        copied.data = parameter.grad
    ranks = {}
    for rank in range(sizes.num_ranks):
        coordinates = sizes.coordinates(rank)
        stages = stages_at(program, coordinates.get("pp", 0), stage_style)
        ranks[rank] = shard_parameters(of_grads, program, coordinates, stages=stages)
        for parameter in ranks[rank].values():
            parameter.grad = parameter.detach()
    for norm_type in NORM_TYPES:
        found = gradient_norms.grad_norm_lockstep(ranks, program, norm_type, stage_style)
        close(found, get_total_norm(with_grad(model), norm_type))


# --- on processes ----------------------------------------------------------------------------------------------------


def norms_and_clipping(mesh: str, zero: int) -> list[float]:
    """Every way to ask for a norm, and every way to clip, gives one device's; the bits that this rank found."""
    model, batch = trained()
    pm = partitioned(model, batch, mesh, zero)
    found = []
    for norm_type in NORM_TYPES:
        expected = get_total_norm(with_grad(model), norm_type)
        detached = (grad.detach() for grad in with_grad(pm))
        of_torch = [get_total_norm(with_grad(pm), norm_type), get_total_norm(detached, norm_type, foreach=False)]
        for norm in (pm.grad_norm(norm_type), *of_torch):
            close(norm, expected)
            assert norm.dtype == expected.dtype and norm.shape == () and not norm.requires_grad
            found.append(norm.item())
    close(get_total_norm(pm.parameters()), get_total_norm(model.parameters()))  # of the weights themselves
    before = {name: parameter.grad.clone() for name, parameter in pm.named_parameters() if parameter.grad is not None}
    for clip in (by_method, by_torch, by_torch_in_two):
        own = copy.deepcopy(model)
        for copied, parameter in zip(own.parameters(), model.parameters(), strict=True):
            copied.grad = parameter.grad.clone()
        for name, parameter in pm.named_parameters():
            if name in before:
                parameter.grad.copy_(before[name])
        expected = clip_grad_norm_(own.parameters(), 0.1, foreach=False)
        norm = clip(pm)
        close(norm, expected)
        zoo.assert_same_grads(pm.full_grads(), {name: p.grad for name, p in own.named_parameters()})
        found.append(norm.item())
    return found


def by_method(pm: autopart.ParallelModule) -> Tensor:
    return pm.clip_grad_norm_(0.1)


def by_torch(pm: autopart.ParallelModule) -> Tensor:
    return clip_grad_norm_(pm.parameters(), max_norm=0.1, norm_type=2, error_if_nonfinite=True)


def by_torch_in_two(pm: autopart.ParallelModule) -> Tensor:
    norm = get_total_norm([parameter.grad for parameter in pm.parameters() if parameter.grad is not None])
    clip_grads_with_norm_(pm.parameters(), 0.1, norm)
    return norm


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_norms_and_clipping_are_one_devices(mesh, zero):
    found = on_ranks(norms_and_clipping, mesh, zero)
    assert all(bits == found[0] for bits in found), "the ranks have other bits"


def clipped_training(mesh: str) -> dict[str, Tensor]:
    """20 steps that are all clipped end where one device ends; this rank's weights that are whole."""
    model, batch = trained()
    pm = partitioned(model, batch, mesh)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (model, pm)]
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(**batch).loss.backward()
        pm.step(**batch)
        assert clip_grad_norm_(model.parameters(), 0.05) > 0.05
        clip_grad_norm_(pm.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
    found = pm.full_state_dict()
    for name, value in model.state_dict().items():
        close(found[name], value)
    return {name: p.detach() for name, p in pm.named_parameters() if type(p) is nn.Parameter}


@pytest.mark.large
def test_replicas_do_not_drift_under_clipping():
    first, second = on_ranks(clipped_training, "tp2")
    assert first and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Ends(nn.Module):
    """A model whose second half has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        for _ in range(6):
            x = torch.tanh(torch.sin(x) @ x.transpose(0, 1) @ x)
        return x.square().mean()


def lists_of_all_kinds(mesh: str) -> dict[str, Any]:
    model, x = Ends(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model(x).backward()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_args=(x,))
    assert pm.grad_norm() == 0.0 == get_total_norm(with_grad(pm)), "there is no gradient yet"
    pm.step(x)
    close(clip_grad_norm_(pm.parameters(), 1e9), get_total_norm(with_grad(model)))
    close(get_total_norm(with_grad(pm)), get_total_norm(with_grad(model)))

    head = nn.Linear(3, 3).double()  # the user's own, alike on every rank
    assert clip_grad_norm_(head.parameters(), 1.0) == 0.0 == get_total_norm([torch.zeros(3)])
    for parameter in head.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    both = [*pm.parameters(), *head.parameters()]
    close(clip_grad_norm_(both, 1e9), get_total_norm(with_grad(model) + with_grad(head)))
    close(clip_grad_norm_(head.parameters(), 1e9), get_total_norm(with_grad(head)))

    expected = dict(model.named_parameters())
    for name, parameter in pm.named_parameters():  # one at a time: other ones on other stages
        norm = clip_grad_norm_(parameter, 1e9)
        close(norm, expected[name].grad.norm() if name in expected else torch.tensor(0.0))
    held = {name: parameter.numel() for name, parameter in pm.named_parameters()}
    for name, parameter in pm.named_parameters():
        if name == "second.weight":
            parameter.grad[0, 0] = math.inf
    failed = raised(lambda: pm.clip_grad_norm_(1.0, error_if_nonfinite=True))
    assert failed == raised(lambda: clip_grad_norm_(pm.parameters(), 1.0, error_if_nonfinite=True))
    return {"held": held, "failed": failed}


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as failure:
        call()
    return str(failure.value)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["pp2", "tp2"])
def test_every_list_of_parameters_is_understood(mesh):
    found = on_ranks(lists_of_all_kinds, mesh)
    assert {rank["failed"] for rank in found} == {found[0]["failed"]}, "one rank raises, another does not"
    assert "the norm of the gradients is inf: not finite" in found[0]["failed"]
    if mesh == "pp2":
        assert found[1]["held"] == {"no_parameters_here": 0}, "the case that this test is for"


def lists_that_do_not_fit(mesh: str) -> list[str]:
    model, batch = zoo.skip_mlp(num_layers=2, hidden=8)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch)
    pm.step(**batch)
    parameters = list(pm.parameters())
    rank = torch.distributed.get_rank()
    calls: list[Callable[[], Any]] = [lambda: pm.grad_norm(0), lambda: clip_grad_norm_(parameters, 1.0, 0)]
    if mesh == "pp2":
        calls.append(lambda: clip_grad_norm_(parameters[:1], 1.0))
    else:
        calls.append(lambda: get_total_norm([p.grad for p in parameters[rank:]]))
    texts = []
    for call in calls:
        with pytest.raises(AutopartError) as failure:
            call()
        texts.append(str(failure.value))
    return texts


def test_lists_that_do_not_fit_are_refused_on_every_rank():
    for mesh, last in (
        ("pp2", "single parameter, each rank of a different one"),
        ("tp2", "norm of different parameters"),
    ):
        found = on_ranks(lists_that_do_not_fit, mesh)
        assert found[0] == found[1]
        assert (
            "norm_type=0 is not supported on a mesh" in found[0][0]
            and found[0][0] == found[0][1]
            and last in found[0][2]
        )


def test_torchs_functions_keep_their_signatures_and_their_answers():
    gradient_norms.patch_gradient_norms()
    assert list(inspect.signature(clip_grad_norm_).parameters)[:3] == ["parameters", "max_norm", "norm_type"]
    assert list(inspect.signature(get_total_norm).parameters)[:2] == ["tensors", "norm_type"]
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_(parameter, 1.0) == 4.0 and clip_grad_norm_([], 1.0) == 0.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))
    assert issubclass(InputError, ValueError) and issubclass(OptionError, AutopartError)

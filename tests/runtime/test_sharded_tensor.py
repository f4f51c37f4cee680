"""Every method of a tensor, called on a parameter that is a shard: as on the full tensor, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import UsageError
from autopart.runtime.sharded_tensor.sharded_tensor import ShardedParameter, ShardedTensor
from autopart.runtime.sharded_tensor.tensor_functions import REFUSED

TIMEOUT_S = 240.0
MESHES = [("tp2", 0), ("pp2", 0), ("dp2", 3)]


def models() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return copy.deepcopy(model), model, torch.randn(8, 6).double(), torch.arange(8) % 4


def partitioned(mesh: str, zero: int) -> tuple[nn.Module, autopart.ParallelModule, Tensor, Tensor]:
    plain, model, x, y = models()
    pm = autopart.parallelize(model, mesh, example_kwargs={"input": x}, **({"zero": zero} if zero else {}))
    return plain, pm, x, y


def full(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.full_tensor().detach()
    if isinstance(value, (list, tuple)):
        return [full(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(expected, Tensor):
        is_tensor = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
        return is_tensor and torch.allclose(found, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
    try:
        return bool(found == expected) or found != found or type(found) is type(expected)
    except (RuntimeError, ValueError):
        return type(found) is type(expected)


def calls(weight: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Methods of Tensor with arguments that fit some of them."""
    other = torch.linspace(0.1, 0.9, weight.numel(), dtype=weight.dtype).view(weight.shape)
    index = torch.tensor([0, 2])
    arguments = [(), (0,), (1,), (-1,), (2.5,), (other,), (other > 0.5,), (0, index), (0, index, 0.5), (0, 1),
                 (other > 0.5, 0.5), (2, -1), (other, 0.5), (other, other), (-1, True), (weight.shape,),
                 (torch.float32,), (other[0],), (other[:, :1],), (other.T,), (0, 0)]  # fmt: skip
    skipped = {"apply_", "map_", "map2_", "backward", "register_hook", "register_post_accumulate_grad_hook", "cuda",
               "share_memory_", "pin_memory", "is_pinned", "to_mkldnn", "ipu", "xpu", "hpu", "mtia", "module_load",
               "record_stream", "reinforce", "requires_grad_", "retain_grad", "set_", "to_sparse_csc", "__dlpack__",
               "solve", "symeig", "eig", "lstsq", "storage", "untyped_storage", "detach_", "empty_like",
               "new", "new_empty"}  # fmt: skip
    dunders = ["__getitem__", "__len__", "__add__", "__radd__", "__rsub__", "__iadd__", "__rtruediv__", "__pow__",
               "__rpow__", "__neg__", "__abs__", "__eq__", "__lt__", "__matmul__", "__rmatmul__", "__contains__",
               "__floordiv__", "__mod__", "__isub__", "__imul__", "__itruediv__"]  # fmt: skip
    names = [
        n for n in dir(torch.Tensor) if not n.startswith("_") and n not in skipped and callable(getattr(Tensor, n))
    ]
    for name in [*names, *dunders]:
        if not name.startswith(("sparse_", "ccol", "row_ind", "crow", "col_ind", "_", "q_", "int_repr", "dense_dim")):
            for given in arguments:
                yield name, given


def methods(mesh: str, zero: int) -> tuple[dict[str, str], int]:
    """{call: what was wrong}, and how many calls ran."""
    plain, pm, _, _ = partitioned(mesh, zero)
    names = [name for name, _ in pm.named_parameters() if name.endswith("weight")]
    wrong: dict[str, str] = {}
    ran = 0
    for name in names:
        weight = plain.get_parameter(name).detach()
        sharded = pm.get_parameter(name)
        assert isinstance(sharded, ShardedParameter) and sharded.shape == weight.shape
        for method, arguments in calls(weight):
            expected_self, found_self = weight.clone(), sharded.detach().clone()
            try:
                torch.manual_seed(3)
                expected = getattr(expected_self, method)(*copy.deepcopy(arguments))
            except Exception:  # the arguments do not fit this method
                continue
            if isinstance(expected, Tensor) and (expected.layout is not torch.strided or expected.is_quantized):
                continue
            ran += 1
            call = f"{method}{[a if not isinstance(a, Tensor) else tuple(a.shape) for a in arguments]}"
            try:
                torch.manual_seed(3)
                found = getattr(found_self, method)(*copy.deepcopy(arguments))
                if not same(full(found), full(expected)):
                    wrong[call] = f"{full(found)} and not {full(expected)}"[:300]
                elif not same(full(found_self), expected_self):
                    wrong[call] = "what it writes is another"
            except UsageError:
                pass  # refused in words
            except Exception as error:
                wrong[call] = f"{type(error).__name__}: {error}"[:300]
    return wrong, ran


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_every_method_is_right_or_refused(mesh, zero):
    for wrong, ran in dist.run_ranks(methods, 2, mesh, zero, timeout_s=TIMEOUT_S):
        assert not wrong, "\n".join(f"{call}: {text}" for call, text in wrong.items())
        assert ran > 400


PLAIN = {
    "to": lambda plain, sharded: plain.to(sharded),
    "to a gradient": lambda plain, sharded: plain.float().to(sharded.grad),
    "type_as": lambda plain, sharded: plain.float().type_as(sharded),
    "expand_as": lambda plain, sharded: plain.expand_as(sharded),
    "keyword": lambda plain, sharded: torch.zeros_like(input=sharded),
}  # fmt: skip


def plain_tensors(mesh: str, zero: int) -> None:
    """Methods of a plain tensor that take a sharded one as an argument, as optimizers use them."""
    plain, pm, _, _ = partitioned(mesh, zero)
    row = torch.arange(6.0, dtype=torch.float64)
    for name, sharded in pm.named_parameters():
        weight = plain.get_parameter(name)
        weight.grad, sharded.grad = torch.ones_like(weight), torch.ones_like(sharded)
        for call, function in PLAIN.items():
            given = row[: weight.shape[-1]] if "to" in call or "type" in call else torch.ones_like(weight[..., :1])
            assert same(full(function(given, sharded)), full(function(given, weight))), (name, call)


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_plain_tensors_take_sharded_arguments(mesh, zero):
    dist.run_ranks(plain_tensors, 2, mesh, zero, timeout_s=TIMEOUT_S)


def loops() -> dict[str, Callable[[nn.Module], Any]]:
    """What loops compute of parameters and gradients, by name; each may change the parameters."""

    def parameters(module: nn.Module) -> list[Tensor]:
        return [p for p in module.parameters() if p.dim() == 2]

    def unit_rows(module: nn.Module) -> None:
        for p in parameters(module):
            p.copy_(F.normalize(p, dim=-1))

    def clip_rows(module: nn.Module) -> None:  # adaptive gradient clipping
        for p in parameters(module):
            limit = 0.01 * p.norm(dim=1, keepdim=True).clamp(min=1e-3)
            norm = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(norm > limit, p.grad * (limit / norm.clamp(min=1e-6)), p.grad))
            p.sub_(p.grad)

    def init(module: nn.Module) -> None:
        for p in parameters(module):
            nn.init.kaiming_uniform_(p)
            nn.init.xavier_normal_(p)
            p.add_(torch.randn_like(p))
            nn.init.trunc_normal_(p, std=0.02)
            p.mul_(2).add_(torch.rand(p.shape, dtype=p.dtype))
            p[1, :2] = 5.0

    def orthogonal(module: nn.Module) -> None:
        for p in parameters(module):
            nn.init.orthogonal_(p)

    def centred(module: nn.Module) -> None:
        for p in parameters(module):
            p.sub_((p.grad - p.grad.mean()) / p.std(dim=0, keepdim=True) / p.grad.abs().amax())

    def vectors(module: nn.Module) -> None:
        vector = nn.utils.parameters_to_vector(parameters(module))
        nn.utils.vector_to_parameters(vector * 2, parameters(module))

    return {"unit rows": unit_rows, "clip rows": clip_rows, "init": init, "orthogonal": orthogonal,
            "centred": centred, "vectors": vectors}  # fmt: skip


def run_loops(mesh: str, zero: int) -> list[str]:
    refused = []
    for name, loop in loops().items():
        plain, pm, x, y = partitioned(mesh, zero)
        F.cross_entropy(plain(x), y).backward()
        pm.step(x, loss_fn=F.cross_entropy, target=y)
        try:
            for module in (plain, pm):
                torch.manual_seed(7)
                with torch.no_grad():
                    loop(module)
        except UsageError:
            refused.append(name)
            continue
        state = pm.full_state_dict()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-10, msg=f"{name}: {key}")
    return refused


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "zero", "refused"), [("tp2", 0, []), ("dp2", 3, [])])
def test_what_a_loop_computes_of_parameters(mesh, zero, refused):
    assert dist.run_ranks(run_loops, 2, mesh, zero, timeout_s=TIMEOUT_S) == [refused] * 2


def penalties(mesh: str, zero: int) -> None:
    """Penalties on weights in the loop: the loss and all gradients."""
    kinds: list[Callable[[nn.Module], Tensor]] = [
        lambda m: sum(p.norm() for p in m.parameters()),
        lambda m: sum(p.norm(dim=0).sum() for p in m.parameters() if p.dim() == 2),
        lambda m: sum((p.full_tensor() if isinstance(p, ShardedTensor) else p).pow(3).sum() for p in m.parameters()),
        lambda m: sum(p.std() + p.amax() for p in m.parameters()),
    ]
    scale = torch.tensor(0.7, dtype=torch.float64)
    for kind in kinds:
        plain, pm, x, y = partitioned(mesh, zero)
        scales = [scale.clone().requires_grad_() for _ in range(2)]
        for module, factor in zip((plain, pm), scales, strict=True):
            loss = (
                F.cross_entropy(module(x), y)
                + kind(module)
                + sum((p * factor).pow(2).sum() for p in module.parameters())
            )
            loss.backward()
        grads = pm.full_grads()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-10, msg=name)
        torch.testing.assert_close(scales[1].grad, scales[0].grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("mesh", "zero"), [("tp2", 0), ("dp2", 3)])
def test_penalties_on_weights(mesh, zero):
    dist.run_ranks(penalties, 2, mesh, zero, timeout_s=TIMEOUT_S)


OF_A_STAGE = """norm() of '0.weight' is not supported under pp
  why    a rank holds only the parameters of its own stages, so a loop over parameters would miss those of other stages
  try    pm.summed(fn) to add fn(parameter) over all stages; pm.grad_norm(), pm.full_grads() or pm.full_state_dict(); p.to_local() for this rank alone"""  # noqa: E501


def sums(mesh: str, zero: int) -> str:
    plain, pm, x, y = partitioned(mesh, zero)
    F.cross_entropy(plain(x), y).backward()
    pm.step(x, loss_fn=F.cross_entropy, target=y)
    expected = sum(p.grad.square().sum() for p in plain.parameters())
    torch.testing.assert_close(pm.summed(lambda p: p.grad.square().sum()), expected, rtol=1e-10, atol=1e-10)
    plain.zero_grad()
    pm.zero_grad()
    sum(p.norm() for p in plain.parameters()).backward()
    pm.summed(lambda p: p.norm()).backward()
    grads = pm.full_grads()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-10, msg=name)
    if mesh != "pp2":
        return ""
    with pytest.raises(UsageError) as raised:
        next(iter(pm.parameters())).norm()
    return str(raised.value)


@pytest.mark.parametrize(("mesh", "zero"), [("tp2", 0), ("dp2", 3), ("pp2", 0), ("dp2", 0)])
def test_sums_over_all_parameters(mesh, zero):
    said = dist.run_ranks(sums, 2, mesh, zero, timeout_s=TIMEOUT_S)
    if mesh == "pp2":
        assert said[0] == OF_A_STAGE


def values_of_stages() -> None:
    """Compute one value of all parameters in ways that are not a reduction of one parameter."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).double()
    x, y = torch.randn(8, 6).double(), torch.arange(8) % 6
    pm = autopart.parallelize(copy.deepcopy(plain), "pp2", example_kwargs={"input": x})
    F.cross_entropy(plain(x), y).backward()
    pm.step(x, loss_fn=F.cross_entropy, target=y)
    refused: list[Any] = [
        lambda ps: nn.utils.parameters_to_vector(ps).norm(),
        lambda ps: torch.cat([p.abs().flatten() for p in ps]).kthvalue(3).values.item(),
        lambda ps: sum(torch.linalg.matrix_norm(p, "nuc") for p in ps if p.dim() == 2) + ps[1].flatten().kthvalue(1)[0],
        lambda ps: ps[0].grad.div_(torch.dot(ps[1].grad.view(-1), ps[1].grad.view(-1))),
        lambda ps: torch.stack([p.grad.flatten()[0] for p in ps]).max(),
    ]
    for of_all in refused:
        with pytest.raises(UsageError, match="under pp\n  why    a rank holds only the parameters of its own"):
            of_all(list(pm.parameters()))
    with torch.no_grad():
        for module in (plain, pm):
            for p in module.parameters():  # each by a value of its own
                p.mul_(p.abs() > p.abs().flatten().kthvalue(max(p.numel() // 4, 1)).values)
            vector = nn.utils.parameters_to_vector(module.parameters()) * 0.9
            nn.utils.vector_to_parameters(vector, module.parameters())
    full = pm.full_state_dict()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full[name], p, rtol=1e-10, atol=1e-10, msg=name)
    with pytest.warns(UserWarning, match=r"random numbers for '\d\.weight' differ under pp from those of one process"):
        torch.randn_like(next(iter(pm.parameters())))
    with pytest.warns(UserWarning, match="the parameters of other stages draw no numbers on this rank"):
        nn.init.normal_(next(iter(pm.parameters())))


def test_values_of_one_stage_alone_are_refused():
    dist.run_ranks(values_of_stages, 2, timeout_s=TIMEOUT_S)


def refusals() -> str:
    _, pm, _, _ = partitioned("tp2", 0)
    weight = pm.get_parameter("0.weight")
    with pytest.raises(RuntimeError, match="broadcast"):
        weight.detach() + torch.zeros(3, 1, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"writes to a slice or another view of '0\.weight'"):
        weight.detach().flatten().zero_()
    assert "of shape (8, 6)" in repr(weight) and len(REFUSED) > 20
    with pytest.raises(UsageError) as raised:
        weight.data_ptr()
    return str(raised.value)


def test_what_reads_memory_is_refused():
    assert (
        dist.run_ranks(refusals, 2, timeout_s=TIMEOUT_S)
        == [
            """data_ptr() is not supported on '0.weight', of which this rank holds a shard
  why    the memory has only this rank's shard
  try    p.to_local() for this rank's values, p.full_tensor() or pm.full_state_dict() for all"""
        ]
        * 2
    )

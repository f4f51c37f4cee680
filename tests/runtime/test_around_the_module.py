"""What users do around a partitioned module: right, or refused in words that say what to do."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import autopart
from autopart.errors import AutopartError, UsageError

TIMEOUT_S = 120.0


class Critic(nn.Module):
    """Linear layers and attention, all differentiable twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.qkv, self.norm, self.down = (
            nn.Linear(8, 16),
            nn.Linear(16, 48),
            nn.LayerNorm(16),
            nn.Linear(16, 1),
        )
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)) + self.offset
        q, k, v = self.qkv(self.norm(h)).view(*h.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.down(h + (weights @ v).transpose(1, 2).flatten(2))


def made(mesh: str, zero: int = 0) -> tuple[nn.Module, autopart.ParallelModule, Tensor]:
    torch.manual_seed(0)
    model, x = Critic().double(), torch.randn(4, 6, 8).double()
    plain = copy.deepcopy(model)
    return plain, autopart.parallelize(model, mesh, example_kwargs={"x": x}, **({"zero": zero} if zero else {})), x


# --- derivatives of second order -------------------------------------------------------------------------------------


def penalty_of_inputs(module: nn.Module, x: Tensor) -> Tensor:
    points = x.clone().requires_grad_()
    out = module(points)
    (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
    return out.mean() + ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()


def penalty_of_gradients(module: nn.Module, x: Tensor) -> Tensor:
    loss = module(x).square().mean()
    slopes = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    return loss + sum((slope**2).sum() for slope in slopes)


def second_order(mesh: str, zero: int, of_parameters: bool) -> str:
    plain, pm, x = made(mesh, zero)
    penalty = penalty_of_gradients if of_parameters else penalty_of_inputs
    penalty(plain, x).backward()
    try:
        loss = penalty(pm, x)
    except UsageError as error:
        return str(error)
    loss.backward()
    grads = pm.full_grads()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-10, msg=name)
    return ""


@pytest.mark.few
@pytest.mark.parametrize("of_parameters", [False, True])
@pytest.mark.parametrize(("mesh", "zero"), [("tp2", 0), ("dp2", 0), ("dp2", 1), ("dp2", 3), ("dp2,tp2", 0)])
def test_gradients_of_gradients(mesh, zero, of_parameters):
    size = autopart.Mesh.parse(mesh).num_ranks
    said = dist.run_ranks(second_order, size, mesh, zero, of_parameters, timeout_s=TIMEOUT_S)
    assert said == [""] * size


# --- modules and optimizers that stand for others --------------------------------------------------------------------


def step_of_an_older_optimizer(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.step(x, loss_fn=F.mse_loss, target=x[..., :1])
    optimizer.step()


def norm_of_the_originals(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def other_weights(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    functional_call(pm, {name: p * 2 for name, p in pm.named_parameters()}, (x,))


def other_buffers(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    functional_call(pm, {"offset": torch.ones(1).double()}, (x,))


class Around(nn.Module):
    def __init__(self, pm: nn.Module) -> None:
        super().__init__()
        self.pm = pm


def ddp_around(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    nn.parallel.DistributedDataParallel(Around(pm))


def fsdp_around(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    FullyShardedDataParallel(Around(pm), device_id=torch.device("cpu"))


def fully_sharded_around(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard([Around(pm), nn.Linear(2, 2)])


def fully_sharded_layer(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(pm.qkv)


def twice(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    autopart.parallelize(pm, "dp2", example_kwargs={"x": x})


def one_around_it(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    autopart.parallelize(Around(Around(pm)), "dp2", example_kwargs={"x": x})


def a_layer_of_it(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    autopart.parallelize(pm.qkv, "dp2", example_kwargs={"input": x})


def scaled_step_of_an_older_optimizer(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(pm(x).sum()).backward()
    scaler.step(optimizer)


def another_layer(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.extra = nn.Linear(2, 2)


def another_layer_below(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.up.extra = nn.Linear(2, 2)


def another_layer_by_name(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.up.add_module("extra", nn.Linear(2, 2))


def another_buffer(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.register_buffer("extra", torch.ones(1))


def a_buffer_replaced(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.offset = torch.ones(1).double()


def another_parameter(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.up.register_parameter("extra", nn.Parameter(torch.ones(1)))


def a_parameter_deleted(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    del pm.up.weight


def a_list_for_a_number(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.norm.eps = [1e-5]


def a_layer_appended(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    autopart.parallelize(nn.Sequential(model), str(pm.mesh), example_args=(x,)).append(nn.ReLU())


def a_layer_set_by_number(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.up[0] = nn.Linear(2, 2)


def a_layer_deleted(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    del pm.norm


def another_class(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.norm.__class__ = nn.Identity


def a_layer_pickled(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pickle.dumps(pm.up)


def a_method_of_a_layer(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    pm.up.reset_parameters()


def wrapped_in_ddp(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    autopart.plan(nn.parallel.DistributedDataParallel(copy.deepcopy(model)), "dp2", example_kwargs={"x": x})


def wrapped_by_fully_shard(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    from torch.distributed.fsdp import fully_shard

    autopart.plan(fully_shard(copy.deepcopy(model)), "dp2", example_kwargs={"x": x})


def compiled(model: nn.Module, pm: Any, optimizer: Any, x: Tensor) -> None:
    autopart.plan(torch.compile(copy.deepcopy(model)), "dp2", example_kwargs={"x": x})


ORIGINALS = """on the model's own parameters would change nothing: Critic is partitioned
  why    the partitioned model has its own copies of the parameters, and only the copies have gradients
  try    make the optimizer after parallelize(): torch.optim.AdamW(pm.parameters())"""
CHANGED = """of a partitioned model would change nothing
  why    the program was traced from the original model
  try    change the model before parallelize(); to change values, use pm.load_state_dict(...)"""
WRAPPED = """cannot wrap a partitioned model
  why    it would treat this rank's shards as full parameters
  try    use the mesh axis dp: parallelize(model, 'dp2,tp2') reduces gradients itself, and zero=3 is FSDP"""

REFUSED: dict[Callable[..., None], str] = {
    step_of_an_older_optimizer: f"SGD.step() {ORIGINALS}",
    norm_of_the_originals: f"clip_grad_norm_ {ORIGINALS}",
    other_weights: """the tensor 'up.weight' is replaced in this call
  why    functional_call or an assignment replaced it, but the program uses the original tensor
  try    use pm.load_state_dict(...) to change values, and the unpartitioned model to differentiate through updates""",
    another_layer: f"setting 'extra' {CHANGED}",
    another_layer_below: f"setting 'extra' {CHANGED}",
    another_layer_by_name: f"add_module() {CHANGED}",
    another_buffer: f"register_buffer() {CHANGED}",
    a_buffer_replaced: f"setting 'offset' {CHANGED}",
    another_parameter: f"register_parameter() {CHANGED}",
    a_list_for_a_number: f"setting 'eps' {CHANGED}",
    a_layer_set_by_number: f"setting [0] {CHANGED}",
    a_layer_deleted: f"deleting 'norm' {CHANGED}",
    another_class: f"another class for a layer {CHANGED}",
    a_parameter_deleted: f"deleting 'weight' {CHANGED}",
    ddp_around: f"DistributedDataParallel {WRAPPED}",
    fsdp_around: f"FullyShardedDataParallel {WRAPPED}",
    fully_sharded_around: f"fully_shard() {WRAPPED}",
    fully_sharded_layer: f"fully_shard() {WRAPPED}",
    one_around_it: """the submodule 'pm.pm' of the model is partitioned already
  why    a partitioned model cannot contain another partitioned model
  try    parallelize the outer model with the original submodule""",
    a_layer_of_it: """this is a layer of a partitioned model
  why    it holds this rank's shards of parameters, and cannot be run alone
  try    pass the original model's layer""",
    scaled_step_of_an_older_optimizer: f"unscaling {ORIGINALS}",
    other_buffers: """the tensor 'offset' is replaced in this call
  why    functional_call or an assignment replaced it, but the program uses the original tensor
  try    use pm.load_state_dict(...) to change values, and the unpartitioned model to differentiate through updates""",
    a_layer_appended: """a partitioned Sequential has no append()
  why    the program was traced with the layers that the model had
  try    change the model before parallelize()""",
    a_layer_pickled: """a layer of a partitioned model cannot be pickled
  why    it holds the tensors of this rank
  try    torch.save(pm.full_state_dict(), path)""",
    a_method_of_a_layer: """a partitioned model has no reset_parameters()
  why    Linear.reset_parameters runs the model's own code, on full weights
  try    model.load_state_dict(pm.full_state_dict()); model.up.reset_parameters(...)""",
    twice: """the model is partitioned already
  why    it is a result of parallelize(), not a model
  try    pass the original model; the plan of the partitioned model is pm.plan""",
    wrapped_in_ddp: """the model is wrapped in DistributedDataParallel
  why    autopart partitions the model itself
  try    parallelize(model.module, ...)""",
    wrapped_by_fully_shard: """fully_shard() was applied to the model
  why    its parameters are shards already
  try    parallelize the model without it: zero=3 shards parameters in the same way""",
    compiled: """the model is wrapped in OptimizedModule
  why    autopart partitions the model itself
  try    parallelize(model._orig_mod, ...)""",
}


def refusals(mesh: str) -> dict[str, str]:
    said = {}
    for use in REFUSED:
        torch.manual_seed(0)
        model, x = Critic().double(), torch.randn(4, 6, 8).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pm = autopart.parallelize(model, mesh, example_kwargs={"x": x})
        before = {name: p.detach().clone() for name, p in pm.named_parameters()}
        with pytest.raises(AutopartError) as raised:
            use(model, pm, optimizer, x)
        said[use.__name__] = str(raised.value)
        assert all(bool((p.detach() == before[name]).all()) for name, p in pm.named_parameters())
    return said


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_uses_that_would_change_nothing_are_refused(mesh):
    expected = {use.__name__: text for use, text in REFUSED.items()}
    for said in dist.run_ranks(refusals, 2, mesh, timeout_s=TIMEOUT_S):
        assert said == expected


def modes_and_weights(mesh: str) -> None:
    """Layers that were in eval mode stay so until `train()`; weights that are loaded back bring no warning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double()
    model[1].eval()
    plain, x = copy.deepcopy(model), torch.randn(8, 8).double()
    pm = autopart.parallelize(model, mesh, example_kwargs={"input": x})
    assert pm.training and not pm[1].training
    torch.testing.assert_close(pm.step(x, loss_fn=F.mse_loss, target=x[:, :4]), F.mse_loss(plain(x), x[:, :4]).detach())
    torch.optim.SGD(pm.parameters(), 0.1).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(pm.full_state_dict())
        pm.step(x, loss_fn=F.mse_loss, target=x[:, :4])
    with pytest.warns(UserWarning, match="was changed after autopart had copied it"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        pm.step(x, loss_fn=F.mse_loss, target=x[:, :4])


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_modes_and_loaded_weights(mesh):
    dist.run_ranks(modes_and_weights, 2, mesh, timeout_s=TIMEOUT_S)

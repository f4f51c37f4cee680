"""`dp_sync` on processes: against the transcriptions in numpy, and torch's hooks against DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_sync_oracle as oracle
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from dist import RankError, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import autopart
from autopart.extras.dp_sync.gradient_methods import MethodSeeds
from autopart.ir.mesh import Mesh
from autopart.runtime.checkpoint.saved_shard import ShardTensor

STEPS = 50
ROWS = 8

Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.norm(self.up(x)).tanh()), y)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Batch]:
    made = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(ROWS, 6, generator=made, dtype=torch.float64),
             "y": torch.randn(ROWS, 4, generator=made, dtype=torch.float64)} for _ in range(STEPS)]  # fmt: skip


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[], Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda: oracle.SGD(0.1, momentum=0.9)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01), lambda: oracle.AdamW(0.01)),
}


def train(
    mesh: str, method: Any, kind: str, own_loop: bool = False, steps: int = STEPS, **options: Any
) -> dict[str, np.ndarray]:
    """The parameters after training on a mesh."""
    given = batches()[:steps]
    pm = autopart.parallelize(model(), mesh, example_kwargs=given[0], dp_sync=method, check_replicas=5, **options)
    optimizer = OPTIMIZERS[kind][0](pm.parameters())
    pm.attach(optimizer)
    for batch in given:
        optimizer.zero_grad()
        if own_loop:
            pm(**batch).backward()
        else:
            pm.step(**batch)
        optimizer.step()
    return {name: value.numpy() for name, value in pm.full_state_dict().items()}


def draw(step: int, rank: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    name = [name for name, _ in model().named_parameters()][index]
    return MethodSeeds(0, step).of(name, rank)(int(np.prod(shape))).numpy().reshape(shape)


GRADIENTS: dict[str, Callable[[], Any]] = {
    "parameter_server": oracle.Mean,
    "qsgd:4bit": lambda: oracle.Qsgd(oracle.qsgd_levels(4), draw),
    "top_k:0.2": lambda: oracle.ErrorFeedback(lambda x: oracle.top_k(x, 0.2)),
    "double_squeeze:sign": lambda: oracle.DoubleSqueeze(oracle.sign),
    "ef21_sgdm:0.2,0.3": lambda: oracle.EF21Momentum(lambda x: oracle.top_k(x, 0.2), 0.3),
    "neolithic:0.1,2": lambda: oracle.Neolithic(lambda x: oracle.top_k(x, 0.1), 2),
    "matrices": lambda: oracle.ErrorFeedback(lambda x: oracle.top_k(x, 0.2 if x.ndim == 2 else 1)),
}

MODELS: dict[str, Callable[[Any, Any, int], Any]] = {
    "gossip:one_peer": lambda x, opts, n: oracle.DSGD(x, opts, lambda step: oracle.one_peer(n, step)),
    "gossip:ring,4": lambda x, opts, n: oracle.GossipPGA(x, opts, oracle.always(oracle.ring(n)), 4),
    "exact_diffusion:ring": lambda x, opts, n: oracle.ExactDiffusion(x, opts, oracle.ring(n)),
    "gradient_tracking:grid": lambda x, opts, n: oracle.GradientTracking(x, opts, oracle.grid(n)),
    "local:4": lambda x, opts, n: oracle.LocalSGD(x, opts, 4),
    "diloco:5": lambda x, opts, n: oracle.DiLoCo(x, opts, 5),
}


def gradient(at: nn.Module, params: list[np.ndarray], batch: Batch, rank: int, num_ranks: int) -> list[np.ndarray]:
    """Of the mean over a rank's rows, at these parameters."""
    rows = slice(rank * ROWS // num_ranks, (rank + 1) * ROWS // num_ranks)
    for parameter, value in zip(at.parameters(), params, strict=True):
        parameter.data = torch.from_numpy(value.copy())
        parameter.grad = None
    at(**{name: value[rows] for name, value in batch.items()}).backward()
    return [parameter.grad.numpy() for parameter in at.parameters() if parameter.grad is not None]


def expected(method: str, kind: str, num_ranks: int, steps: int = STEPS) -> dict[str, np.ndarray]:
    at = model()
    x = [parameter.detach().numpy().copy() for parameter in at.parameters()]
    if method in GRADIENTS:
        sync, optimizer = GRADIENTS[method](), OPTIMIZERS[kind][1]()
        for batch in batches()[:steps]:
            x = optimizer.step(x, sync.step([gradient(at, x, batch, rank, num_ranks) for rank in range(num_ranks)]))
    else:
        models = MODELS[method]([x] * num_ranks, [OPTIMIZERS[kind][1]() for _ in range(num_ranks)], num_ranks)
        for batch in batches()[:steps]:
            models.step([gradient(at, models.x[rank], batch, rank, num_ranks) for rank in range(num_ranks)])
        x = oracle.mean(models.x)
    return dict(zip((name for name, _ in at.named_parameters()), x, strict=True))


def check(found: list[dict[str, np.ndarray]], right: dict[str, np.ndarray]) -> None:
    for values in found:
        assert max(np.abs(values[name] - right[name]).max() for name in right) < 1e-12


METHODS = [method for method in (*GRADIENTS, *MODELS) if method != "matrices"]


@pytest.mark.few
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_as_defined(method: str, kind: str):
    check(run_ranks(train, 2, "dp2", method, kind), expected(method, kind, 2))


@pytest.mark.large
@pytest.mark.parametrize("method", ["double_squeeze:sign", "qsgd:4bit", "gossip:one_peer", "gradient_tracking:grid"])
def test_four_ranks_train_as_defined(method: str):
    check(run_ranks(train, 4, "dp4", method, "sgd"), expected(method, "sgd", 4))


@pytest.mark.large
@pytest.mark.parametrize("method", ["top_k:0.2", "gossip:ring,4", "diloco:5"])
def test_pipelines_train_as_defined(method: str):
    check(run_ranks(train, 4, "dp2,pp2", method, "adamw"), expected(method, "adamw", 2))


@pytest.mark.large
@pytest.mark.parametrize("method", ["parameter_server", "exact_diffusion:ring", "local:4"])
def test_sharded_models_train_as_defined(method: str):
    check(run_ranks(train, 4, "dp2,tp2", method, "adamw"), expected(method, "adamw", 2))


@pytest.mark.few
@pytest.mark.parametrize("method", ["top_k:0.2", "local:4"])
def test_own_loops_train_as_defined(method: str):
    check(run_ranks(train, 2, "dp2", method, "sgd", own_loop=True), expected(method, "sgd", 2))


@pytest.mark.large
def test_over_nodes_the_method_is_between_them():
    check(run_ranks(train, 4, "dpr2,dp2", {"strategy": "top_k:0.2", "across": "node"}, "sgd"),
          expected("top_k:0.2", "sgd", 2))  # fmt: skip


@pytest.mark.large
def test_first_steps_are_exact_and_names_choose():
    exact = expected("parameter_server", "sgd", 2)
    check(run_ranks(train, 2, "dp2", {"strategy": "sign", "from_step": STEPS}, "sgd"), exact)
    check(run_ranks(train, 2, "dp2", "norm.*=all_reduce,*.bias=all_reduce,*=top_k:0.2", "sgd"),
          expected("matrices", "sgd", 2))  # fmt: skip


# --- Parts of parameters


def with_parts(mesh: str, methods: list[str], steps: int) -> tuple[list[str], dict[str, dict[str, np.ndarray]]]:
    """Which methods train otherwise with zero=1 than without, in any bit, the last in a loop of one's own too; and the
    parameters of those with."""
    found = {}
    for method in methods:
        for own_loop in (False, True) if "pp" not in mesh and method == methods[-1] else (False,):
            options = {"own_loop": own_loop, "steps": steps}
            whole = train(mesh, method, "adamw", **options)
            found[method, own_loop] = whole, train(mesh, method, "adamw", zero=1, **options)
    differ = [str(case) for case, (whole, parts) in found.items()
              if any((whole[name] != value).any() for name, value in parts.items())]  # fmt: skip
    return differ, {method: found[method, False][1] for method in methods}


@pytest.mark.large
def test_parts_train_as_wholes():
    """Every method on two ranks, with zero=1 as without, and as it is defined."""
    methods = [*(method for method in GRADIENTS if method != "matrices"), "powersgd:2",
               "norm.*=sign,*.bias=all_reduce,*=ef21:0.2"]  # fmt: skip
    for differ, trained in run_ranks(with_parts, 2, "dp2", methods, 12):
        assert not differ
        for method in set(methods) & set(GRADIENTS):
            check([trained[method]], expected(method, "adamw", 2, 12))


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2,tp2", "dp4", "pp2,dp2"])
def test_parts_train_as_wholes_on_larger_meshes(mesh: str):
    for differ, _ in run_ranks(with_parts, 4, mesh, ["qsgd:4bit", "double_squeeze:top_k:0.2"], 4):
        assert not differ


def larger(build: str, mesh: str, method: str, options: dict[str, Any], zero: int) -> tuple[dict[str, Tensor], Tensor]:
    """The parameters after three steps, one of which adds up two batches, and the norm of the last gradient."""
    given, batch = zoo.ZOO[build]()
    given = given.float() if "precision" in options else given
    pm = autopart.parallelize(given, mesh, example_kwargs=batch, dp_sync=method, zero=zero, **options)
    pm.get_parameter(next(name for name, p in pm.named_parameters() if p.dim() == 1)).requires_grad_(False)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(1 + step % 2):
            pm.step(**batch)
        norm = pm.clip_grad_norm_(1e3)
        optimizer.step()
    return pm.full_state_dict(), norm


def larger_twice(*case: Any) -> bool:
    (whole, norm), (parts, other) = (larger(*case, zero) for zero in (0, 1))
    assert torch.allclose(norm, other, rtol=1e-6, atol=0)
    return all(torch.equal(value, parts[name]) for name, value in whole.items())


@pytest.mark.large
@pytest.mark.parametrize(
    ("build", "mesh", "method", "options"),
    [("gpt2", "pp2,dp2", "top_k:0.1", {"microbatches": 2}),  # tied weights of two stages
     ("llama", "dp2,tp2", "ef21:0.1", {"precision": "bf16", "microbatches": 2}),
     ("llama", "dp2,cp2", "top_k:0.1", {}),  # parts over dp_cp, the sum over cp, the method over dp
     ("llama", "dp2", "sign", {"precision": "fp16", "microbatches": 2}),
     ("gpt2", "pp2,dp2", "neolithic:0.1,2", {"microbatches": 4, "schedule": "interleaved_1f1b"})],
)  # fmt: skip
def test_parts_of_larger_models_train_as_wholes(build: str, mesh: str, method: str, options: dict[str, Any]):
    assert all(run_ranks(larger_twice, Mesh.parse(mesh).num_ranks, build, mesh, method, options))


def odd_batches(zero: int) -> list[Tensor]:
    """Gradients of batches that do not divide, of two calls in one backward, and of two backwards."""
    first, second, third = batches()[:3]
    pm = autopart.parallelize(model(), "dp2", example_kwargs=first, dp_sync="top_k:0.2", zero=zero)
    found = []
    for backward in (
        lambda: pm.step(**{name: value[:3] for name, value in first.items()}),
        lambda: (pm(**first) + pm(**second)).backward(),
        lambda: [pm(**batch).backward() for batch in (second, third)],
    ):
        pm.zero_grad()
        backward()
        found += list(pm.full_grads().values())
    return found


@pytest.mark.filterwarnings("ignore:a batch of 3 rows")
def test_parts_of_other_batches():
    for whole, parts in zip(run_ranks(odd_batches, 2, 0), run_ranks(odd_batches, 2, 1), strict=True):
        assert all(map(torch.equal, whole, parts)) and len(whole) == len(parts) == 18


def accumulate(method: str) -> list[list[Tensor]]:
    """The gradients of two batches: added up in no_sync(), and of both batches in one."""
    first, second = batches()[:2]
    found = []
    for together in (False, True):
        pm = autopart.parallelize(model(), "dp2", example_kwargs=first, dp_sync=method)
        if together:
            rows = {name: [*first[name].chunk(2), *second[name].chunk(2)] for name in first}
            pm.step(**{name: torch.cat([part[0], part[2], part[1], part[3]]) for name, part in rows.items()})
        else:
            with pm.no_sync():
                (pm(**first) / 2).backward()
            (pm(**second) / 2).backward()
        found.append([parameter.grad for parameter in pm.parameters()])
    return found


@pytest.mark.parametrize("method", ["top_k:0.2", "double_squeeze:sign"])
def test_what_no_sync_adds_up_is_sent_once(method: str):
    for apart, together in run_ranks(accumulate, 2, method):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(apart, together, strict=True))


# --- DDP's hooks


def hooks(name: str) -> tuple[Any, Any]:
    group = torch.distributed.group.WORLD
    if name == "power_sgd":
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2
        ), powerSGD_hook.powerSGD_hook
    if name == "fp16_power_sgd":
        state, hook = hooks("power_sgd")
        return state, default_hooks.fp16_compress_wrapper(hook)
    if name == "post_local_sgd":
        return post_localSGD_hook.PostLocalSGDState(None, group, 2), post_localSGD_hook.post_localSGD_hook
    return None, {"all_reduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}[name]


def hooked(name: str) -> float:
    """The largest difference between DDP and a partitioned model after some steps with a hook."""
    given = [{name: value.float() for name, value in batch.items()} for batch in batches()[:8]]
    ours, theirs = model().float(), model().float()
    pm = autopart.parallelize(ours, "dp2", example_kwargs=given[0])
    pm.register_comm_hook(*hooks(name))
    ddp = DistributedDataParallel(theirs)
    ddp.register_comm_hook(*hooks(name))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (pm, theirs)]
    rank = torch.distributed.get_rank()
    for batch in given:
        for optimizer in optimizers:
            optimizer.zero_grad()
        pm.step(**batch)
        ddp(**{name: value.chunk(2)[rank] for name, value in batch.items()}).backward()
        for optimizer in optimizers:
            optimizer.step()
    mine = pm.full_state_dict()
    return max(float((mine[name] - value).abs().max()) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("name", ["all_reduce", "fp16", "power_sgd", "fp16_power_sgd", "post_local_sgd"])
def test_hooks_do_what_they_do_in_ddp(name: str):
    assert run_ranks(hooked, 2, name) == [0.0, 0.0]


# --- What cannot be


def second_step() -> None:
    pm = autopart.parallelize(model(), "dp2", example_kwargs=batches()[0], dp_sync="local:2")
    for batch in batches()[:2]:
        pm.step(**batch)


def test_replicas_that_nothing_brings_together_are_refused():
    with pytest.raises(
        RankError, match=r"dp_sync='local:2' needs an attached optimizer.*\n.*\n.*pm.attach\(optimizer\)"
    ):
        run_ranks(second_step, 2)


def refused(what: str) -> str:
    given = batches()[0]
    method = {"full_grads": "local:2", "beside": "local:2", "hook": "top_k:0.2"}.get(what)
    pm = autopart.parallelize(model(), "dp2", example_kwargs=given, dp_sync=method)
    with pytest.raises(autopart.errors.AutopartError) as caught:
        if what == "full_grads":
            pm.full_grads()
        elif what == "beside":
            pm.register_comm_hook(None, default_hooks.allreduce_hook)
        elif what == "arguments":
            pm.register_comm_hook(None, lambda bucket: None)
        elif what == "ddp":
            from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks

            pm.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer)
        elif what == "other":
            pm.attach(torch.optim.SGD(copy.deepcopy(model()).parameters(), lr=0.1))
        elif what == "hook":
            pm.get_parameter("up.weight").register_post_accumulate_grad_hook(lambda parameter: None)
            pm.step(**given)
            pm(**given)
        elif what == "group":
            pm.process_group("tp")
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [("full_grads", "every data rank has its own model"), ("beside", "both define what data-parallel ranks send"),
     ("arguments", "it must take two arguments: a state and a bucket"), ("ddp", "needs DistributedDataParallel"),
     ("other", "none of this module's parameters"), ("group", "no process group of axis 'tp'"),
     ("hook", "ranks synchronise gradients after the backward, and the hook would run before that")],
)  # fmt: skip
def test_what_cannot_be_is_said(what: str, words: str):
    assert all(words in text for text in run_ranks(refused, 2, what))


# --- Checkpoints


def resumed(method: str, folder: str, save: bool, zero: int = 0) -> dict[str, Tensor]:
    """Train; after ten steps save, or load what was saved and go on. The parameters, and what was remembered then."""
    given = batches()[:20]
    pm = autopart.parallelize(
        model(), f"dp{torch.distributed.get_world_size()}", example_kwargs=given[0], dp_sync=method, zero=zero
    )
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.attach(optimizer)
    for step, batch in enumerate(given):
        if step == 10:
            state = {"model": pm.state_dict(), "sync": pm.dp_sync_state_dict(2)}
            (dcp.save if save else dcp.load)(state, checkpoint_id=folder)
            if not save:
                pm.load_state_dict(state["model"])
                pm.load_dp_sync_state_dict(state["sync"])
            held = {name: value.to_local().mean(0) if value.dim() > 2 or "bias" in name else value.to_local()
                    for name, value in pm.dp_sync_state_dict().items() if isinstance(value, ShardTensor)}  # fmt: skip
        if step >= 10 or save:
            optimizer.zero_grad()
            pm.step(**batch)
            optimizer.step()
    return {**pm.full_state_dict(), **{f"held {name}": value for name, value in held.items()}}


@pytest.mark.few
@pytest.mark.parametrize(
    "method", ["top_k:0.2", "double_squeeze:sign", "ef21_sgdm:0.2", "gradient_tracking:ring", "diloco:4"]
)
def test_training_goes_on_in_bits_where_it_was_saved(method: str, tmp_path: Path):
    first = run_ranks(resumed, 2, method, str(tmp_path), True)
    again = run_ranks(resumed, 2, method, str(tmp_path), False)
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.large
@pytest.mark.parametrize("method", ["double_squeeze:sign", "ef21_sgdm:0.2"])
def test_what_is_remembered_is_the_same_with_parts(method: str, tmp_path: Path):
    first = run_ranks(resumed, 2, method, str(tmp_path), True, 1)
    again = run_ranks(resumed, 2, method, str(tmp_path), False, 0)
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.large
@pytest.mark.parametrize(("method", "zero"), [
    ("top_k:0.2", 0), ("double_squeeze:sign", 1), ("ef21:0.2", 1), ("gossip:ring", 0),
])  # fmt: skip
def test_other_numbers_of_ranks_take_the_mean(method: str, zero: int, tmp_path: Path):
    saved = run_ranks(resumed, 2, method, str(tmp_path), True, zero)
    loaded = run_ranks(resumed, 4, method, str(tmp_path), False, zero)
    own = [name for name in saved[0] if name.startswith("held ") and name.endswith(("error", "tracked", "replica"))
           and "server" not in name]  # fmt: skip
    assert own
    for name in own:
        mean = torch.stack([one[name] for one in saved]).mean(0)
        assert all((one[name] - mean).abs().max() < 1e-12 for one in loaded)

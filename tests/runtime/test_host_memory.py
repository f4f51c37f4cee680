"""What a rank holds in memory besides its shards: nothing of the model, once the user's code lets go of it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import warnings
import weakref
from typing import Any

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn

import autopart
from autopart.tracing.meta_copy import CannotCopy, Source, meta_copy_of

SIZE = 8


def storages(model: nn.Module) -> list[weakref.ref]:
    return [weakref.ref(p.untyped_storage()) for p in model.parameters()] + [weakref.ref(p) for p in model.parameters()]


def batch(rows: int = 4, length: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(32, (rows, length))
    return {"input_ids": ids, "labels": ids}


def grads_of(model: nn.Module, examples: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for example in examples:
        loss = model(**example).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


EXAMPLES = [batch(), batch(8, 12), batch(4, 6)]


def dropped(mesh: str, lazily: bool) -> tuple[int, list[float], dict[str, Tensor], set[str], Any]:
    model = zoo.gpt2()[0].double().eval()
    held = storages(model)
    pm = autopart.parallelize(model, mesh, **({} if lazily else {"example_kwargs": EXAMPLES[0]}))
    pm.step(**EXAMPLES[0])
    pm.zero_grad()
    del model
    gc.collect()
    alive = sum(of() is not None for of in held)
    losses = [pm.step(**example).item() for example in EXAMPLES]
    return alive, losses, pm.full_grads(), set(pm.full_state_dict()), type(pm(**EXAMPLES[1])).__name__


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "lazily"), [("tp2", False), ("pp2", False), ("dp2", True)])
def test_the_model_is_gone_once_the_user_drops_it_and_other_calls_still_run(mesh: str, lazily: bool) -> None:
    model = zoo.gpt2()[0].double().eval()
    expected, own = grads_of(model, EXAMPLES)
    for alive, losses, grads, names, kind in dist.run_ranks(dropped, 2, mesh, lazily):
        assert alive == 0
        assert losses == pytest.approx(expected, rel=1e-12)
        assert set(grads) == set(own) and names == set(model.state_dict())
        for name, grad in own.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-10, atol=1e-12)
        assert kind == "CausalLMOutputWithCrossAttentions"


RESIDENT = """
    import gc, os, torch, torch.distributed as dist, autopart
    from torch import nn

    def resident_mb():
        line = next(l for l in open("/proc/self/status") if l.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(25)))
    pm = autopart.parallelize(model, "dp1", example_args=(torch.ones(2, 1024),))
    before = resident_mb()
    del model
    gc.collect()
    print(before - resident_mb())
    pm(torch.ones(4, 1024))
"""


@pytest.mark.large
def test_resident_memory_falls_by_what_the_model_took(tmp_path: Any) -> None:
    code = textwrap.dedent(RESIDENT)
    run = subprocess.run(
        [sys.executable, "-c", code], env={**__import__("os").environ, "STORE": str(tmp_path / "store")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) > 80, "of 100 MB"


def test_the_users_own_tensors_stay_as_they_are() -> None:
    model = zoo.gpt2()[0]
    before = copy.deepcopy(model.state_dict())
    source = Source(model)
    source.let_go([name for name, _ in model.named_parameters()])
    assert source.model is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Tied(nn.Module):
    """Parameters under two names and in a list; weights that are computed, buffers, and a bound method kept."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.b.weight = self.a.weight
        self.listed = [self.a.bias]
        self.normed = torch.nn.utils.weight_norm(nn.Linear(SIZE, SIZE))
        self.modern = torch.nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.register_buffer("table", torch.arange(SIZE, dtype=torch.float64))
        self.scale = torch.full((SIZE,), 2.0, dtype=torch.float64)
        self.call = self.b.forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.call(self.a(x)) + self.listed[0] + self.table * self.scale
        return self.lstm(self.modern(self.normed(x)))[0].square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_skeleton_is_the_same_model_without_values() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    model(torch.ones(2, 3, SIZE, dtype=torch.float64))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    made = meta_copy_of(model, names)
    assert [name for name, _ in made.named_parameters(remove_duplicate=False)] == names
    assert not any(p.untyped_storage().nbytes() for p in made.parameters())
    assert made.b.weight is made.a.weight and made.listed[0] is made.a.bias
    assert made.call.__self__ is made.b and made.table is model.table
    assert list(made.state_dict()) == list(model.state_dict())
    x = torch.randn(2, 3, SIZE, dtype=torch.float64)
    assert (
        autopart.plan(made, "tp2", example_args=(x,)).parameters
        == autopart.plan(model, "tp2", example_args=(x,)).parameters
    )


def test_parameters_that_no_call_has_read_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    made = meta_copy_of(model, ["0.weight", "0.bias"])
    assert not made[0].weight.untyped_storage().nbytes() and made[1].weight is model[1].weight


class Closing(nn.Module):
    """A function that it keeps refers to a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        part = nn.Linear(SIZE, SIZE)
        self.part, self.function = part, lambda x: part(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("only one of these")


def kept(build: Any) -> tuple[list[str], bool, float]:
    torch.manual_seed(0)
    model = build()
    held = weakref.ref(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pm = autopart.parallelize(model, "tp2", example_args=(torch.ones(4, SIZE),))
    del model
    gc.collect()
    return [str(w.message) for w in seen], held() is not None, pm(torch.ones(8, SIZE)).sum().item()


@pytest.mark.large
@pytest.mark.parametrize(
    ("build", "why"),
    [(Closing, "the model's own module 'part'"), (lambda: Uncopied(SIZE, SIZE), "only one of these")],
)
def test_a_model_that_has_no_skeleton_is_kept_with_a_warning(build: Any, why: str) -> None:
    model = build()
    with pytest.raises(CannotCopy, match=why):
        meta_copy_of(model, [name for name, _ in model.named_parameters()])
    source = Source(model)
    with pytest.warns(UserWarning, match=rf"every rank keeps the full {type(model).__name__} in memory.*{why}"):
        source.let_go([name for name, _ in model.named_parameters()])
    held = weakref.ref(model)
    del model
    gc.collect()
    assert source.model is held()


def test_ranks_run_a_model_that_has_no_skeleton() -> None:
    torch.manual_seed(0)
    expected = Closing()(torch.ones(8, SIZE)).sum().item()
    for told, alive, total in dist.run_ranks(kept, 2, Closing):
        assert alive and total == pytest.approx(expected, rel=1e-5)
        assert [text for text in told if "every rank keeps the full Closing" in text]

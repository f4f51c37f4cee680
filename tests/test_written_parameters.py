"""Parameters that a model writes in its forward: frozen ones, as the weights of a teacher that follows its student, and
trained ones that it clamps or scales before it reads them."""

import copy

import dist
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError

WIDTH = 8


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Twins(nn.Module):
    """A student that is compared with the moving average of itself. In eval mode nothing is written."""

    def __init__(self, way: str = "no_grad"):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.student, self.teacher = way, layers(), layers().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        return (self.student(x) - self.teacher(x + 1)).square().mean()

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.way == "data":
                old.data = old.data * 0.9 + new.data * 0.1
            elif self.way == "copy":
                old.data.copy_(new.data)
            else:
                with torch.no_grad():
                    old.mul_(0.9).add_(new, alpha=0.1)


def rows(seed: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


SETUPS = [("dp2", {}), ("tp2", {}), ("dp2", {"zero": 3}), ("pp2", {"microbatches": 4}), ("pp2,dp2,tp2", {})]


@pytest.mark.parametrize("way", ["no_grad", "data", "copy"])
@pytest.mark.parametrize(("mesh", "options"), SETUPS, ids=str)
def test_a_teacher_follows_its_student(way, mesh, options):
    found = autopart.verify(Twins(way), mesh, example_args=(rows(),), steps=2, **options)
    assert found.ok and found.max_error < 1e-10, str(found)
    assert "buffer teacher.0.weight" in found.errors and "step 2 buffer teacher.0.weight" in found.errors


def test_a_fault_of_what_is_written_is_found():
    def tamper(program, shards):
        for stage in program.stages:
            for node in stage.graph.graph.nodes:
                if node.kwargs.get("alpha") == 0.1:
                    node.kwargs = {"alpha": 0.2}

    assert not autopart.verify(Twins(), "dp2", example_args=(rows(),), tamper=tamper).ok


def train(mesh: str, options: dict) -> tuple:
    model = Twins()
    pm = autopart.parallelize(model, mesh, example_args=(rows(),), **options)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for step in range(3):
        pm.step(rows(step))
        optimizer.step()
        optimizer.zero_grad()
    pm.eval()
    loss = pm(rows(7)) if "pp" not in mesh else None
    return loss, pm.full_state_dict(), sorted(name for name, _ in pm.named_buffers())


@pytest.mark.whole
@pytest.mark.parametrize(("mesh", "options"), SETUPS[1:4], ids=str)
def test_processes_train_as_one_device(mesh, options):
    model = Twins()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model.eval()(rows(7))
    for loss, state, buffers in dist.run_ranks(train, 2, mesh, options):
        assert loss is None or torch.allclose(loss, expected, atol=1e-6)
        assert list(state) == list(model.state_dict())
        assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in model.state_dict().items())
        assert buffers == sorted(name for name, _ in model.named_parameters() if name.startswith("teacher"))


def test_a_plan_made_in_training_serves_a_verification(tmp_path):
    plan = autopart.plan(Twins(), "tp2", example_args=(rows(),))
    assert not [name for name in plan.parameters if name.startswith("teacher")]
    plan.save(tmp_path / "plan.json")
    assert autopart.verify(Twins(), "tp2", example_args=(rows(),), plan=tmp_path / "plan.json").ok


def first_in_eval_mode() -> str:
    model = Twins().eval()
    pm = autopart.parallelize(model, "dp2", example_args=(rows(),))
    pm.train()
    with pytest.raises(TraceError) as caught:
        pm.step(rows())
    return str(caught.value)


def test_a_call_that_writes_what_was_only_read_is_refused():
    for text in dist.run_ranks(first_in_eval_mode, 2):
        assert text == (
            "this call of Twins writes to its frozen parameter 'teacher.0.bias'\n"
            "  why    calls before it did not, and by these it is stored as what is only read\n"
            "  try    parallelize(model, mesh, example_kwargs=batch) with a call that writes it, in train mode"
        )


def test_the_user_s_model_stays_as_it_is():
    model = Twins()
    before = copy.deepcopy(model.state_dict())
    autopart.verify(model, "dp2", example_args=(rows(),), steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Bounded(nn.Module):
    """Changes trained weights, element by element, before it reads them."""

    def __init__(self, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.inner, self.out = way, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bound()
        return (self.scale * self.out(self.inner(x).tanh())).square().mean()

    def bound(self) -> None:
        if self.way == "clamp":
            self.inner.weight.data.clamp_(-0.1, 0.1)
            self.scale.data.clamp_(0, 1)
        elif self.way == "set":
            self.inner.weight.data = self.inner.weight.data * 0.9
        elif self.way == "norm":
            self.inner.weight.data.div_(self.inner.weight.data.norm())
        else:
            with torch.no_grad():
                self.inner.weight.mul_(0.5)
                self.out.bias.abs_()


@pytest.mark.parametrize("way", ["clamp", "set", "scale"])
@pytest.mark.parametrize(("mesh", "options"), [*SETUPS, ("dp2", {"microbatches": 2, "recompute": "full"})], ids=str)
def test_trained_weights_are_changed_where_they_are_stored(way, mesh, options):
    """Scaling is not idempotent: done once more in a backward, or for each microbatch, it would show."""
    found = autopart.verify(Bounded(way), mesh, example_args=(rows(),), steps=2, **options)
    assert found.ok and found.max_error < 1e-10 and "step 2 weight inner.weight" in found.errors, str(found)


def test_a_change_that_is_left_out_is_found():
    def tamper(program, shards):
        program.weight_updates.clear()

    assert not autopart.verify(Bounded("scale"), "tp2", example_args=(rows(),), tamper=tamper).ok


def train_bounded(mesh: str, options: dict) -> tuple:
    pm = autopart.parallelize(Bounded("scale"), mesh, example_args=(rows(),), **options)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        losses.append(float(pm.step(rows(step))))
        optimizer.step()
        optimizer.zero_grad()
    if "pp" not in mesh:
        pm(rows(3)).backward()
        optimizer.step()
    return losses, pm.full_state_dict()


@pytest.mark.whole
@pytest.mark.parametrize(("mesh", "options"), SETUPS[1:4], ids=str)
def test_processes_change_trained_weights_as_one_device(mesh, options):
    model, losses = Bounded("scale"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3 if "pp" in mesh else 4):
        losses.append(model(rows(step)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, state in dist.run_ranks(train_bounded, 2, mesh, options):
        assert found == pytest.approx([float(loss) for loss in losses[:3]], rel=1e-5)
        assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in model.state_dict().items())


class Early(Bounded):
    """Reads a weight before it changes it."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.inner(x)
        self.bound()
        return (self.out(before) - self.out(self.inner(x))).square().mean()


WRONG = {
    "a norm": (Bounded("norm"), "it reads more than the parameter's own elements, one by one"),
    "read before": (Early("scale"), "the old value is read too"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_changes_of_trained_weights_are_refused(name):
    model, why = WRONG[name]
    with pytest.raises(TraceError) as caught:
        autopart.plan(model, "dp2", example_args=(rows(),))
    first, second, where, hint = str(caught.value).splitlines()
    assert first == f"{type(model).__name__} writes to its trained parameter 'inner.weight' in its forward"
    assert second == f"  why    {why}" and "test_written_parameters.py" in where
    assert hint == (
        "  try    do it outside forward(), after the optimizer's step; or clamp_, mul_ and the like before it is read"
    )


class MovesItsWeight(nn.Module):
    """Assigns its weight's data to itself, where it has the device and dtype of the input already."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.to(x.device, x.dtype)
        return self.linear(x)


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_data_assigned_to_itself_changes_nothing(mesh):
    model, x = MovesItsWeight(), torch.randn(4, 16)
    before = model.linear.weight.detach().clone()
    result = autopart.verify(model, mesh, example_args=(x,))
    assert result.ok and result.max_error < 1e-10, result
    assert torch.equal(model.linear.weight, before)

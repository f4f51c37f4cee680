"""Parameters that a model writes in its forward: frozen ones, as the weights of a teacher that follows its student, and
trained ones that it clamps or scales before it reads them, whole or by the rows of a table that it looks up."""

import copy
from functools import partial

import dist
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError
from autopart.runtime import lockstep
from autopart.runtime.graphs import apply_weight_updates

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


@pytest.mark.few
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


@pytest.mark.large
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
            "  why    earlier calls only read it, so it may be stored sharded\n"
            "  try    parallelize(model, mesh, example_kwargs=batch) with a call that writes it, in train mode"
        )


@pytest.mark.large
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


@pytest.mark.few
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


@pytest.mark.few
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


class Table(nn.Module):
    """Rows of a table that are scaled as they are looked up, twice in a forward; its head reads them all."""

    def __init__(self, kind: str = "rows", norm_type: float = 2.0):
        super().__init__()
        torch.manual_seed(0)
        bag = kind == "bags"
        make = partial(nn.EmbeddingBag, mode="sum") if bag else nn.Embedding
        self.words, self.inner = make(12, WIDTH, max_norm=1.0, norm_type=norm_type), nn.Linear(WIDTH, WIDTH)
        self.others = self.words if kind == "twice" else make(12, WIDTH, max_norm=0.5)
        self.head = nn.Linear(WIDTH, 12, bias=False)
        if kind == "tied":
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.inner(self.words(ids)) * self.others(labels)
        return nn.functional.cross_entropy(
            self.head(hidden).flatten(0, -2), labels.flatten()[: hidden.shape[:-1].numel()]
        )


def ids(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(12, (8, 3), generator=generator), torch.randint(12, (8, 3), generator=generator)


TABLES = [
    *SETUPS,
    ("tp2", {"pins": {"words.weight": {"tp": "S(0)"}}}),
    ("tp2", {"pins": {"words.weight": {"tp": "S(1)"}}}),
    ("dp2,tp2", {"zero": 3, "pins": {"words.weight": {"tp": "S(1)"}}}),
    ("dpr2,dp2", {"zero": 1}),
    ("dp2", {"zero": 2, "microbatches": 2, "recompute": "full"}),
]


@pytest.mark.large
@pytest.mark.parametrize("kind", ["rows", "twice", "tied", "bags"])
@pytest.mark.parametrize(("mesh", "options"), TABLES, ids=str)
def test_rows_of_a_table_are_scaled_where_they_are_stored(kind, mesh, options):
    batches = [dict(zip(("ids", "labels"), ids(seed), strict=True)) for seed in range(3)]
    found = autopart.verify(Table(kind), mesh, example_args=ids(), steps=3, batches=batches, **options)
    assert found.ok and found.max_error < 1e-10 and "step 2 weight words.weight" in found.errors, str(found)


@pytest.mark.few
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows"])
def test_a_part_of_a_table_that_is_not_seen_is_found(columns, monkeypatch):
    """Norms of a rank's own columns alone; the first rows for every rank."""
    if columns:
        monkeypatch.setattr(lockstep, "_sum_along", lambda mesh, axis, values: values)
    else:
        monkeypatch.setattr(apply_weight_updates, "local_shard_of", lambda rows, cuts: rows[: len(rows) // 2])
    pins = {"words.weight": {"tp": "S(1)" if columns else "S(0)"}}
    assert not autopart.verify(Table(), "tp2", example_args=ids(), pins=pins).ok


def train_table(mesh: str, options: dict) -> tuple:
    pm = autopart.parallelize(Table("tied"), mesh, example_args=ids(), **options)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for step in range(3):
        pm.step(*ids(step))
        pm.step(*ids(step + 3))  # which looks up other rows, of the same weights
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = pm(*ids(7)) if "pp" not in mesh else None
    return loss, pm.full_state_dict()


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "options"), [*SETUPS[2:4], *TABLES[6:7], ("dp2", {"zero": 1})], ids=str)
def test_processes_scale_rows_as_one_device(mesh, options):
    model = Table("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(*ids(step)).backward()
        model(*ids(step + 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model(*ids(7)) if "pp" not in mesh else None
    for loss, state in dist.run_ranks(train_table, 2, mesh, options):
        assert loss is None or torch.allclose(loss, expected, atol=1e-6)
        assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in model.state_dict().items())


def train_own_rows() -> torch.Tensor:
    mine = slice(4 * torch.distributed.get_rank(), None), slice(None)
    pm = autopart.parallelize(Table("tied"), "dp2", example_args=[x[mine][:4] for x in ids()], local_batch=True)
    pm.step(*[x[mine][:4] for x in ids()])
    return pm.full_state_dict()["words.weight"]


def test_every_rank_scales_the_rows_that_the_others_look_up():
    model = Table("tied")
    model(*ids())
    for weight in dist.run_ranks(train_own_rows, 2):
        assert torch.allclose(weight, model.words.weight, atol=1e-6)


class TwoNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        first, second = (nn.functional.embedding(ids, self.words.weight, max_norm=norm) for norm in (1.0, 0.5))
        return (first * second).sum()


class Early(Bounded):
    """Reads a weight before it changes it."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.inner(x)
        self.bound()
        return (self.out(before) - self.out(self.inner(x))).square().mean()


WRONG = {
    "a norm": (Bounded("norm"), "the new value of an element depends on more than its old value"),
    "read before": (Early("scale"), "forward() reads the old value too"),
    "two norms": (TwoNorms(), "the new value of an element depends on more than its old value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_changes_of_trained_weights_are_refused(name):
    model, why = WRONG[name]
    with pytest.raises(TraceError) as caught:
        autopart.plan(model, "dp2", example_args=ids()[:1] if name == "two norms" else (rows(),))
    first, second, where, hint = str(caught.value).splitlines()
    parameter = "words.weight" if name == "two norms" else "inner.weight"
    assert first == f"{type(model).__name__} writes to its trained parameter '{parameter}' in its forward"
    assert second == f"  why    {why}" and "test_written_parameters.py" in where
    assert hint == (
        "  try    change it outside forward(), after optimizer.step(); in forward(), only by clamp_, mul_ and other "
        "elementwise operations before its first use"
    )


class MovesItsWeight(nn.Module):
    """Assigns its weight's data to itself, where it has the device and dtype of the input already."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.to(x.device, x.dtype)
        return self.linear(x)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_data_assigned_to_itself_changes_nothing(mesh):
    model, x = MovesItsWeight(), torch.randn(4, 16)
    before = model.linear.weight.detach().clone()
    result = autopart.verify(model, mesh, example_args=(x,))
    assert result.ok and result.max_error < 1e-10, result
    assert torch.equal(model.linear.weight, before)

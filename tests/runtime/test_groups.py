"""What users make of `pm.named_parameters()`: groups by the model's own names, averages, frozen parts, LoRA.

Every loop is run for three steps on processes, and in one process on the model itself, in double precision.
"""

import copy
from collections.abc import Iterable

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopart
from autopart.ir.mesh import Mesh

TIMEOUT_S = 150.0
MESHES = {"tp2": {}, "dp2 zero": {"zero": 3}, "pp2": {"microbatches": 2}}


def run(fn, name, *args):
    mesh = name.split()[0]
    return dist.run_ranks(fn, Mesh.parse(mesh).num_ranks, mesh, MESHES[name], *args, timeout_s=TIMEOUT_S)


def example():
    """A GPT-2 with a tied weight, norms and biases, and three batches."""
    model, first = zoo.gpt2(hidden=32, heads=4, vocab=32, rows=4, seq=8)
    generator = torch.Generator().manual_seed(2)
    batches = [first]
    for _ in range(2):
        ids = torch.randint(3, 32, (4, 8), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return model, batches


def groups(module: nn.Module) -> list[dict]:
    """Weight decay but for norms and biases, by name, as everyone writes it; an embedding with a rate of its own."""
    no_decay, table, rest = [], [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_plain = name.endswith("bias") or "ln_" in name or "norm" in name
        (no_decay if is_plain else table if "wte" in name or "embed" in name else rest).append(parameter)
    return [
        {"params": rest, "weight_decay": 0.1},
        {"params": no_decay, "weight_decay": 0.0},
        {"params": table, "weight_decay": 0.1, "lr": 1e-2},
    ]


def same_weights(pm, model, tol=1e-10):
    found, expected = pm.full_state_dict(), model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tol, name


def trained(pm, model, batches, optimizers, after=lambda: None):
    """Three steps of both, with clipping."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches:
        pm.step(**batch)
        model(**batch).loss.backward()
        for module, optimizer in zip((pm, model), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        after()
    same_weights(pm, model)
    return {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}


# --- names and groups ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=True),
    "Adam fused": lambda groups: torch.optim.Adam(groups, lr=1e-3, fused=True),
    "Adam foreach": lambda groups: torch.optim.Adam(groups, lr=1e-3, amsgrad=True, foreach=True),
    "SGD fused": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, fused=True),
    "SGD foreach": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True, foreach=True),
}


def by_name(mesh, options, optimizer):
    """The names of this rank's parameters, of which the tied one has two; what it trains equals one process."""
    model, batches = example()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0], **options)
    moved = trained(pm, model, batches, [OPTIMIZERS[optimizer](groups(module)) for module in (pm, model)])
    assert moved == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = [name for name, _ in pm.named_parameters()], [n for n, _ in pm.named_parameters(remove_duplicate=False)]
    sizes = [[p.numel() for p in group["params"]] for group in groups(pm)]
    return names, sizes


def is_subsequence(some: Iterable[str], names: Iterable[str]) -> bool:
    rest = iter(names)
    return all(name in rest for name in some)


@pytest.mark.large
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MESHES)
def test_groups_by_the_models_own_names(name, optimizer):
    model, _ = example()
    reports = run(by_name, name, optimizer)
    for remove_duplicate in (True, False):
        names = [key for key, _ in model.named_parameters(remove_duplicate=remove_duplicate)]
        of_ranks = [rank_names[not remove_duplicate] for rank_names, _ in reports]
        assert all(is_subsequence(found, names) for found in of_ranks)
        assert {key for found in of_ranks for key in found} == set(names)
        if name != "pp2":
            assert of_ranks == [names] * 2
    assert all(all(sizes) for _, sizes in reports), "a group is empty: its options were not tried"


# --- averages ------------------------------------------------------------------------------------------------------


def averaged(mesh, options):
    """`AveragedModel` with torch's own moving average, one by hand, and one by hand of names."""
    model, batches = example()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0], **options)
    ema = [AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for module in (pm, model)]
    copies = [copy.deepcopy(module).requires_grad_(False) for module in (pm, model)]
    named = [{name: p.detach().clone() for name, p in module.named_parameters()} for module in (pm, model)]

    @torch.no_grad()
    def update():
        for module, average, by_hand, by_name in zip((pm, model), ema, copies, named, strict=True):
            average.update_parameters(module)
            for old, new in zip(by_hand.parameters(), module.parameters(), strict=True):
                old.lerp_(new, 0.1)
            for name, new in module.named_parameters():
                by_name[name].lerp_(new, 0.1)

    trained(pm, model, batches, [torch.optim.AdamW(groups(module), lr=1e-2) for module in (pm, model)], update)
    same_weights(ema[0].module, ema[1].module)
    same_weights(*copies)
    assert not torch.equal(ema[1].module.lm_head.weight, model.lm_head.weight)
    assert all(torch.equal(named[0][name], p) for name, p in copies[0].named_parameters())
    for average, expected in ((ema[0], ema[1]), copies):
        average.eval(), expected.eval()
        with torch.no_grad():
            zoo.assert_close_outputs(average(**batches[0]).loss, expected(**batches[0]).loss)


@pytest.mark.large
@pytest.mark.parametrize("name", MESHES)
def test_moving_averages(name):
    run(averaged, name)


# --- frozen parts and adapters -------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer beside two small trained matrices (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, base: nn.Module, rank: int = 2):
        super().__init__()
        inside, outside = base.weight.shape  # of transformers' Conv1D
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inside, rank, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(rank, outside, dtype=base.weight.dtype) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.down) @ self.up


def with_adapters() -> tuple[nn.Module, list[dict]]:
    model, batches = example()
    torch.manual_seed(4)
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn)
        block.mlp.c_fc = Adapted(block.mlp.c_fc)
    return model, batches


def with_peft() -> tuple[nn.Module, list[dict]]:
    import peft

    model, batches = zoo.llama(hidden=32, heads=4, vocab=32, rows=4, seq=8)[0], example()[1]
    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False,
        modules_to_save=["lm_head"],
    )  # fmt: skip
    return peft.get_peft_model(model, config).double().train(), batches


def only_blocks() -> tuple[nn.Module, list[dict]]:
    """The embeddings and the first block frozen before."""
    model, batches = example()
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return model, batches


def adapted(mesh, options, make):
    """Trained parts alone move; the others are read by their names, and have no gradient."""
    model, batches = make()
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batches[0], **options)
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in pm.named_parameters()}.items() <= trains.items()
    optimizers = []
    for module in (pm, model):
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizers.append(torch.optim.AdamW(parameters, lr=1e-2) if parameters else None)
    if any(optimizer is None for optimizer in optimizers):
        raise AssertionError("this rank trains nothing")
    moved = trained(pm, model, batches, optimizers)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - trains.keys()
    assert moved - tied == {name for name, trained in trains.items() if trained}
    pm.step(**batches[0])
    model(**batches[0]).loss.backward()
    assert set(pm.full_grads()) == {name for name, trained in trains.items() if trained}
    return sum(p.numel() for p in pm.parameters() if p.grad is None)


@pytest.mark.few
@pytest.mark.parametrize("make", [with_adapters, with_peft, only_blocks], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", MESHES)
def test_small_trained_parts_beside_frozen_ones(name, make):
    if make is with_peft:
        pytest.importorskip("peft")
    assert all(frozen > 0 for frozen in run(adapted, name, make))

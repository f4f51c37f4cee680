"""What people do with an `nn.Module` beside calling it: right on a partitioned one, or refused in words."""

import copy
import pickle

import pytest
import torch
import zoo
from step_models import batch, grads_of, run, same_grads, small
from torch import nn
from torch.optim.swa_utils import AveragedModel

import autopart
from autopart.errors import UsageError

MESHES = ("tp2", "dp2", "pp2")


def made(mesh, model=None, **options):
    model = model or small()
    return model, autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch(), **options)


def trained(model):
    """A plain step of the model; returns its gradients."""
    model.zero_grad()
    model(**batch())["loss"].backward()
    return grads_of(model)


def told(use, kind=UsageError):
    with pytest.raises(kind) as error:
        use()
    return str(error.value).splitlines()[0]


# --- backward() through a pipeline ---------------------------------------------------------------------------------


def backward_by_hand(mesh):
    model, pm = made(mesh)
    outputs = pm(**batch())
    zoo.assert_close_outputs(outputs, model(**batch()))
    assert outputs["loss"].requires_grad and outputs["logits"].requires_grad and not outputs["last"].requires_grad
    outputs["logits"][0] = 0.0  # a plain tensor, not a view
    texts = {told(outputs["loss"].backward), told((2 * outputs["logits"]).sum().backward)}
    with torch.no_grad():
        silent = pm(**batch())
    assert not any(torch.is_tensor(leaf) and leaf.requires_grad for leaf in silent.values())
    assert pm.full_grads() == {}
    loss = pm.step(**batch())
    same_grads(pm, trained(model))
    total = torch.zeros((), dtype=torch.float64)
    total += loss
    assert loss.item() == total.item() == float(loss.numpy()) and not loss.requires_grad
    return texts


@pytest.mark.parametrize("mesh", ["pp2"])
def test_backward_through_a_pipeline_says_what_to_do(mesh):
    assert run(backward_by_hand, mesh) == [{"backward() does not go through a pipeline"}] * 2


# --- hooks on parameters -------------------------------------------------------------------------------------------


def same_weights(pm, model):
    found, expected = pm.full_state_dict(), model.state_dict()
    for name, value in expected.items():
        zoo.assert_close_outputs(found[name], value, where=name)


def optimizer_in_backward(mesh, own_loop=False, **options):
    """Adam in hooks that run once a gradient is complete, over two steps of several microbatches."""
    model, pm = made(mesh, **options)
    modules = (pm, model)
    for module in modules:
        optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in module.parameters()}

        def update(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in module.parameters():
            p.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        pm(**batch())["loss"].backward() if own_loop else pm.step(**batch())
        assert all(p.grad is None for p in pm.parameters())
        model(**batch())["loss"].backward()
    same_weights(pm, model)


@pytest.mark.few
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp2", {"microbatches": 2}),
        ("dp2", {"microbatches": 2}),
        ("pp2", {"microbatches": 4}),
        ("dp2,tp2", {"own_loop": True}),
        ("dp2", {"zero": 3, "own_loop": True}),
    ],
)
def test_hooks_after_accumulation_see_complete_gradients(mesh, options):
    run(optimizer_in_backward, mesh, **options)


def clamped(mesh, own_loop=False, **options):
    """A hook that is not linear sees the gradient of the whole batch once a step, before it is added to `.grad`."""
    model, pm = made(mesh, **options)
    seen = []
    for module in (pm, model):
        for name, p in module.named_parameters():
            p.register_hook(lambda grad, name=name: (seen.append(name), grad.clamp(-1e-3, 1e-3))[1])
    names = [name for name, _ in model.named_parameters()]
    for _ in range(2):
        seen.clear()
        pm(**batch())["loss"].backward() if own_loop else pm.step(**batch())
        assert len(seen) == len(set(seen)) and set(seen) <= set(names)
        model(**batch())["loss"].backward()
    same_grads(pm, grads_of(model))
    handles = [p.register_hook(lambda grad: 0 * grad) for p in pm.parameters()]
    for handle in handles:
        handle.remove()
    pm.step(**batch())
    model(**batch())["loss"].backward()
    same_grads(pm, grads_of(model))


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp2", {"microbatches": 2}), ("pp2", {"microbatches": 4}), ("dp2", {"own_loop": True})]
)
def test_hooks_on_gradients_see_complete_ones(mesh, options):
    run(clamped, mesh, **options)


def hook_on_a_part(mesh, **options):
    _, pm = made(mesh, **options)
    cut = next(p for _, p in pm.named_parameters() if autopart.runtime.shards.shard_owners.shard_info_of(p).cuts)
    handle = cut.register_hook(lambda grad: grad / grad.norm())
    texts = [told(lambda: pm.step(**batch())), told(lambda: pm(**batch()))]
    with torch.no_grad():
        pm(**batch())
    handle.remove()
    pm.step(**batch())
    return texts


@pytest.mark.parametrize(("mesh", "options"), [("tp2", {}), ("dp2", {"zero": 3})])
def test_a_hook_on_the_gradient_of_a_part_is_refused(mesh, options):
    for texts in run(hook_on_a_part, mesh, **options):
        assert all("has a hook on its gradient (register_hook), and is sharded over" in text for text in texts)


def test_hooks_on_the_models_own_parameters_are_refused():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = small()
        getattr(model.head.weight, register)(lambda grad: None)
        with pytest.raises(UsageError, match=r"parameter 'head.weight' has a hook"):
            autopart.parallelize(model, "tp1", example_kwargs=batch())


def test_hooks_of_modules():
    model, pm = made("tp1")
    calls = []
    handles = [
        pm.register_forward_pre_hook(lambda *_: calls.append("before")),
        pm.register_forward_hook(lambda *_: calls.append("after")),
    ]
    pm(**batch())["loss"].backward()
    assert calls == ["before", "after"]
    same_grads(pm, trained(model))
    assert "pm has a hook" in told(lambda: pm.step(**batch()))
    for handle in handles:
        handle.remove()
    pm.step(**batch())
    layer = pm.ups[0]
    for name in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        assert "would never run" in told(lambda name=name: getattr(layer, name)(print))


# --- copies --------------------------------------------------------------------------------------------------------


def moving_average(mesh, **options):
    model, pm = made(mesh, small(norm=True), **options)
    ema, plain_ema = copy.deepcopy(pm), copy.deepcopy(model)
    averaged, plain_averaged = AveragedModel(pm, use_buffers=False), AveragedModel(model, use_buffers=False)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (pm, model)]
    for _ in range(2):
        pm.zero_grad()
        trained(model)
        pm.step(**batch())
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for of, to in ((pm, ema), (model, plain_ema)):
                for e, p in zip(to.parameters(), of.parameters(), strict=True):
                    e.lerp_(p, 0.1)
        averaged.update_parameters(pm)
        plain_averaged.update_parameters(model)
    for module, plain in ((pm, model), (ema, plain_ema), (averaged, plain_averaged)):
        module.eval(), plain.eval()
        with torch.no_grad():
            zoo.assert_close_outputs(module(**batch()), plain(**batch()))
    same_weights(ema, plain_ema)
    same_weights(averaged.module, plain_averaged.module)
    same_weights(pm, model)
    assert all(e.grad is None for e in ema.parameters())
    ema.train(), plain_ema.train()
    ema.step(**batch())
    same_grads(ema, trained(plain_ema))
    pm.zero_grad()
    assert pm.full_grads() == {}


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "options"), [("tp2", {}), ("dp2", {"zero": 3}), ("pp2", {"microbatches": 1})])
def test_moving_averages_of_a_copy(mesh, options):
    run(moving_average, mesh, **options)


def test_a_copy_of_what_is_not_traced():
    pm = autopart.parallelize(small(), "tp1")
    assert told(lambda: copy.deepcopy(pm)) == "copy.deepcopy(pm) comes too early"


def test_pickles_are_refused():
    _, pm = made("tp1")
    assert told(lambda: copy.copy(pm)) == "copy.copy() of a partitioned model is not supported"
    for use in (lambda: pickle.dumps(pm), lambda: torch.save(pm, "/dev/null")):
        assert told(use) == "a partitioned model cannot be pickled"


# --- frozen parameters ---------------------------------------------------------------------------------------------


def frozen_later(mesh, **options):
    """Frozen after parallelize: no gradient, as on one device; thawed again: trained again."""
    model, pm = made(mesh, **options)
    for freeze in (("embedding", "ups.0"), ("head", "downs"), ("embedding", "ups", "downs.0")):
        for module in (pm, model):
            for name, p in module.named_parameters():
                p.requires_grad_(not name.startswith(freeze))
        pm.zero_grad()
        pm.step(**batch())
        same_grads(pm, trained(model))
    pm.requires_grad_(True)
    model.requires_grad_(True)
    pm.zero_grad()
    pm.step(**batch())
    same_grads(pm, trained(model))


@pytest.mark.few
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp2", {}),
        ("dp2", {"zero": 3, "recompute": "full"}),
        ("pp2", {"microbatches": 4}),
        ("pp2", {"schedule": "zbv", "microbatches": 4}),
    ],
)
def test_parameters_frozen_after_parallelize(mesh, options):
    run(frozen_later, mesh, **options)


def test_parameters_that_were_frozen_in_the_trace():
    model = small()
    model.head.requires_grad_(False)
    _, pm = made("tp1", model)
    pm.step(**batch())
    pm.head.weight.requires_grad_(True)
    for use in (lambda: pm.step(**batch()), lambda: pm(**batch())):
        assert "'head.weight' was frozen when the model was traced" in told(use)


def test_the_models_own_parameters_frozen_later():
    model = small()
    pm = autopart.parallelize(model, "tp1", example_kwargs=batch())
    pm.step(**batch())
    model.head.requires_grad_(False)
    pm.step(**batch())
    assert "'head.weight' was frozen after parallelize()" in told(lambda: pm.step(**batch(rows=2)))


def thawed_on_one_stage(mesh):
    model = small()
    model.head.requires_grad_(False)
    _, pm = made(mesh, model)
    pm.requires_grad_(True)
    with pytest.raises(autopart.AutopartError) as error:
        pm.step(**batch())
    return str(error.value)


def test_what_is_wrong_on_one_rank_is_told_on_all():
    texts = run(thawed_on_one_stage, "pp2")
    assert texts[0] == texts[1]
    assert "'head.weight' was frozen when the model was traced" in texts[0]


# --- conversions, attributes, layers -------------------------------------------------------------------------------


def conversions(mesh):
    _, pm = made(mesh)
    for same in (
        pm.double,
        pm.cpu,
        lambda: pm.to("cpu"),
        lambda: pm.to(torch.float64),
        lambda: nn.ModuleList([pm]).double(),
    ):
        same()
    uses = (
        pm.half,
        pm.float,
        pm.bfloat16,
        lambda: pm.to(torch.float32),
        lambda: pm.to("meta"),
    )
    assert told(lambda: pm.to_empty(device="cpu")) == "to_empty() of a partitioned model would lose its values"
    texts = {told(use) for use in (*uses, lambda: nn.ModuleList([pm]).half())}
    pm.step(**batch())
    return texts


@pytest.mark.parametrize("mesh", ["tp1", "pp2"])
def test_conversions(mesh):
    expected = {"a partitioned model keeps the dtype and device it was made with"}
    assert (conversions(mesh) if mesh == "tp1" else run(conversions, mesh)[0]) == expected


def in_ddp(mesh):
    _, pm = made(mesh)
    before = pm.head.weight.detach().clone()
    text = told(lambda: nn.parallel.DistributedDataParallel(pm))
    assert torch.equal(pm.head.weight, before)
    return text


def test_distributed_data_parallel_around_it_is_refused():
    assert run(in_ddp, "tp2") == ["DistributedDataParallel cannot wrap a partitioned model"] * 2


def called_with_nan(mesh):
    x = torch.full((2, 4), float("nan"), dtype=torch.float64)
    outputs = autopart.parallelize(nn.Linear(4, 4).double(), mesh, example_args=(x,))(x)
    return bool(x.isnan().all() and outputs.isnan().all()) and x._version == 0


def test_inputs_are_not_written():
    assert run(called_with_nan, "dp2") == [True, True]


def test_conversions_before_the_trace():
    pm = autopart.parallelize(small(), "tp1")
    pm.double()
    assert "keeps the dtype" in told(pm.half)


def test_attributes_of_the_model():
    model, data = zoo.gpt2()
    pm = autopart.parallelize(model, "tp1", example_kwargs=data)
    assert pm.config is model.config and pm.loss_type == model.loss_type
    assert not hasattr(pm, "no_such_thing") and not hasattr(pm, "_no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        pm.no_such_thing  # noqa: B018
    assert told(lambda: setattr(pm, "config", {})) == "setting 'config' of a partitioned model would change nothing"
    pm.loss_type = "other"
    assert pm.loss_type == "other" and pm._modes.settings.values[0][:3] == ("", "loss_type", "'other'")
    pm.my_own_note = 3
    assert pm.my_own_note == 3


def test_layers_hold_parameters_alone():
    model, pm = made("tp1")
    assert pm.ups[0].weight is dict(pm.named_parameters())["ups.0.weight"] is pm.ups[-2].weight
    assert len(pm.ups) == 2 == len(list(pm.ups)) and pm.head
    with pytest.raises(IndexError):
        pm.ups[2]
    assert "cannot be called alone" in told(lambda: pm.ups[0](torch.ones(1)))
    assert pm.ups[0].in_features == model.ups[0].in_features
    for use in (
        lambda: setattr(pm, "head", nn.Linear(2, 2)),
        lambda: setattr(pm.head, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: setattr(pm.ups[0], "slope", 2.0),
    ):
        assert "would change nothing" in told(use)
    assert "keeps the dtype" in told(pm.ups[0].half)
    assert "compiles nothing" in told(pm.compile)
    pm.train().eval()
    pm.train(model.training).zero_grad()


def test_gradients_that_no_ranks_sum_are_added_in_place():
    """A step holds no second gradient of theirs, however many came before it."""
    _, pm = made("dp1")
    pm.step(**batch())
    first = {name: (p.grad, p.grad.clone()) for name, p in pm.named_parameters()}
    pm.step(**batch())
    for name, parameter in pm.named_parameters():
        grad, once = first[name]
        assert parameter.grad is grad
        torch.testing.assert_close(grad, 2 * once, rtol=1e-12, atol=1e-12)

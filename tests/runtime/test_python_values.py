"""Values that Python reads in a call: a program follows them, as the model itself does."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import types
import warnings

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.errors import InputError, TraceError, UsageError

BETA = 1.0
LIMITS = {"low": -1.0, "nested": {"high": [1.0]}}
SCALES = [1.0, 2.0]
WEIGHTS = torch.ones(4, dtype=torch.float64)
COUNTED = {"calls": 0}
SCHEDULE = [1.0] * 1000


@dataclasses.dataclass
class Settings:
    beta: float = 1.0
    mode: str = "mean"

    def reduction(self):
        return self.mode


class Slotted:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 1.0


class Lookup:
    """Attributes that `__getattr__` computes, as configuration libraries do."""

    def __init__(self):
        self.__dict__["content"] = {"beta": 1.0}

    def __getattr__(self, name):
        return self.__dict__["content"][name]

    def __setattr__(self, name, value):
        self.__dict__["content"][name] = value


class Net(nn.Module):
    common = 1.0

    def __init__(self, compute, settings=None):
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 4)
        self.compute, self.settings, self.tau, self.flags = compute, settings, 1.0, {"double": False}
        self.names, self.act = [], torch.relu

    @property
    def temperature(self):
        return self.tau * 2

    def forward(self, x):
        return self.compute(self, self.head(self.drop(self.layer(x))))


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 6).double(), torch.arange(8) % 4


def net(compute=lambda model, h: h, settings=None):
    torch.manual_seed(0)
    return Net(compute, settings).double()


def follow(change, model=None, loss_fn=F.cross_entropy, mesh="tp1", steps=3):
    """Both losses of some steps, between which `change` is called."""
    model = net() if model is None else model
    x, y = batch()
    pm = autopart.parallelize(model, mesh, example_args=(x,))
    pairs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            change(1.0 + step, model)
            found = pm.step(x, loss_fn=loss_fn, target=y)
            pairs.append((found.item(), loss_fn(model(x), y).item(), pm(x), model(x)))
    return pairs


def check(*args, must_change=True, **kwargs):
    pairs = follow(*args, **kwargs)
    for found, expected, outputs, own in pairs:
        assert found == pytest.approx(expected, abs=1e-10)
        assert torch.allclose(outputs, own, atol=1e-10)
    assert not must_change or len({round(expected, 6) for _, expected, _, _ in pairs}) == len(pairs)


def set_global(value, model):
    global BETA
    BETA = value


def set_tensor(value, model):
    global WEIGHTS
    WEIGHTS = torch.full((4,), value, dtype=torch.float64)


SPACE, ARGS, SETTINGS = (
    types.SimpleNamespace(beta=1.0),
    argparse.Namespace(loss=types.SimpleNamespace(b=1.0)),
    Settings(),
)
SLOTTED, LOOKUP = Slotted(), Lookup()


def by_helper(o):
    return BETA * o


class Criterion:
    def __init__(self):
        self.weight = 1.0

    def __call__(self, o, t):
        return self.weight * F.cross_entropy(o, t)

    def method(self, o, t):
        return self(o, t)


CRITERION = Criterion()


def partly(settings, o, t):
    return settings.beta * F.cross_entropy(o, t)


LOSSES = {
    "global": (set_global, lambda o, t: BETA * F.cross_entropy(o, t)),
    "global in a function": (set_global, lambda o, t: by_helper(F.cross_entropy(o, t))),
    "namespace": (lambda v, m: setattr(SPACE, "beta", v), lambda o, t: SPACE.beta * F.cross_entropy(o, t)),
    "nested namespace": (lambda v, m: setattr(ARGS.loss, "b", v), lambda o, t: ARGS.loss.b * F.cross_entropy(o, t)),
    "another namespace": (lambda v, m: setattr(ARGS, "loss", types.SimpleNamespace(b=v)),
                          lambda o, t: ARGS.loss.b * F.cross_entropy(o, t)),
    "dataclass": (lambda v, m: setattr(SETTINGS, "beta", v), lambda o, t: SETTINGS.beta * F.cross_entropy(o, t)),
    "slots": (lambda v, m: setattr(SLOTTED, "beta", v), lambda o, t: SLOTTED.beta * F.cross_entropy(o, t)),
    "getattr of its own": (lambda v, m: setattr(LOOKUP, "beta", v), lambda o, t: LOOKUP.beta * F.cross_entropy(o, t)),
    "getattr by name": (lambda v, m: setattr(SPACE, "beta", v),
                        lambda o, t: getattr(SPACE, "be" + "ta", 0.0) * F.cross_entropy(o, t)),
    "getattr constant": (lambda v, m: setattr(SPACE, "gamma", v),
                         lambda o, t: getattr(SPACE, "gamma", 0) * F.cross_entropy(o, t)),
    "vars": (lambda v, m: setattr(SPACE, "beta", v), lambda o, t: vars(SPACE)["beta"] * F.cross_entropy(o, t)),
    "dict": (lambda v, m: LIMITS.update(low=-v), lambda o, t: -LIMITS["low"] * F.cross_entropy(o, t)),
    "nested dict": (lambda v, m: LIMITS["nested"]["high"].__setitem__(0, v),
                    lambda o, t: LIMITS["nested"]["high"][0] * F.cross_entropy(o, t)),
    "list": (lambda v, m: SCALES.__setitem__(1, v), lambda o, t: sum(SCALES) * F.cross_entropy(o, t)),
    "length of a list": (lambda v, m: SCALES.append(0.0), lambda o, t: len(SCALES) * F.cross_entropy(o, t)),
    "global tensor": (set_tensor, lambda o, t: F.cross_entropy(o * WEIGHTS, t)),
    "long list": (lambda v, m: SCHEDULE.__setitem__(700, v), lambda o, t: SCHEDULE[700] * F.cross_entropy(o, t)),
    "absent attribute": (lambda v, m: v > 1 and setattr(SPACE, "later", v),
                         lambda o, t: getattr(SPACE, "later", 1.0) * F.cross_entropy(o, t)),
    "global tensor in place": (lambda v, m: WEIGHTS.fill_(v), lambda o, t: F.cross_entropy(o * WEIGHTS, t)),
    "callable object": (lambda v, m: setattr(CRITERION, "weight", v), CRITERION),
    "method": (lambda v, m: setattr(CRITERION, "weight", v), CRITERION.method),
    "partial": (lambda v, m: setattr(SETTINGS, "beta", v), functools.partial(partly, SETTINGS)),
    "method of settings": (lambda v, m: setattr(SETTINGS, "mode", "mean" if v == 2 else "sum"),
                           lambda o, t: F.cross_entropy(o, t, reduction=SETTINGS.reduction())),
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_function_follows(name):
    change, loss_fn = LOSSES[name]
    check(change, loss_fn=loss_fn, must_change=name != "method of settings")


MODELS = {
    "attribute": (lambda v, m: setattr(m, "tau", v), lambda m, h: h * m.tau),
    "property": (lambda v, m: setattr(m, "tau", v), lambda m, h: h * m.temperature),
    "class attribute": (lambda v, m: setattr(Net, "common", v), lambda m, h: h * m.common),
    "attribute over a class's": (lambda v, m: setattr(m, "common", v), lambda m, h: h * m.common),
    "dict": (lambda v, m: m.flags.update(double=v != 2), lambda m, h: h * (2 if m.flags["double"] else 1)),
    "list": (lambda v, m: m.names.append("a"), lambda m, h: h * (1 + len(m.names))),
    "config": (lambda v, m: setattr(m.settings, "beta", v), lambda m, h: h * m.settings.beta),
    "new config": (lambda v, m: setattr(m, "settings", Settings(beta=v)), lambda m, h: h * m.settings.beta),
    "function": (lambda v, m: setattr(m, "act", torch.tanh if v == 2 else F.gelu), lambda m, h: m.act(h)),
}


@pytest.mark.large
@pytest.mark.parametrize("name", MODELS)
def test_a_model_follows(name):
    change, compute = MODELS[name]
    check(change, model=net(compute, Settings()), must_change=name not in ("function", "dict"))


@pytest.mark.large
def test_a_closure_of_forward_follows():
    scale = 1.0

    class Scaled(Net):
        def forward(self, x):
            return scale * super().forward(x)

    def change(value, model):
        nonlocal scale
        scale = value

    torch.manual_seed(0)
    check(change, model=Scaled(lambda model, h: h).double())


def test_repeated_blocks_follow():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gain = nn.Linear(6, 6), 1.0

        def forward(self, x):
            return x + self.gain * torch.tanh(self.linear(x))

    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(6)], nn.Linear(6, 4)).double()
    check(lambda value, model: setattr(model[4], "gain", value), model=model)


@pytest.mark.large
def test_a_config_is_followed_once_the_model_is_gone():
    settings = Settings()
    x, _ = batch()
    pm = autopart.parallelize(net(lambda m, h: h * m.settings.beta, settings), "tp1", example_args=(x,))
    plain = net(lambda m, h: h * m.settings.beta, settings)
    assert torch.allclose(pm(x), plain(x), atol=1e-10)
    settings.beta = 3.0
    assert torch.allclose(pm(x), plain(x), atol=1e-10)


def count_traces(pm, calls):
    before = pm._compiler._num_traces
    calls()
    return pm._compiler._num_traces - before


def test_the_same_values_are_not_traced_again():
    model = net(lambda m, h: h * m.tau * m.settings.beta, Settings())
    x, y = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))

    def loss_fn(o, t):
        COUNTED["seen"] = 1
        return SPACE.beta * F.cross_entropy(o, t)

    def step(beta):
        model.tau, SPACE.beta, SPACE.unread, model.unread = float(f"{beta}"), beta, object(), object()
        pm.step(x, loss_fn=loss_fn, target=y)
        pm(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert count_traces(pm, lambda: step(1.0)) == 1
        assert count_traces(pm, lambda: [step(1.0), step(1.0)]) == 0
        assert count_traces(pm, lambda: step(2.0)) == 2
        assert count_traces(pm, lambda: [step(1.0), step(2.0), step(1.0)]) == 0


def test_what_a_call_counts_is_not_traced_again():
    model = net(lambda m, h: h)
    x, y = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))

    def loss_fn(o, t):
        COUNTED["calls"] += 1
        return F.cross_entropy(o, t)

    assert count_traces(pm, lambda: [pm.step(x, loss_fn=loss_fn, target=y) for _ in range(3)]) == 1


@pytest.mark.large
def test_deciding_by_a_count_is_refused():
    x, y = batch()
    pm = autopart.parallelize(net(), "tp1", example_args=(x,))

    def loss_fn(o, t):
        COUNTED["calls"] += 1
        return COUNTED["calls"] * F.cross_entropy(o, t)

    with pytest.raises(TraceError, match="computes something different in every call") as error:
        pm.step(x, loss_fn=loss_fn, target=y)
    assert "it changes COUNTED and branches on it" in str(error.value)


@pytest.mark.large
def test_one_warning_names_the_value():
    model = net(lambda m, h: h if m.mode == "a" else 2 * h if m.mode == "b" else 3 * h)
    model.mode = "a"
    x, _ = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))
    pm(x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for value in "bc":
            model.mode = value
            assert torch.allclose(pm(x), model(x), atol=1e-10)
    texts = [str(one.message) for one in told if "since it was traced" in str(one.message)]
    assert len(texts) == 1 and texts[0].startswith("model.mode changed from 'a' to 'b' since it was traced")


class WithOption(Net):
    def forward(self, x, beta=1.0, count=8):
        return self.compute(self, super().forward(x), beta, count)


def scaled(beta, o, t):
    return beta * F.cross_entropy(o, t)


def by_keyword(o, t, beta):
    return beta * F.cross_entropy(o, t)


def loss_of(kind, value):
    """A loss function that holds a number."""
    if kind == "closure":
        return lambda o, t: value * F.cross_entropy(o, t)
    if kind == "default":
        return lambda o, t, beta=value: beta * F.cross_entropy(o, t)
    if kind == "partial":
        return functools.partial(by_keyword, beta=value)
    SPACE.beta, LIMITS["low"], SCALES[1], SLOTTED.beta = value, value, value, value
    set_global(value, None)
    return {
        "attribute": lambda o, t: SPACE.beta * F.cross_entropy(o, t),
        "entry": lambda o, t: LIMITS["low"] * F.cross_entropy(o, t),
        "item": lambda o, t: SCALES[1] * F.cross_entropy(o, t),
        "slots": lambda o, t: SLOTTED.beta * F.cross_entropy(o, t),
        "global": lambda o, t: BETA * F.cross_entropy(o, t),
    }[kind]


@pytest.mark.parametrize("kind", ["closure", "default", "partial", "attribute", "entry", "item", "slots", "global"])
def test_a_number_becomes_an_input(kind):
    model = net()
    x, y = batch()
    loss_of(kind, 0.5)
    pm = autopart.parallelize(model, "tp1", example_args=(x,))

    def step(value):
        loss_fn = loss_of(kind, value)
        assert pm.step(x, loss_fn=loss_fn, target=y).item() == pytest.approx(loss_fn(model(x), y).item(), abs=1e-10)

    assert count_traces(pm, lambda: [step(0.5 + i / 7) for i in range(6)]) == 2
    assert SPACE.beta is not None and isinstance(BETA, float) and isinstance(LIMITS["low"], float)


@pytest.mark.large
def test_numbers_among_the_arguments_become_inputs():
    def compute(model, h, beta=1.0, count=8):
        return (1 - beta) * h.sum() / count + model.tau * h.square().sum() / (count + 1)

    torch.manual_seed(0)
    model = WithOption(lambda m, h, *rest: compute(m, h, *rest) if rest else h).double()
    x, _ = batch()
    pm = autopart.parallelize(model, "tp1", example_kwargs={"x": x, "beta": 0.1, "count": 3})

    def step(i):
        model.tau = 1.0 + i / 3
        for options in ({"beta": 0.1 * i, "count": 3 + i}, {"beta": 0.1 * i, "count": 5}):
            found, expected = pm.step(x, **options), model(x, **options)
            assert found.item() == pytest.approx(expected.item(), abs=1e-10)
            model.zero_grad()
            expected.backward()
            for name, grad in pm.full_grads().items():
                assert torch.allclose(grad, model.get_parameter(name).grad, atol=1e-10), name
            pm.zero_grad()

    assert count_traces(pm, lambda: [step(i) for i in range(1, 6)]) <= 3


DECISIONS = {
    "if": lambda m, h, *rest: h * 2 if rest and rest[0] > 1.5 else h,
    "slice": lambda m, h, *rest: h[:, : int(rest[0])] if rest else h,
    "range": lambda m, h, *rest: sum(h * i for i in range(int(rest[0]) + 1)) if rest else h,
    "slope": lambda m, h, *rest: F.leaky_relu(h, rest[0]) if rest else h,
    "text": lambda m, h, *rest: h * float(f"{rest[0]:.1f}") if rest else h,
    "rounded": lambda m, h, *rest: h * round(rest[0]) if rest else h,
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_number_that_code_decides_by_is_traced_again(name):
    torch.manual_seed(0)
    model = WithOption(DECISIONS[name]).double()
    x, _ = batch()
    pm = autopart.parallelize(model, "tp1", example_kwargs={"x": x, "beta": 1.0})
    for beta in (1.0, 2.0, 3.0, 1.0, 2.0):
        found, expected = pm(x, beta=beta), model(x, beta=beta)
        assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-10)


def on_ranks(mesh, zero):
    options = {"zero": zero} if zero else {}
    model, plain = net(lambda m, h: h * m.tau), net(lambda m, h: h * m.tau)
    x, y = batch()
    pm = autopart.parallelize(model, mesh, example_args=(x,), **options)
    optimizer, own = torch.optim.SGD(pm.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            model.tau = plain.tau = 1.0 + step
            SPACE.beta = 2.0 - step / 4
            loss = pm.step(x, loss_fn=lambda o, t: SPACE.beta * F.cross_entropy(o, t), target=y)
            expected = SPACE.beta * F.cross_entropy(plain(x), y)
            expected.backward()
            assert abs(loss.item() - expected.item()) < 1e-10
            for name, grad in pm.full_grads().items():
                assert torch.allclose(grad, plain.get_parameter(name).grad, atol=1e-10), name
            optimizer.step(), own.step(), optimizer.zero_grad(), own.zero_grad()


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "zero"), [("tp2", 0), ("pp2", 0), ("dp2", 3)])
def test_on_ranks(mesh, zero):
    dist.run_ranks(on_ranks, 2, mesh, zero, timeout_s=120)


def changed_on_one_rank():
    model = net(lambda m, h: h * m.tau if m.flags["double"] else h)
    x, y = batch()
    pm = autopart.parallelize(model, "dp2", example_args=(x,))
    pm.step(x, loss_fn=F.cross_entropy, target=y)
    if torch.distributed.get_rank() == 1:
        model.flags["double"] = True
    with warnings.catch_warnings(), pytest.raises(InputError) as error:
        warnings.simplefilter("ignore")
        pm.step(x, loss_fn=F.cross_entropy, target=y)
    return str(error.value)


@pytest.mark.large
def test_a_value_that_changed_on_one_rank_is_an_error():
    first, second = dist.run_ranks(changed_on_one_rank, 2, timeout_s=60)
    assert (
        "in train mode, with model.flags['double'] = True" in first and first.splitlines()[0] == second.splitlines()[0]
    )


def number_of_one_rank():
    model = net(lambda m, h: h * m.tau)
    x, y = batch()
    pm = autopart.parallelize(model, "dp2", example_args=(x,))
    for value in (1.0, 2.0):
        model.tau = value
        pm.step(x, loss_fn=F.cross_entropy, target=y)
    model.tau = 3.0 + torch.distributed.get_rank()
    with pytest.raises(InputError) as error:
        pm.step(x, loss_fn=F.cross_entropy, target=y)
    return str(error.value)


@pytest.mark.large
def test_a_number_of_one_rank_is_an_error():
    first, second = dist.run_ranks(number_of_one_rank, 2, timeout_s=60)
    assert first.splitlines()[0] == second.splitlines()[0] == "the ranks are called with different values of model.tau"


def test_a_copy_of_the_model_has_its_own_values():
    model = net(lambda m, h: h * m.tau)
    x, _ = batch()
    pm = autopart.parallelize(copy.deepcopy(model), "tp1", example_args=(x,))
    model.tau = 5.0
    assert torch.allclose(pm(x), model(x) / 5, atol=1e-10)


def test_a_container_of_the_user_stays_the_models():
    flags, names = {"double": False}, ["a"]
    model = net(lambda m, h: h * (2 if m.flags["double"] else 1) * len(m.names))
    model.flags, model.names = flags, names
    x, _ = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))
    pm(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert count_traces(pm, lambda: [pm.eval()(x), pm.train()(x)]) == 1  # of eval mode
        flags["double"] = True
        names.append("b")
        assert torch.allclose(pm(x), model(x), atol=1e-10)


@pytest.mark.large
def test_a_number_that_becomes_something_else():
    model = net(lambda m, h: h if m.tau is None else h * m.tau)
    x, _ = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (1.0, 2.0, 3.0, None, 4, 5, True, 6.0, torch.tensor(2.5).double(), 0.5):
            model.tau = value
            assert torch.allclose(pm(x), model(x), atol=1e-10)


@pytest.mark.large
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_closure_over_containers_and_objects_follows(wrapped):
    settings, scales, space = {"low": 1.0}, [1.0], types.SimpleNamespace(b=1.0)

    def change(value, model):
        settings["low"], scales[0], space.b = value, value + 1, value / 2

    def loss_fn(o, t, space=space):
        return F.cross_entropy(o, t) * settings["low"] * scales[0] * space.b

    def logged(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    check(change, loss_fn=logged(loss_fn) if wrapped else loss_fn)
    check(change, loss_fn=functools.partial(lambda space, o, t: F.cross_entropy(o, t) * space.b, space))
    check(change, loss_fn=functools.partial(lambda settings, o, t: F.cross_entropy(o, t) * settings["low"], settings))


@pytest.mark.large
def test_an_optimizers_rate_is_followed():
    model = net()
    x, y = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.5)

    def loss_fn(o, t):
        return F.cross_entropy(o, t) * optimizer.param_groups[0]["lr"]

    def step(lr):
        optimizer.param_groups[0]["lr"] = lr
        assert pm.step(x, loss_fn=loss_fn, target=y).item() == pytest.approx(loss_fn(model(x), y).item(), abs=1e-10)

    assert count_traces(pm, lambda: [step(0.5 - i / 20) for i in range(5)]) == 2


@pytest.mark.large
def test_a_layer_without_parameters_may_be_replaced():
    kinds = [nn.Tanh, nn.Sigmoid, nn.Softplus]  # a new one may have the address of one that is gone
    check(lambda value, model: setattr(model, "drop", kinds[int(value) % 3]()), must_change=False, steps=12)


def test_a_layer_with_parameters_may_not_be_replaced():
    model = net()
    x, _ = batch()
    pm = autopart.parallelize(model, "tp1", example_args=(x,))
    pm(x)
    model.head = nn.Linear(8, 4).double()
    with pytest.raises(UsageError) as error:
        pm(x)
    assert str(error.value) == (
        "the model has a new layer: its parameter 'head.weight' did not exist when the model was traced\n"
        "  why    the partitioned model trains only the parameters of the traced model\n"
        "  try    change layers before parallelize()"
    )


@pytest.mark.large
def test_a_dict_by_tensors_is_followed():
    states = {torch.ones(3): 1.0}
    torch.manual_seed(0)

    def loss_fn(o, t):
        return F.cross_entropy(o, t) * sum(states.values())

    def change(value, model):
        states[torch.ones(3)] = value

    check(change, loss_fn=loss_fn)

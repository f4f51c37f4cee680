"""Tensors that a model's code keeps from one call to the next: a trace leaves none of its own there."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.compat.torch_internals import has_values
from autopart.errors import TraceError
from autopart.tracing.python.hidden_tensors import places_of

TABLE: dict[Any, Any] = {}
ORDERED: OrderedDict[Any, Any] = OrderedDict()
QUEUE: deque[Tensor] = deque(maxlen=1)
MASK: Tensor | None = None


@functools.lru_cache
def cached(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@functools.cache
def cached_in_a_tuple(size: int) -> tuple[Tensor, int]:
    return torch.ones(size, size).tril(), size


def in_a_dict(model: nn.Module) -> Tensor:
    if "mask" not in TABLE:
        TABLE["mask"] = {"lower": torch.ones(8, 8).tril()}
    return TABLE["mask"]["lower"]


def in_an_ordered_dict(model: nn.Module) -> Tensor:
    return ORDERED.setdefault(8, torch.ones(8, 8).tril())


def in_a_queue(model: nn.Module) -> Tensor:
    if not QUEUE:
        QUEUE.append(torch.ones(8, 8).tril())
    return QUEUE[0]


def in_a_global(model: nn.Module) -> Tensor:
    global MASK
    if MASK is None:
        MASK = torch.ones(8, 8).tril()
    return MASK


def in_a_default(model: nn.Module, kept: list[Tensor] = []) -> Tensor:  # noqa: B006 - as people write it
    if not kept:
        kept.append(torch.ones(8, 8).tril())
    return kept[0]


def at_a_function(model: nn.Module) -> Tensor:
    if not hasattr(at_a_function, "mask"):
        at_a_function.mask = torch.ones(8, 8).tril()
    return at_a_function.mask


def made_closure() -> Callable[[nn.Module], Tensor]:
    mask = None

    def in_a_closure(model: nn.Module) -> Tensor:
        nonlocal mask
        if mask is None:
            mask = torch.ones(8, 8).tril()
        return mask

    return in_a_closure


class Masks:
    """A plain object with caches at its class and at itself."""

    at_class: Tensor | None = None
    by_size: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        self.own: Tensor | None = None

    def of_object(self) -> Tensor:
        if self.own is None:
            self.own = torch.ones(8, 8).tril()
        return self.own

    @classmethod
    def of_class(cls) -> Tensor:
        if cls.at_class is None:
            cls.at_class = torch.ones(8, 8).tril()
        return cls.at_class

    @functools.cached_property
    def once(self) -> Tensor:
        return torch.ones(8, 8).tril()


MASKS = Masks()


def in_a_table_of_a_class(model: nn.Module) -> Tensor:
    if 8 not in Masks.by_size:
        Masks.by_size[8] = torch.ones(8, 8).tril()
    return Masks.by_size[8]


def nested_in_an_attribute(model: Any) -> Tensor:
    if not model.nested["masks"]:
        model.nested["masks"].append(torch.ones(8, 8).tril())
    return model.nested["masks"][0]


KEPT: dict[str, Callable[[Any], Tensor]] = {
    "lru_cache": lambda model: cached(8),
    "cache, in a tuple": lambda model: cached_in_a_tuple(8)[0],
    "method of the model": lambda model: model.cached_method(8),
    "dict": in_a_dict,
    "ordered dict": in_an_ordered_dict,
    "queue": in_a_queue,
    "global": in_a_global,
    "default": in_a_default,
    "function": at_a_function,
    "closure": made_closure(),
    "class": lambda model: Masks.of_class(),
    "table of a class": in_a_table_of_a_class,
    "object in a global": lambda model: MASKS.of_object(),
    "object in the model": lambda model: model.masks.of_object(),
    "cached property": lambda model: model.masks.once,
    "nested": nested_in_an_attribute,
}


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Any], Tensor]):
        super().__init__()
        self.linear, self.mask, self.masks = nn.Linear(8, 8), mask, Masks()
        self.nested: dict[str, list[Tensor]] = {"masks": []}

    @functools.lru_cache  # noqa: B019 - as people write it
    def cached_method(self, size: int) -> Tensor:
        return torch.ones(size, size).tril()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.mask(self).to(x)


@pytest.mark.few
@pytest.mark.parametrize("place", KEPT)
@pytest.mark.parametrize("filled_before", [False, True])
def test_a_trace_leaves_no_tensor_behind(place, filled_before):
    model, x = Masked(KEPT[place]), torch.randn(4, 8)
    expected = model.linear(x) @ torch.ones(8, 8).tril()
    if filled_before:
        model(x)
    autopart.plan(model, "dp2", example_args=(x,))
    found = model(x)
    assert has_values(found) and torch.equal(found, expected)
    assert KEPT[place](model).dtype == torch.float32
    result = autopart.verify(model, "dp2", example_args=(x,))
    assert result.ok, result
    assert torch.equal(model(x), expected)
    assert KEPT[place](model).dtype == torch.float32


def test_other_values_stay_where_the_forward_puts_them():
    """A count of calls is no business of a trace, and a cache without tensors stays filled."""

    @functools.lru_cache
    def half(size: int) -> int:
        return size // 2

    model = Masked(lambda model: torch.ones(8, half(16)))
    autopart.plan(model, "dp2", example_args=(torch.randn(4, 8),))
    assert half.cache_info().currsize == 1


STATE: dict[str, Tensor] = {"h": torch.zeros(8)}


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        STATE["h"] = self.linear(x).mean(0) + STATE["h"]
        return STATE["h"]


def test_a_tensor_that_the_next_call_reads_is_refused():
    before = STATE["h"]
    with pytest.raises(TraceError, match="Remembers keeps a tensor from one call to the next in 'h'"):
        autopart.plan(Remembers(), "dp2", example_args=(torch.randn(4, 8),))
    assert STATE["h"] is before


class Casts(nn.Module):
    """Casts what it keeps to the dtype of its input, as image models do with the means of colours."""

    def __init__(self, reads_before: bool = False):
        super().__init__()
        self.linear, self.mean, self.reads_before = nn.Linear(8, 8), torch.arange(8.0) / 7, reads_before

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_before:
            x = x + self.mean.sum()
        self.mean = self.mean.type_as(x)
        return self.linear(x - self.mean) + self.mean


def test_what_the_first_call_casts_for_good_is_no_state():
    model, x = Casts().double(), torch.randn(4, 8, dtype=torch.double)
    module = autopart.parallelize(model, "dp1", example_args=(x,))
    assert model.mean.dtype == torch.float32, "the model itself was not called"
    for _ in range(2):
        assert torch.equal(module(x), model(x))
    with pytest.raises(TraceError, match="Casts keeps a tensor from one call to the next in 'mean'"):
        autopart.plan(Casts(reads_before=True).double(), "dp2", example_args=(x,))


class Spikes(nn.Module):
    """Keeps a membrane, whose shape is wrong in the first call, for all time steps of a call.

    The membrane is set to zero by a list of all instances, as snntorch does, unless `resets` is false.
    """

    instances: ClassVar[list[nn.Module]] = []

    def __init__(self, resets: bool, size: tuple[int, ...] = (0,)):
        super().__init__()
        Spikes.instances[:] = [self]
        self.linear, self.resets, self.membrane = nn.Linear(8, 8), resets, torch.zeros(size)

    def spike(self, x: Tensor) -> Tensor:
        if self.membrane.shape != x.shape:
            self.membrane = torch.zeros_like(x)
        self.membrane = 0.9 * self.membrane + x
        return torch.sigmoid(self.membrane - 1)

    def forward(self, x: Tensor) -> Tensor:
        for one in Spikes.instances if self.resets else ():
            one.membrane = torch.zeros_like(one.membrane)
        return sum(self.spike(self.linear(x[:, t])) for t in range(x.size(1)))


@pytest.mark.parametrize("size", [(0,), (4, 8)])
def test_state_that_each_call_sets_to_zero(size):
    model, x = Spikes(resets=True, size=size), torch.rand(4, 3, 8)
    assert autopart.verify(model, "tp2", example_args=(x,)).ok
    assert Spikes.instances == [model]
    assert has_values(model.membrane)
    module = autopart.parallelize(model, "dp1", example_args=(x,))
    results = [module(x), module(x)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], model(x))


def test_state_of_another_shape_in_the_first_call_is_refused():
    with pytest.raises(TraceError, match="forward\\(\\) stores a tensor in membrane, and the next call reads it"):
        autopart.plan(Spikes(resets=False), "dp2", example_args=(torch.rand(4, 3, 8),))


class Pair(tuple):
    """One without a length, as e3nn's Irrep is."""

    def __len__(self):
        raise NotImplementedError


class Heads(nn.Module):
    """Keeps what it computed last, with its gradient, and things that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.linear, self.heads = nn.Linear(8, 8), [None]
        self.lock, self.seen, self.pair = threading.Lock(), {"heads": [torch.zeros(())]}, Pair((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.heads[0] = self.linear(x)
        self.seen["heads"][0] = self.heads[0].sum()
        return self.heads[0]


def test_tensors_with_a_gradient_in_a_list():
    model, x = Heads(), torch.randn(4, 8)
    model(x)
    kept = model.heads[0]
    result = autopart.verify(model, "tp2", example_args=(x,))
    assert result.ok, result
    assert model.heads[0] is kept
    module = autopart.parallelize(model, "dp1", example_args=(x,))
    assert torch.equal(module(x), model(x))


def test_only_what_forward_names_is_looked_at():
    """Walking all that can be reached from a class of transformers takes a second; a trace looks several times."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    assert len(places_of(transformers.GPT2LMHeadModel(config))) < 10_000

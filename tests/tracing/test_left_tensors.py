"""Tensors that a forward leaves in attributes, globals and objects, and reads in the next call."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import autopart
from autopart.errors import Refusal, TraceError

EMA = None
CACHE = {}
SPACE = types.SimpleNamespace()


class Base(nn.Module):
    seen = None

    def __init__(self):
        super().__init__()
        self.linear, self.last, self.saved, self.table = nn.Linear(6, 6), None, [], {}

    def forward(self, x):
        return self.compute(x, self.linear(x))


def moving(before, h):
    mean = h.mean(0).detach()
    return mean if before is None else 0.9 * before + 0.1 * mean


class Attribute(Base):
    def compute(self, x, h):
        self.last = moving(self.last, h)
        return h - self.last


class NewAttribute(Base):
    def compute(self, x, h):
        self.ema = moving(getattr(self, "ema", None), h)
        return h - self.ema


class InList(Base):
    def compute(self, x, h):
        self.saved.append(h.detach())
        return h + sum(self.saved)


class InDict(Base):
    def compute(self, x, h):
        self.table["h"] = moving(self.table.get("h"), h)
        return h - self.table["h"]


class OfClass(Base):
    def compute(self, x, h):
        OfClass.seen = moving(OfClass.seen, h)
        return h - OfClass.seen


class OfGlobal(Base):
    def compute(self, x, h):
        global EMA
        EMA = moving(EMA, h)
        return h - EMA


class OfGlobalDict(Base):
    def compute(self, x, h):
        CACHE["h"] = moving(CACHE.get("h"), h)
        return h - CACHE["h"]


class OfObject(Base):
    def compute(self, x, h):
        SPACE.h = moving(getattr(SPACE, "h", None), h)
        return h - SPACE.h


class OfWeights(Base):
    def compute(self, x, h):
        if self.last is None:
            self.last = self.linear.weight.norm()
        return h / self.last


class Mask(Base):
    """The table is the same in every call."""

    def compute(self, x, h):
        if self.last is None or self.last.shape[0] < x.shape[0]:
            self.last = torch.tril(torch.ones(x.shape[0], x.shape[0], dtype=x.dtype))
        return self.last @ h


class Log(Base):
    """What it leaves is for the user to read."""

    def compute(self, x, h):
        self.last, SPACE.log, CACHE["log"] = h, h.detach(), h.mean()
        return h


class Passed(Base):
    """One layer leaves a tensor for another of the same call."""

    def compute(self, x, h):
        self.saved.clear()
        self.saved.append(h.mean())
        return h + sum(self.saved)


@pytest.mark.parametrize(
    ("kind", "place"),
    [(Attribute, "last"), (NewAttribute, "ema"), (InList, "saved"), (InDict, "table"), (OfClass, "OfClass.seen"),
     (OfGlobal, f"{__name__}.EMA"), (OfGlobalDict, "h"), (OfObject, "h"), (OfWeights, "last")],
)  # fmt: skip
def test_a_tensor_that_the_next_call_reads_is_refused(kind, place):
    with pytest.raises(TraceError) as error:
        autopart.parallelize(kind(), "tp1", example_args=(torch.randn(4, 6),))
    assert error.value.refusal is Refusal.STATE
    first, why, _ = str(error.value).splitlines()
    assert first == f"{kind.__name__} computes something different in every call"
    assert why == f"  why    forward() stores a tensor in {place}, and the next call reads it"
    assert EMA is None and "h" not in CACHE and not hasattr(SPACE, "h") and OfClass.seen is None


@pytest.mark.parametrize("kind", [Mask, Log, Passed])
def test_other_tensors_that_it_leaves_change_nothing(kind):
    torch.manual_seed(0)
    model = kind().double()
    pm = autopart.parallelize(model, "tp1", example_args=(torch.randn(4, 6).double(),))
    assert model.last is None and model.saved == [] and "log" not in CACHE and not hasattr(SPACE, "log")
    for rows in (4, 4, 6):
        x = torch.randn(rows, 6).double()
        found = pm(x)
        assert torch.allclose(found, model(x), atol=1e-12)
        model.last = None
    CACHE.clear(), vars(SPACE).clear()

"""Every operator that writes in place, and every view that is written, gives torch's values and gradients.

A trace has no writes: torch puts a new value of the written one in their place, and each pass its own form of that.
What comes out of both is compared with eager PyTorch, in float64, for values of three memory layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from in_place_samples import LAYOUTS, NOT_VIEWED, NOT_WRITTEN, VIEWS, Written, samples, views, writers
from torch import Tensor, fx

from autopart.compat.torch_internals import tree_flatten, tree_unflatten
from autopart.errors import Refusal, TraceError
from autopart.passes.normalize import AS_TRACED, NORMALIZE
from autopart.passes.pass_pipeline import run_passes
from autopart.tracing.trace_model import bind_call, trace

SAMPLES = samples()


def difference(model: Written) -> float:
    """The largest difference between a model and its normalized trace: of values, and of gradients."""
    one = torch.ones((), dtype=torch.float64)
    traced = trace(model, bind_call(model, (one,), {}))
    run_passes(traced.graph, (*AS_TRACED, *NORMALIZE))
    tensors = {**traced.parameters, **traced.buffers, **traced.constants}
    graph = fx.GraphModule(tensors, traced.graph)
    expected = with_gradients(list(model(one)), list(model.parameters()))
    found = with_gradients(list(graph(one)), list(model.parameters()))
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))


def with_gradients(outputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if not weights:
        return [o.detach() for o in outputs]
    loss = sum((w * 0).sum() for w in weights)
    for output in outputs:
        factor = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        loss = loss + (torch.view_as_real(output).sum(-1) if output.is_complex() else output * factor).sum()
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, weights)]


def written_as(sample) -> Written:
    """The call of a sample on a value of each layout."""
    name, _, overload = sample.operator.partition(".")
    operator = getattr(getattr(torch.ops.aten, name if name.endswith("_") else f"{name}_"), overload or "default")
    flat, spec = tree_flatten((sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        results = []
        for layout in LAYOUTS.values():
            leaves = list(flat)
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            leaves[0] = target = layout(tensors[0] * 1)
            args, kwargs = tree_unflatten(leaves, spec)
            operator(*args, **kwargs)
            results.append(target * 2)
        return results

    return Written(function, [flat[i] for i in places])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_write_is_torchs(name):
    assert difference(written_as(SAMPLES[name])) < 1e-12


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul_": lambda v, w: v.mul_(w.sum()),
    "copy_": lambda v, w: v.copy_(w.sum() * torch.arange(v.numel(), dtype=torch.float64).reshape(v.shape)),
    "fill_": lambda v, w: v.fill_(0.5),
}
MAY_BE_REFUSED = {("as_strided of two dims", "a slice of a value"), ("as_strided", "a slice of a value")}
"""Memory that is not an element of the value itself."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_is_torchs(name, layout):
    def written(write: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], list[Tensor]]:
        def function(base: Tensor, factor: Tensor) -> list[Tensor]:
            value = LAYOUTS[layout](base * 1)
            write(VIEWS[name](value), factor)
            return [value * value.cos()]

        return function

    tensors = [torch.randn(4, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    for kind, write in WRITES.items():
        model = Written(written(write), tensors)
        try:
            model(torch.ones((), dtype=torch.float64))[0].sum().backward()
        except RuntimeError:  # torch itself has no such view, or refuses to write it
            continue
        try:
            assert difference(model) < 1e-12, kind
        except TraceError as error:
            assert error.refusal is Refusal.WRITE and (name, layout) in MAY_BE_REFUSED, error


def test_every_operator_that_writes_has_a_sample():
    listed = " ".join(NOT_WRITTEN.values()).split()
    sampled = {name.partition(".")[0] for name in SAMPLES}
    assert not sampled.intersection(listed)
    assert sorted(writers() - sampled) == sorted(listed)


def test_every_view_has_a_sample():
    listed = " ".join(NOT_VIEWED.values()).split()
    assert sorted(views() - set(VIEWS)) == sorted(listed)

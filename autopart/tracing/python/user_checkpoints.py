"""Activation checkpoints in a model's own code (`torch.utils.checkpoint`), traced as plain calls.

A reentrant checkpoint is an autograd.Function. Its forward runs without grad mode, so a trace of it would have no
gradient. Its backward runs the model's Python again. So a trace calls the checkpoint's function like any other code of
the model. The plan chooses what the partitioned model recomputes. By default it recomputes the modules that the model
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from autopart.compat.torch_internals import other_checkpoints, redirected_functions
from autopart.tracing.with_loss import users_modules


class UserCheckpoints:
    """Replacement of `torch.utils.checkpoint` by plain calls, which records the checkpointed modules."""

    def __init__(self, model: nn.Module):
        self.paths = {module: path for path, module in users_modules(model)}
        self.inside: set[str] = set()
        """Paths of the modules that ran in a checkpoint."""
        self.unnamed = False
        """True if the function of a checkpoint called no module."""
        self._seen: set[str] | None = None

    @property
    def found(self) -> tuple[str | None, ...]:
        """Return the paths of the outermost modules that ran in checkpoints, and None if one ran no module."""
        outermost = [path for path in self.paths.values() if path in self.inside and not self._inside_another(path)]
        return (*outermost, None) if self.unnamed else tuple(outermost)

    def _inside_another(self, path: str) -> bool:
        parts = path.split(".")
        ancestors = [".".join(parts[:length]) for length in range(len(parts))] if path else []
        return not self.inside.isdisjoint(ancestors)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace non-reentrant checkpoints by plain calls inside a `with` block."""

        def note(module: nn.Module, args: Any) -> None:
            if self._seen is not None and module in self.paths:
                self._seen.add(self.paths[module])

        with other_checkpoints(self._noted), register_module_forward_pre_hook(note):
            yield

    def apply(self, apply: Callable[..., Any], function: type, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Replace `CheckpointFunction.apply(run, preserve_rng_state, *arguments)` by a plain call of `run`."""
        run, _, *arguments = args
        with self._noted(run):
            return run_plainly(run, arguments)

    @contextmanager
    def _noted(self, run: Any) -> Iterator[None]:
        """Record the modules that run in one checkpoint, inside a `with` block.

        Checkpoints inside this checkpoint are not recorded.
        """
        if self._seen is not None:
            yield
            return
        arguments: list[Any] = []
        while isinstance(run, partial):  # partial(type(block).forward, block) calls the block
            run, arguments = run.func, [*run.args[:1], *arguments]
        owners = [getattr(run, "__self__", None), *arguments]
        self._seen = {self.paths[o] for o in owners if isinstance(o, nn.Module) and o in self.paths}
        try:
            yield
        finally:
            self.unnamed |= not self._seen
            self.inside |= self._seen
            self._seen = None


def run_plainly(run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call the function of a reentrant checkpoint.

    As in torch, results need a gradient only if an argument does.
    """
    if any(isinstance(value, Tensor) and value.requires_grad for value in arguments):
        return run(*arguments)
    with torch.no_grad():
        return run(*arguments)


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Replace all checkpoints by plain calls inside a `with` block, so that `torch.autograd.grad` works."""

    def run(apply: Callable[..., Any], function: type, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if function is not CheckpointFunction:
            return apply(function, *args, **kwargs)
        return run_plainly(args[0], args[2:])

    with redirected_functions(run), other_checkpoints(lambda function: nullcontext()):
        yield

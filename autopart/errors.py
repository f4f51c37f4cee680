"""Errors that users can meet. Each states what is wrong, why, where, and what to try.

All are subclasses of `ValueError`. `assert` is used only for faults of autopart itself.
"""

from __future__ import annotations

from enum import Enum


class AutopartError(ValueError):
    """A mistake in the input of autopart, reported in four parts: what, why, where, try.

    Example:
        >>> print(LayoutError("cannot shard dim 1 of 'q.weight' over axis 'tp'", why="30 is not a multiple of 4",
        ...                   where="linear at model.py:27", hint="tp=2"))
        cannot shard dim 1 of 'q.weight' over axis 'tp'
          why    30 is not a multiple of 4
          where  linear at model.py:27
          try    tp=2
    """

    def __init__(self, what: str, *, why: str = "", where: str = "", hint: str = ""):
        self.what, self.why, self.where, self.hint = what, why, where, hint
        lines = [what]
        lines += [f"  {label:<7}{text}" for label, text in (("why", why), ("where", where), ("try", hint)) if text]
        super().__init__("\n".join(lines))


class MeshError(AutopartError):
    """The mesh cannot be read, or does not fit the model, the batch or the number of processes."""


class Refusal(Enum):
    """Known reasons why autopart refuses a model that runs in plain PyTorch.

    `docs/refusals.md` has an example of each reason, and a change of the model that avoids it.
    """

    DECISION = "its Python decides what to run by the values in a tensor"
    SIZE = "the size of a tensor depends on the values in another"
    REGION = "an operator contains a part of the model, such as torch.while_loop"
    NUMPY = "numpy computes with its tensors"
    RANDOM = "its random numbers cannot be drawn by a program"
    STATE = "it keeps something from one call to the next that is not a buffer"
    WRITE = "it writes in place to a tensor to which a program cannot write"
    HOOK = "a hook changes a gradient"
    GRADIENT = "it computes gradients in its forward, or a trace loses a gradient"
    FUNCTION = "its autograd.Function depends on more than tensors and plain values"
    PART = "a part of it is TorchScript, has no shapes yet, or is sparse"
    OUTPUT = "it returns an object in which no tensors can be found"


class TraceError(AutopartError):
    """The model cannot be traced. `refusal`: the known reason, or None if the model's own call fails."""

    def __init__(
        self, what: str, *, refusal: Refusal | None = None, why: str = "", where: str = "", hint: str = ""
    ):  # fmt: skip
        super().__init__(what, why=why, where=where, hint=hint)
        self.refusal = refusal


class LayoutError(AutopartError):
    """A value cannot have the requested placement on the mesh."""


class PlanError(AutopartError):
    """A plan cannot be read, or does not fit the model or the mesh."""


class RuleError(AutopartError):
    """A sharding rule cannot be registered, or does not fit its operator."""


class StageError(AutopartError):
    """The model cannot be split into the requested stages or microbatches."""


class MemoryLimitError(AutopartError):
    """A plan needs more memory on a rank than the limit allows."""


class InputError(AutopartError):
    """A call does not fit the traced inputs."""


class OptionError(AutopartError):
    """An option is unknown, not implemented, or contradicts another."""


class RuntimeSetupError(AutopartError):
    """There is no process group, or it does not fit the mesh."""


class CheckpointError(AutopartError, RuntimeError):
    """A state dict or a checkpoint does not fit the model, the optimizer or the mesh."""


class UsageError(AutopartError):
    """A partitioned model is used in a way that it does not support, or that would have no effect."""


class MissingAttribute(UsageError, AttributeError):
    """A partitioned model lacks an attribute that the original model has. `hasattr` returns False."""


class ReplicaError(AutopartError):
    """Copies of a parameter that must be equal on several ranks have diverged."""


class NonFiniteError(AutopartError, ArithmeticError):
    """A training step computes a loss or a gradient with NaN or infinity."""


class HangError(AutopartError):
    """A rank waited for other ranks that did not arrive in time, or are gone."""

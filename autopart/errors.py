"""Errors a user can meet. Each says what was asked, why it cannot be, where, and what to try.

All are `ValueError`s; `assert` is for our own mistakes.
"""

from __future__ import annotations

from enum import Enum


class AutopartError(ValueError):
    """A mistake in what was asked of autopart, reported in four parts: what, why, where, try.

    Example:
        >>> print(LayoutError("cannot shard dim 1 of 'q.weight' over axis 'tp'", why="30 is not a multiple of 4",
        ...                   where="linear at model.py:27", hint="tp=2"))
        cannot shard dim 1 of 'q.weight' over axis 'tp'
          why    30 is not a multiple of 4
          where  linear at model.py:27
          try    tp=2
    """

    def __init__(self, what: str, *, why: str = "", where: str = "", hint: str = ""):
        lines = [what]
        lines += [f"  {label:<7}{text}" for label, text in (("why", why), ("where", where), ("try", hint)) if text]
        super().__init__("\n".join(lines))


class MeshError(AutopartError):
    """The mesh cannot be read, or does not fit the model, the batch or the processes there are."""


class Refusal(Enum):
    """Why a model that runs is refused: all the reasons there are. `docs/refusals.md` has an example of each, and the
    way out."""

    DECISION = "its Python decides what to run by the values in a tensor"
    SIZE = "how large a tensor is depends on the values in another"
    REGION = "an operator holds a part of the model, such as torch.while_loop"
    NUMPY = "numpy computes with its tensors"
    RANDOM = "its random numbers cannot be drawn by a program"
    STATE = "it keeps something from one call to the next that is not a buffer"
    WRITE = "it writes to a tensor in place where a program cannot"
    HOOK = "a hook changes a gradient"
    GRADIENT = "it differentiates inside, or a trace loses a gradient"
    FUNCTION = "an autograd.Function of it is not a function of its tensors alone"
    PART = "a part of it has no Python, no shapes yet, or no dense values"
    OUTPUT = "it returns an object in which no tensors can be found"


class TraceError(AutopartError):
    """The model could not be traced. `refusal`: for which of the known reasons; None where its own call fails."""

    def __init__(
        self, what: str, *, refusal: Refusal | None = None, why: str = "", where: str = "", hint: str = ""
    ):  # fmt: skip
        super().__init__(what, why=why, where=where, hint=hint)
        self.refusal = refusal


class LayoutError(AutopartError):
    """A value cannot be laid out on the mesh as asked."""


class PlanError(AutopartError):
    """A plan cannot be read, or does not fit the model or the mesh."""


class RuleError(AutopartError):
    """A sharding rule cannot be registered, or does not fit its operator."""


class StageError(AutopartError):
    """The model cannot be cut into the stages or microbatches asked for."""


class MemoryLimitError(AutopartError):
    """A plan needs more memory on a rank than it was given."""


class InputError(AutopartError):
    """A call does not fit the traced inputs."""


class OptionError(AutopartError):
    """An option is unknown, not built yet, or contradicts another."""


class RuntimeSetupError(AutopartError):
    """There is no process group, or it does not fit the mesh."""


class CheckpointError(AutopartError, RuntimeError):
    """A state dict or a checkpoint does not fit the model, the optimizer or the mesh."""


class UsageError(AutopartError):
    """Something that works on an `nn.Module` would be wrong, or do nothing, on a partitioned one."""


class MissingAttribute(UsageError, AttributeError):
    """A partitioned model does not have something that its model has: `hasattr` is false."""


class ReplicaError(AutopartError):
    """Copies of a parameter that ranks must hold alike have drifted apart."""


class HangError(AutopartError):
    """A rank waited for others that did not come in time, or are gone."""

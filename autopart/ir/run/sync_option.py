"""The option `dp_sync=`: how data-parallel ranks synchronize gradients or models.

The default is an exact all-reduce of gradients (`ALL_REDUCE`). All other methods are in `autopart.extras.dp_sync`,
which is imported if the option names one of them. They implement `SyncMethod` and `SyncOption`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from autopart.common.extras import load_extra

if TYPE_CHECKING:
    from autopart.ir.decisions import Decisions
    from autopart.ir.mesh import Mesh
    from autopart.ir.program import Program
    from autopart.ir.trace import Trace

SYNC_NAMES = (
    "all_reduce", "parameter_server", "qsgd", "top_k", "sign", "double_squeeze", "ef21", "ef21_sgdm", "neolithic",
    "powersgd", "gossip", "exact_diffusion", "gradient_tracking", "local", "diloco",
)  # fmt: skip
"""Names of the `dp_sync` methods, for help texts."""


class Exchange(NamedTuple):
    """A collective (or, for kind "send", a point-to-point send) that a `dp_sync` method runs in a step.

    `size_bytes` is the size of its tensor, `often` the number of calls per step. Both can be sympy expressions.
    """

    kind: str
    size_bytes: Any
    often: Any = 1.0


class MethodParameters(NamedTuple):
    """Sizes of the parameters that one `dp_sync` method synchronizes on a rank.

    Args:
        method: the `dp_sync` method.
        size_bytes: bytes of the parameters.
        made_bytes: bytes of the compressed gradients that the method makes and a rank sends.
        factor_bytes: bytes of the low-rank factors that PowerSGD sends in place of gradient matrices.
    """

    method: SyncMethod
    size_bytes: Any
    made_bytes: Any
    factor_bytes: Any = 0.0


class SyncMethod(Protocol):
    """Protocol of a method that replaces the gradient all-reduce over the data-parallel axis.

    Objects are hashable.
    """

    @property
    def changes(self) -> str:
        """Synchronized tensors: `"gradients"`, or `"models"` if every data rank trains its own model."""

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes that a rank sends to synchronize a vector of `numel` elements."""

    def factor_bytes(self, elements: float, itemsize: int, shape: tuple[int, ...]) -> float:
        """Return the bytes of the low-rank factors (PowerSGD) that represent a rank's shard of a parameter."""

    def exchanges(self, of: MethodParameters, num_ranks: Any, several: int) -> Sequence[Exchange]:
        """Return the collectives that the method runs in a step.

        Args:
            of: sizes of the parameters that the method synchronizes.
            num_ranks: number of ranks, as an integer or as a sympy expression.
            several: number of ranks as an integer. It determines the number of neighbours on a gossip graph.
        """

    def passes(self, num_ranks: int) -> float:
        """Return how often the method reads or writes the gradients in local memory per step.

        The number is the memory traffic divided by the bytes of the gradients.
        """

    def state_bytes(self, of: MethodParameters, num_ranks: int) -> float:
        """Return the bytes of the method's state (such as error feedback) that a rank stores between steps."""


class SyncOption(Protocol):
    """Protocol of a parsed value of `dp_sync=`.

    Objects are hashable, and `parse_sync` accepts their `str`.
    """

    @property
    def is_default(self) -> bool:
        """True if all gradients are all-reduced."""

    @property
    def changes_models(self) -> bool:
        """True if every data rank trains its own model, so that models differ between synchronizations."""

    def as_data(self) -> dict[str, Any]:
        """Return the option as the dict that plans store and `parse_sync` accepts."""

    def method_of(self, name: str) -> SyncMethod | None:
        """Return the `dp_sync` method of a parameter; None if its gradient is all-reduced."""

    def axis(self, mesh: Mesh) -> str:
        """Return the mesh axis over which `dp_sync` methods communicate; "" if there is none.

        Raises OptionError if a method needs an axis that the mesh lacks.
        """

    def check_storage(self, trace: Trace, decisions: Decisions) -> None:
        """Raise OptionError if a `dp_sync` method does not support the layout of a stored parameter."""

    def check_program(self, program: Program) -> None:
        """Raise OptionError if a `dp_sync` method needs a full gradient of which the program has only shards."""


@dataclass(frozen=True)
class AllReduce:
    """The default value of `dp_sync=`: an exact all-reduce of all gradients."""

    is_default = True
    changes_models = False

    def __str__(self) -> str:
        return "all_reduce"

    def as_data(self) -> dict[str, Any]:
        return {"strategy": "all_reduce"}

    def method_of(self, name: str) -> SyncMethod | None:
        return None

    def axis(self, mesh: Mesh) -> str:
        return next(iter(mesh.along("rows")), "")

    def check_storage(self, trace: Trace, decisions: Decisions) -> None:
        """Accept every layout of parameters, because an all-reduce supports all of them."""

    def check_program(self, program: Program) -> None:
        """Accept every program, because an all-reduce supports gradient shards."""


ALL_REDUCE = AllReduce()


def parse_sync(value: Any) -> SyncOption:
    """Parse a value of `dp_sync=`: text, or a dict as in a plan. Raises OptionError for invalid values."""
    is_default = value is None or isinstance(value, AllReduce)
    if isinstance(value, str):
        is_default = value.strip() == str(ALL_REDUCE)
    elif isinstance(value, Mapping):
        is_default = dict(value) == ALL_REDUCE.as_data()
    if is_default:
        return ALL_REDUCE
    option: SyncOption = sync_extra().parse(value)
    return ALL_REDUCE if option.is_default else option


def sync_extra() -> Any:
    """Import the optional package `autopart.extras.dp_sync` and return it."""
    return load_extra("dp_sync")

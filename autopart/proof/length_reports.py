"""Verification at several sequence lengths, of traced and derived programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopart.common.flags import environment
from autopart.recipe.compiler import Compiler

if TYPE_CHECKING:
    from autopart.proof.verify import Verification


@dataclass(frozen=True)
class LengthReport:
    """Result of `verify` for one sequence length.

    Args:
        origin: "derived" if the program is derived from programs of other lengths; else "traced", with the reason.
        verification: the comparison with the model, at this length.
        wrong: how a derived program differs from the traced one; "" if it does not.
    """

    length: int
    origin: str
    verification: Verification
    wrong: str = ""

    @property
    def ok(self) -> bool:
        return self.verification.ok and not self.wrong

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "WRONG"
        head = f"length {self.length}: {verdict}, largest error {self.verification.max_error:.3g}, {self.origin}"
        first = "" if self.verification.first_mismatch is None else f"\n  first: {self.verification.first_mismatch}"
        return head + (f"\n  {self.wrong}" if self.wrong else "") + first


class ProgramOrigins:
    """Compilation of a sequence of calls, to report which programs are traced and which are derived.

    A program is derived from the programs of earlier calls if possible. Every derived program is also traced, and both
    are compared node by node.

    Args:
        compiler: compiler of the model, which is not used for anything else.
        options: keyword arguments of `Compiler.program` for each call.
    """

    def __init__(self, compiler: Compiler, **options: Any):
        self.compiler, self.options = compiler, options

    def of(self, args: tuple, kwargs: Mapping[str, Any], target: Any) -> tuple[str, str]:
        """Return how a call's program was made, and how it differs from a traced program ("": it does not).

        The first text is "derived" (from other sizes), "traced" with the reason, or "known" (from an earlier call).
        """
        self.compiler.origin = "known: a call of these sizes occurred before"
        try:
            with environment(check=True):
                self.compiler.program(args, kwargs, target=target, **self.options)
        except AssertionError as error:
            return "derived", str(error)
        return self.compiler.origin, ""

"""Verification at several sequence lengths, for traced programs and programs derived from them."""

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
        origin: how the program was made: "derived" from the programs of other lengths, "traced" with the reason, or
            "known" if an earlier call had the same sizes.
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
    """Compiler of a sequence of calls that reports which programs are traced and which are derived.

    A program is derived from the programs of earlier calls if possible. Every derived program is also traced, and both
    are compared node by node.

    Args:
        compiler: compiler of the model. Nothing else may use it.
        options: keyword arguments of `Compiler.program` for each call.
    """

    def __init__(self, compiler: Compiler, **options: Any):
        self.compiler, self.options = compiler, options

    def of(self, args: tuple, kwargs: Mapping[str, Any], target: Any) -> tuple[str, str]:
        """Return (how the program of a call was made, how a derived program differs from a traced one).

        The first text is "derived" (from programs for other sizes), "traced" with the reason, or "known" (an earlier
        call had the same sizes). The second text is "" if there is no difference.
        """
        self.compiler.origin = "known: a call of these sizes occurred before"
        try:
            with environment(check=True):
                self.compiler.program(args, kwargs, target=target, **self.options)
        except AssertionError as error:
            return "derived", str(error)
        return self.compiler.origin, ""

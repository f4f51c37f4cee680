"""Plans in the formats of other tools, and pins from theirs (`Plan.export`, `autopart.pins_from`)."""

from autopart.extras.interop.formats import export, pins_from

__all__ = ["export", "pins_from"]

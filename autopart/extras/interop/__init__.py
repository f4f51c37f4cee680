"""Conversion between plans and the formats of other tools (`Plan.export`, `autopart.pins_from`)."""

from autopart.extras.interop.formats import export, pins_from

__all__ = ["export", "pins_from"]

"""Hardware profiles from measurements of the current machine (`autopart.calibrate`)."""

from autopart.extras.calibrate.calibrate_machine import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]

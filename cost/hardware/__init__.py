"""Hardware profiles and their calibration."""

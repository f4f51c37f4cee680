"""Settings of a training step as data: schedules, precision, recomputation, ZeRO, gradient methods."""

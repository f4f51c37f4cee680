"""Settings of a training step as data: schedules, precision, recomputation, ZeRO, `dp_sync` methods."""

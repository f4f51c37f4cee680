"""State dicts, checkpoints, and the state of optimizers, on any mesh."""

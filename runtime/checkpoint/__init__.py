"""State dicts, checkpoints and optimizer state, on any mesh."""

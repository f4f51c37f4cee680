"""Saves of a whole training run: `pm.save` and `pm.load`."""

"""Predictions of a training step from a cost table (the operators of a model): time, memory, timeline."""

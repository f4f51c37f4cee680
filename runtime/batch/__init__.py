"""Batches of a call: the samples of a rank, the outputs of a call, buffer updates."""

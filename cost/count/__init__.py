"""Counts of the FLOPs, bytes and collectives of per-rank graphs, for cost predictions."""

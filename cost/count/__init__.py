"""Counts of FLOPs, bytes and collectives in per-rank graphs, for cost predictions."""

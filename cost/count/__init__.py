"""Counts of FLOPs, bytes and collectives in the per-rank graphs of a program, for cost predictions."""

"""Counts of a lowered program for the simulator and the formulas: bytes, FLOPs, collectives."""

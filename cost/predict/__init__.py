"""Predictions from a table of operators: time, memory, timeline of a step."""

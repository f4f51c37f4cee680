"""Closed formulas (sympy) of step time and memory."""

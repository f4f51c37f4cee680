"""Closed formulas (sympy) of the seconds of a step and the bytes of a rank."""

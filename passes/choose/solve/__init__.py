"""Solver for the placements of operators and parameters on the mesh axes."""

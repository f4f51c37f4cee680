"""Placements of operators on the axes of a mesh."""

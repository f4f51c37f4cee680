"""Data types that all layers share: mesh, layout, graph, program, schedule."""

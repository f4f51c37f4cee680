"""Data types that all passes and the runtime share: mesh, layout, graph, program, schedule."""

"""Tracing: from a model and one call to a flat graph, with `torch.export`."""

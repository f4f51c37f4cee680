"""Tracing: convert a model and one example call to a flat graph, with `torch.export`."""

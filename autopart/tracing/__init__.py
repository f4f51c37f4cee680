"""From a model to an annotated graph: one call, traced by `torch.export`."""

"""Execute a plan on torch.distributed."""

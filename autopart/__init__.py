"""Partition an unmodified PyTorch model over a device mesh."""

"""Tensors that hold a shard and behave as the unpartitioned tensor."""

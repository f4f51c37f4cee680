"""Optimizers for partitioned models: updates of full tensors, checks, and `pm.optimizer`."""

"""Choices of a plan: layouts, batch sharding, storage, stages, recomputation; and the cost of alternatives."""

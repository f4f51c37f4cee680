"""Choices of a plan: layouts, batch sharding, storage, stages, recomputation; cost of alternatives."""

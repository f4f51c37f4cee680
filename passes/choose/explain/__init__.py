"""Reasons and notes of a plan, and errors for axes that cannot shard a model."""

"""Reduced copies of a model that are small enough to verify in float64."""

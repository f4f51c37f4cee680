"""Repeated blocks (equal layers) of a model: traced once, and deduplicated for planning."""

"""Repeated blocks (layers): traced once, and deduplicated for planning."""

"""Repeated blocks: traced once, and deduplicated for planning."""

"""Boundaries of pipeline stages."""

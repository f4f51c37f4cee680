"""Checks that all ranks make the same calls with the same program and weights."""

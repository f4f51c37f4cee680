"""Repeated blocks of a traced graph."""

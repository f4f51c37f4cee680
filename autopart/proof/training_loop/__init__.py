"""Proof of a user's own training function."""

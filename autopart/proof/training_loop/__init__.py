"""Proof of a training function that a user has written."""

"""Proof of a training function that the user has written."""

"""Proof of whole training steps."""

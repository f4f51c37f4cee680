"""Proof of training steps, including optimizer and gradient clipping."""

"""Proof of training steps, including the optimizer and gradient clipping."""

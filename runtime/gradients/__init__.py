"""Gradient reduction, sharded parameters (ZeRO) and `no_sync`."""

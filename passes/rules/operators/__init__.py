"""Sharding rules and local forms that need code, one file per family of operators."""

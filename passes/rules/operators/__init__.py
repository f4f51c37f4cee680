"""Sharding rules and local forms by family of operators."""

"""Sharding rules of users, and proofs of rules by execution."""

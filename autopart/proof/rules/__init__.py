"""Sharding rules that users register, and proofs of rules by execution."""

"""Shards of parameters that a rank holds, and the owner of each copy."""

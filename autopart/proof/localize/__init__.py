"""Localization of the first wrong value, and of the smallest subgraph that reproduces the fault."""

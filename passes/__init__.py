"""Compiler passes: choose a plan, and rewrite a graph by it."""

"""Helpers without dependencies: files, flags, progress, scoped values."""

"""Helpers that import no other package of autopart: files, flags, progress, scoped values."""

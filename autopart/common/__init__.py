"""Helpers that import no other package of autopart: files, environment variables, progress, text."""

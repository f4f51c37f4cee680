"""Localization of the first wrong value, and the smallest graph that shows it."""

"""Ranks and their communication: process groups, collectives, watchdog."""

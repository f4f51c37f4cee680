"""Ranks and their communication: process groups, collectives, the watchdog."""

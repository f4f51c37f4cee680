"""Measurements of the machine that runs autopart."""

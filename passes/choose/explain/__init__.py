"""Reasons and notes of a plan."""

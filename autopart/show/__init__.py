"""Presentation of plans: a table, the differences of two plans, an HTML page."""

"""Presentation of plans: a text with tables, the differences of two plans, an HTML page."""

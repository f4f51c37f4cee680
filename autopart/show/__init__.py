"""Plans for readers: a table, a difference, an HTML page."""

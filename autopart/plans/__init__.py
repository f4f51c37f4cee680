"""Plans as data: their content and file format, and the pins with which users fix parts of them."""

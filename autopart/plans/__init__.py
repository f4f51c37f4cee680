"""Plans as data: their content and file format, and pins, by which users fix parts of a plan."""

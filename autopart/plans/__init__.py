"""Plans as data: their content and file format, and pins, with which users fix parts of a plan."""

"""Plans as data: content, file format, and the pins of users."""

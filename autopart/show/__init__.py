"""A plan for people and other tools: as a table, a difference, a page, another tool's words."""

"""Make a plan and rewrite a graph by it."""

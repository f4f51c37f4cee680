"""Analysis results (facts) on graph nodes, for planning: roles of values, factors of dims, strategies."""

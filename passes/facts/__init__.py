"""Facts about a traced graph, for planning: roles of values, factors of dims, sharding strategies."""

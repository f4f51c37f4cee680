"""Facts of a traced graph, found before any choice: roles, factors of dims, sharding strategies."""

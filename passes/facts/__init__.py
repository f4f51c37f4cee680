"""Facts of a traced graph before any choice: roles, factors of dims, sharding strategies."""

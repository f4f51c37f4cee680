"""Facts that planning needs about a traced graph: roles, factors of dims, sharding strategies."""

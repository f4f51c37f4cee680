"""Facts of a traced graph that plans are chosen from: roles, factors of dims, sharding strategies."""

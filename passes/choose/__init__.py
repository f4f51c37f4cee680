"""Choice of a plan: layouts, batch sharding, parameter storage, stages, recomputation, and reasons."""

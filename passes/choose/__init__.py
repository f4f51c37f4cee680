"""Choice of a plan: layouts, batch sharding, parameter storage, stages and recomputation, with the reasons."""

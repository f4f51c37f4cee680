"""Cost of a plan: symbolic time and memory of a partitioned graph."""

"""Cost of a plan: time and memory of a partitioned graph, as numbers and as sympy formulas."""

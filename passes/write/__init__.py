"""One graph per stage with local shapes and collectives, from a graph and what was chosen."""

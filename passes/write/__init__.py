"""Generation of programs: one graph per stage, with local shapes and collectives."""

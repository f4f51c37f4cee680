"""Generation of programs: one graph per pipeline stage, with local shapes and collectives."""

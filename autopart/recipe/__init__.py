"""Planning: trace, choose, write the program, count its cost."""

"""Planning of a model: trace it, choose layouts and stages, write the program, count its cost."""

"""Compiler passes: choose a plan for a traced model, and write the program of the plan."""

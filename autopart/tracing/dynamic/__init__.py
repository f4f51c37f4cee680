"""Data-dependent Python in a forward: sizes, scalars, branches and index lists."""

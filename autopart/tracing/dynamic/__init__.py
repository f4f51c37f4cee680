"""Python in a forward that depends on tensor values: sizes, scalars, branches and index lists."""

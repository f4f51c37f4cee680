"""Python that depends on tensor values in a forward: sizes, scalars, branches and index lists."""

"""Rewrites and compilation of stage graphs at run time."""

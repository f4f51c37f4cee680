"""Ranks and what they send each other: groups, collectives, how tensors are cut, who waits for whom."""

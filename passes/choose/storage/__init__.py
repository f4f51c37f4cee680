"""Storage of parameters: sharded (ZeRO) or replicated, and how their gradients are synchronized."""

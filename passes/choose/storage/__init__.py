"""Storage of parameters: sharded (ZeRO) or replicated, and reduction of their gradients."""

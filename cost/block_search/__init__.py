"""Search for recomputation, sharding and placement block by block."""

"""Parameters that hold this rank's shard and behave as the full tensor."""

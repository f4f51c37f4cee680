"""Parameters that store this rank's shard and behave as the full tensor."""

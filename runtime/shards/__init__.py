"""Parameter shards that a rank stores, and the owner rank of each shard."""

"""Parameter shards that a rank stores, and the owner of each copy."""

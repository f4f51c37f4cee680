"""Optimizers for partitioned models.

`pm.optimizer` runs optimizers that need full matrices, such as Muon. Checks reject optimizers whose updates
would be wrong on shards."""

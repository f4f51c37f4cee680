"""Optimizers for partitioned models.

`pm.optimizer` runs optimizers that need full matrices, such as Muon. Checks refuse optimizers that would compute
something else on shards."""

"""Training loop around a partitioned model: norms, loss scaling, optimizers, hooks, nn.Module methods."""

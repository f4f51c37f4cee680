"""Training of a partitioned model: gradient norms, loss scaling, optimizers, hooks, nn.Module methods."""

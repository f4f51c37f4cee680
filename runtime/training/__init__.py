"""Training of a partitioned model: norms, loss scaling, optimizers, hooks, methods of nn.Module."""

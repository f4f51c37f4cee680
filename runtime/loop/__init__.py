"""What users do around a step: norms, loss scales, optimizers, hooks, options, the ways of an nn.Module."""

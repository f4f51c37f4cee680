"""Custom operators `torch.ops.autopart.*`: schemas, kernels and their backward."""

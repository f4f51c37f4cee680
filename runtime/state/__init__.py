"""What a rank holds of the model: shards, buffers, gradients, its rows of the batch, what is run again."""

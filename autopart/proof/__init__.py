"""That the partitioned program computes what the model does, and where it does not."""

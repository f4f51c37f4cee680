"""Communication-efficient data parallelism: gradient compression and model averaging."""

"""Programs as functions of sizes: a program for new sequence lengths or batch sizes without another trace."""

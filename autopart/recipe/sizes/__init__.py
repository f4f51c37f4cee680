"""Programs for new sequence lengths and batch sizes, derived from traced ones."""

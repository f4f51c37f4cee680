"""Load weights from files, and initialise models without storing them in full."""

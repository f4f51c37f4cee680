"""Loading of weights from files, and deferred initialisation."""

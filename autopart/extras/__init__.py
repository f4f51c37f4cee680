"""Optional parts of autopart, loaded on use by `autopart.common.extras`."""

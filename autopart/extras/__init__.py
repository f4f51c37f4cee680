"""Optional parts of autopart. `autopart.common.extras` loads each on its first use."""

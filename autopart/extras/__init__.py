"""Optional features of autopart. `autopart.common.extras` imports each package on its first use."""

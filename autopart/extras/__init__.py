"""Optional parts of autopart. The core imports none of them by name: `autopart.common.extras` loads them on use."""

"""Private parts of torch. No other package of autopart uses any."""

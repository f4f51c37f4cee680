"""Hardware profiles: speeds and capacities of devices and links."""

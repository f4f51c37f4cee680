"""All uses of torch's private APIs in autopart."""

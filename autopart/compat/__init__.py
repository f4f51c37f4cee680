"""All uses of private parts of torch in autopart."""

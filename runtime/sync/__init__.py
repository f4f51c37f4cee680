"""What data-parallel ranks send each other in place of all gradients: methods, and what carries them."""

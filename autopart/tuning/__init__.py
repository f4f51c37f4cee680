"""Search for a mesh and its options, and advice on memory."""

"""Split the inputs of a call into the samples of each rank, merge the outputs, and update buffers."""

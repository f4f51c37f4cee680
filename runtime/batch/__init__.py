"""The batch of a call: samples of a rank, outputs, buffers."""

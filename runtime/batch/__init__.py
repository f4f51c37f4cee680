"""Inputs and outputs of a call: split the batch over ranks, merge outputs, update buffers."""

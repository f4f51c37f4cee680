"""Proofs that a partitioned program computes what the model computes, and localization of faults."""

"""Weights of a model: loaded from files, or initialised, without a full copy on any rank."""

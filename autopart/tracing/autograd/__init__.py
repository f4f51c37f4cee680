"""Autograd features inside a forward: custom functions, hooks, transforms, gradients."""

"""Autograd features that a forward uses: custom functions, hooks, transforms, gradients."""

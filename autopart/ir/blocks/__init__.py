"""Repeated blocks of a traced graph, such as the layers of a transformer."""

"""Blocks, the prefix tree and the manager that owns them."""

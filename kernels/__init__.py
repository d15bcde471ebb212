"""Tensor operations: tensors in, tensors out. See `kernels.ops`.

This file stays a docstring: transformers probes for a package of this name.
"""

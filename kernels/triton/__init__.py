"""Kernels for NVIDIA GPUs in Triton. `offers` says which ops they serve; the other modules import triton, and are
imported when a kernel is needed. A module has kernels (`@triton.jit`) and, for each op, a function that launches them.

Kernels obey what Triton's interpreter demands, in which they are tested on CPUs: numbers are widened when they are
loaded and narrowed when they are stored (`codes`), every masked load says what the other lanes hold, and offsets into
tensors are 64-bit. A row's result depends on the sizes of tiles, which are fixed for each width, and never on how many
rows there are.
"""

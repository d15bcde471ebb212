"""Which decode steps a GPU has as CUDA graphs. Pure arithmetic."""

LARGEST = 512
"""Sequences. Steps of more keep the GPU busy for longer than the host takes to launch them."""


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sequences of each graph, ascending. A step is padded to the next one: by at most 7 up to 256, by 15 above."""
    steps = (1, 2, 4, *range(8, 257, 8), *range(272, LARGEST + 1, 16))
    largest = min(max_num_seqs, LARGEST)
    return (*(size for size in steps if size < largest), largest)

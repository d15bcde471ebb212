"""The scratch in which a sequence is refreshed. Pure arithmetic: pool sizes and the runner both ask here."""

from dataclasses import replace

from configs.kv import KVFormat, KVGroup, KVLayout, KVSpec


def scratch(layout: KVLayout, plain: KVFormat) -> KVGroup:
    """Where one sequence's K and V lie in full precision: of the layers that keep them quantised, and of those alone,
    since pages of the others hold what the model computes.

    plain: the format of the model's own numbers. Windows do not matter: the scratch keeps whole contexts.
    """
    layers = [layout.groups[group].spec.layers[index] for group, index in layout.places]
    numbers = tuple(
        number for number, layer in enumerate(layers) if any(format.is_quantised for format in layer.formats)
    )
    kept = (replace(layers[number], format=plain, value_format=None, static=False) for number in numbers)
    return KVGroup(None, numbers, KVSpec(tuple(kept), layout.block_size, layout.order))


def scratch_bytes(layout: KVLayout, plain: KVFormat, num_tokens: int) -> int:
    """Of a sequence of so many tokens."""
    spec = scratch(layout, plain).spec
    return spec.blocks_for_tokens(num_tokens) * spec.block_bytes

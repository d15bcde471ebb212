"""What it costs that a row's bits depend on nothing beside it, at 1 row and at 256.

Attention: splits of one length, whatever the batch, against the best length for each batch. Linear layers: those of
--batch-invariant against torch's, whose bits may depend on the number of rows.
"""

from functools import partial
from unittest.mock import patch

import torch
from gpu.bench import Bench, equal
from gpu.contexts import Contexts, timed_kind
from gpu.random_model import QWEN3_06B, TINY, Shape
from torch.nn import functional

from kernels.reference import linear as reference
from kernels.triton import attention, linear

BF16 = torch.bfloat16
OTHERS = (256, 1024)
"""Lengths of splits."""
TARGETS = {1: 0.10, 256: 0.20}
SPEED = 0.43
"""Of other numbers of rows: 70 % of torch's speed."""
MOST_DRAWN = 256
"""Rows that a head reads."""
MODELS = (
    ("Qwen3-0.6B", QWEN3_06B),
    ("Llama-3.1-8B", Shape(4096, 14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256)),
)


def run(bench: Bench) -> None:
    for rows, length in bench.some([(1, 20)], [(1, 1024), (1, 8192), (1, 32768), (256, 1024), (256, 8192)]):
        with bench.findings.case(f"splits, {rows} rows of {length}"):
            splits(bench, Contexts(bench, timed_kind(bench), rows, length))
    for rows in bench.some([1], [1, 256, 4096]):
        for name, shape in bench.some([("a tiny model", TINY)], MODELS):
            with bench.findings.case(f"linear layers of {name}, {rows} rows"):
                linears(bench, name, shape, rows)


def splits(bench: Bench, contexts: Contexts) -> None:
    def seconds(split: int) -> float:
        attention.shape_of.cache_clear()
        with patch.object(attention, "SPLIT", split):
            return bench.seconds(contexts.calls(bench.copies(contexts.nbytes)))

    own = attention.SPLIT
    found = {split: seconds(split) for split in (own, *bench.some(OTHERS[:1], OTHERS))}
    attention.shape_of.cache_clear()
    best = min(found, key=lambda split: found[split])
    cost = found[own] / found[best] - 1
    target = TARGETS[contexts.sequences]
    text = f"{cost:+.1%} against {best}{bench.aim(f'{target:+.0%}', cost <= target)}: " + ", ".join(
        f"{split}: {took * 1e6:.0f} us" for split, took in sorted(found.items())
    )
    name = f"splits of {own}, {contexts.sequences} rows of {contexts.length}"
    bench.findings.figure(
        name, text, cost=cost, target=target, seconds={str(split): took for split, took in found.items()}
    )


def linears(bench: Bench, name: str, shape: Shape, rows: int) -> None:
    """All of a step, as the engine fuses them; the head reads rows that draw."""
    layers = shape.linears
    qkv = sum(layers[f"self_attn.{each}_proj"][0] for each in "qkv")
    sizes = {
        (qkv, shape.hidden): shape.layers,
        layers["self_attn.o_proj"]: shape.layers,
        (2 * shape.intermediate, shape.hidden): shape.layers,
        layers["mlp.down_proj"]: shape.layers,
        (shape.vocab, shape.hidden): int(rows <= MOST_DRAWN),
    }
    plain = ours = 0.0
    exact, found = 0, {}
    for (outputs, inputs), times in sizes.items():
        x = bench.normal(max(rows, 2), inputs, dtype=BF16)
        copies = bench.copies(outputs * inputs * 2, most=16)
        weights = [bench.normal(outputs, inputs, dtype=BF16, seed=seed) for seed in range(copies)]
        took = [
            bench.seconds([partial(pack(weight), x[:rows]) for weight in weights])
            for pack in (reference.pack_linear, linear.pack_linear)
        ]
        plain, ours = plain + times * took[0], ours + times * took[1]
        found[f"{inputs} to {outputs}"] = took
        exact += equal(functional.linear(x[:1], weights[0]), functional.linear(x, weights[0])[:1])
    cost, target = ours / plain - 1, TARGETS.get(rows, SPEED)
    text = (
        f"{cost:+.1%}{bench.aim(f'{target:+.0%}', cost <= target)}: {ours * 1e6:.0f} us, torch's "
        f"{plain * 1e6:.0f} us; torch's give a row the bits that it has alone in {exact} of {len(sizes)} layers"
    )
    bench.findings.figure(
        f"linear layers of {name}, {rows} rows", text, plain=plain, ours=ours, exact=exact, seconds=found
    )

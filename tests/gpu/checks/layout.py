"""Blocks that hold all layers, as ours do, against a pool for each layer: does reading layer after layer suffer?"""

import torch
from gpu.bench import Bench
from gpu.contexts import Contexts, numbers, timed_kind

from configs.kv import KVOrder, KVSpec
from kernels.ops import LayerPages

TARGET = 0.02
"""Of the time, at most."""


def run(bench: Bench) -> None:
    layers = 2 if bench.is_tiny else 28
    for sequences, length in bench.some([(1, 20)], [(64, 1024), (256, 2048), (16, 16384)]):
        with bench.findings.case(f"layouts, {sequences} x {length}"):
            compare(bench, Contexts(bench, timed_kind(bench), sequences, length), layers)


def compare(bench: Bench, contexts: Contexts, layers: int) -> None:
    bench.wait()
    blocks, kind = contexts.blocks, contexts.kind
    spec, whole = (KVSpec((kind.layer,) * count, kind.block_size, KVOrder.ROWS) for count in (1, layers))
    memory = numbers(bench, blocks * max(whole.block_bytes, layers * spec.block_bytes))
    tables = torch.randperm(blocks, device=bench.device, generator=bench.generator()).to(torch.int32)
    tables = tables.view(contexts.sequences, -1)
    by_block = memory[: blocks * whole.block_bytes].view(blocks, -1)
    by_layer = memory[: layers * blocks * spec.block_bytes].view(layers, blocks, -1)
    seconds = {}
    for name, each in {
        "blocks of all layers": [LayerPages(by_block, whole, layer) for layer in range(layers)],
        "a pool a layer": [LayerPages(pool, spec, 0) for pool in by_layer],
    }.items():
        what = f"{name}, {contexts.sequences} x {contexts.length}, {layers} layers"
        calls = [contexts.call(pages, tables) for pages in each]
        seconds[name] = bench.bandwidth(what, contexts.nbytes, calls)
    ours, theirs = seconds.values()
    cost = ours / theirs - 1
    text = f"{cost:+.1%} of the time{bench.aim(f'{TARGET:+.0%}', cost <= TARGET)}"
    bench.findings.figure("  what blocks of all layers cost", text, cost=cost, target=TARGET)

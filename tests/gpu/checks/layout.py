"""Blocks that hold all layers, as ours do, against a pool for each layer: does reading layer after layer suffer?"""

import torch
from gpu.bench import Bench
from gpu.contexts import Contexts, numbers
from gpu.pages import Kind

from configs.kv import KVOrder, KVSpec
from kernels.ops import LayerPages


def run(bench: Bench) -> None:
    kind = Kind(torch.bfloat16, group=2, kv_heads=8, head_dim=128)
    if bench.is_tiny:
        kind = Kind(torch.bfloat16, kv_heads=1, head_dim=32)
    layers = 2 if bench.is_tiny else 28
    for sequences, length in bench.some([(1, 20)], [(64, 1024), (256, 2048), (16, 16384)]):
        with bench.findings.case(f"layouts, {sequences} x {length}"):
            compare(bench, Contexts(bench, kind, sequences, length), layers)


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
    text = f"{ours / theirs - 1:+.1%} of the time (target: within 2%)"
    bench.findings.figure("  what blocks of all layers cost", text, cost=ours / theirs - 1)

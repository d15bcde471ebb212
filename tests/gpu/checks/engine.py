"""The whole engine, in this process, on a model of random weights: whether a request's tokens are the same alone, in
company, and from cached pages.
"""

from gpu.bench import Bench
from gpu.engines import MODES, engine, requests, serve

from engine.core.loop import EngineCore

BLOCKS = 4096
"""Of the pool: several engines fit on a GPU, beside whatever else is asked meanwhile."""


def run(bench: Bench) -> None:
    for mode in bench.mine(tuple(MODES), tuple(MODES)):
        with bench.findings.case(mode), engine(bench, mode, num_gpu_blocks_override=BLOCKS) as core:
            exactness(bench, core, mode, must_be=bench.is_tiny or "batch_invariant" in MODES[mode])


def exactness(bench: Bench, core: EngineCore, mode: str, must_be: bool) -> None:
    """Linear layers are exact on a CPU, on a GPU with the flag. torch's there may give a row other bits in other
    company: it is told how often that shows."""
    asked = requests(bench, *((3, 5, 20) if bench.is_tiny else (16, 20, 300)), max_tokens=12 if bench.is_tiny else 48)
    found = []
    for ways in (
        lambda: [serve(core, [each])[0] for each in asked],
        lambda: serve(core, asked),
        lambda: serve(core, asked),
    ):
        core.reset_prefix_cache()
        found.append(ways())
    alone, together, again = found
    cached = serve(core, asked)
    bench.findings.verdict(f"{mode}, the same requests twice", together == again)
    for what, other in (("alone and in company", together), ("computed and from cached pages", cached)):
        same = sum(ours == theirs for ours, theirs in zip(alone, other, strict=True))
        text = f"{same} of {len(asked)} requests have the same {len(alone[0])} tokens"
        if must_be:
            bench.findings.verdict(f"{mode}, {what}", same == len(asked), text)
        else:
            bench.findings.figure(f"{mode}, {what}", text, same=same, requests=len(asked))

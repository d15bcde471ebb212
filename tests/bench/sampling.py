"""What drawing tokens costs: python tests/bench/sampling.py [VOCABULARY ...]

Best of some calls of `Sampler.sample` with one thread, in milliseconds, for bf16 logits of two shapes: peaked, as of a
model that knows what comes, and flat, the worst case for top-p.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from sampling_rows import Row, sampler_for

from engine.sampling_params import SamplingParams
from kernels.threads import set_threads

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
KINDS = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{}],
    "top_p 0.9": [{"top_p": 0.9}],
    "top_p 0.99": [{"top_p": 0.99}],
    "top_k 50": [{"top_k": 50}],
    "min_p 0.05": [{"min_p": 0.05}],
    "penalties": [PENALTIES],
    "logprobs 5": [{"temperature": 0.0, "logprobs": 5}],
    "mix": [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {}, {"top_k": 50, "logprobs": 5}],
}


def logits(rows: int, vocab_size: int, is_peaked: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, vocab_size, generator=generator)
    if is_peaked:
        likely = torch.randint(0, vocab_size, (rows, 200), generator=generator)
        x = 2.5 * x
        x.scatter_add_(1, likely, torch.linspace(12, 6, 200).expand(rows, -1))
    return x.bfloat16()


def best(x: torch.Tensor, kinds: list[dict[str, float]]) -> float:
    params = [SamplingParams(seed=row, **kinds[row % len(kinds)]) for row in range(len(x))]
    rows = [Row(x[row], params[row], prompt=[*range(1, 60)], output=[*range(60, 100)]) for row in range(len(x))]
    slots = np.arange(len(x))
    sampler = sampler_for(rows, slots.tolist(), max(64, len(x)))
    seconds = []
    for _ in range(5 if len(x) > 16 else 15):
        start = time.perf_counter()
        sampler.sample(x, slots)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def main() -> None:
    set_threads(1)
    print(f"{'vocabulary':>10} {'logits':>7} {'rows':>5} " + " ".join(f"{name:>11}" for name in KINDS))
    for vocab_size in [int(argument) for argument in sys.argv[1:]] or [49152, 151936]:
        for shape in ("peaked", "flat"):
            for rows in (1, 16, 64, 256):
                x = logits(rows, vocab_size, shape == "peaked")
                cells = " ".join(f"{best(x, kinds):>11.2f}" for kinds in KINDS.values())
                print(f"{vocab_size:>10} {shape:>7} {rows:>5} {cells}", flush=True)


if __name__ == "__main__":
    main()

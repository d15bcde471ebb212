"""What int8 weights cost a model: python tests/bench/weight_quality.py MODEL [TEXT] [--tokens N]

Perplexity with the weights as they are and in int8 and the standard error of their ratio, divergence (nats a token) and
the share of tokens with the same likeliest successor, in sequences of 2,048 tokens. MODEL: a folder or a GGUF file.
TEXT: a file; without it the reference manual that Python brings along.
"""

import argparse
import math
import pydoc_data.topics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from engines import Loaded

from configs.kv_flags import PLAIN
from engine.runner.solo import Solo
from engine.source import ModelSource
from engine.text.tokenizer import Tokenizer
from kernels.threads import set_threads

SEQUENCE, CHUNK, ROWS = 2048, 512, 128


@torch.inference_mode()
def compare(path: Path, text: str, tokens: int) -> None:
    plain, int8 = (Loaded.load(path, torch.bfloat16, SEQUENCE, quantization=name) for name in ("none", "int8"))
    layers = plain.config.kv_layers(PLAIN["bfloat16"])
    ids = Tokenizer.load(ModelSource(path, "model", "bench")).encode(text[: 12 * tokens], add_special_tokens=False)
    losses: list[torch.Tensor] = []
    divergence, agree = 0.0, 0
    for first in range(0, min(tokens, len(ids)) - SEQUENCE + 1, SEQUENCE):
        some = ids[first : first + SEQUENCE]
        following = torch.tensor(some[1:])
        solos = [Solo(each.model, layers, SEQUENCE, plain.device) for each in (plain, int8)]
        hidden = [solo.hidden(some, chunk=CHUNK)[:-1] for solo in solos]
        for row in range(0, SEQUENCE - 1, ROWS):
            rows = slice(row, row + ROWS)
            logits = [solo.model.logits(h[rows]).float() for solo, h in zip(solos, hidden, strict=True)]
            theirs, ours = (x.log_softmax(dim=-1) for x in logits)
            losses.append(-torch.cat([x.gather(1, following[rows, None]) for x in (theirs, ours)], dim=1).double())
            divergence += float((theirs.exp() * (theirs - ours)).sum())
            agree += int((theirs.argmax(1) == ours.argmax(1)).sum())
    each = torch.cat(losses)
    count, (before, after) = len(each), each.mean(dim=0).exp().tolist()
    error = 100 * float((each[:, 1] - each[:, 0]).std()) / math.sqrt(count)
    print(
        f"{count} tokens: perplexity {before:.3f} in bf16, {after:.3f} with int8 weights "
        f"({100 * (after / before - 1):+.2f} +- {error:.2f} %), divergence {divergence / count:.5f}, same likeliest "
        f"{100 * agree / count:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--num-threads", type=int, default=2)
    given = parser.parse_args()
    set_threads(given.num_threads)
    text = given.text.read_text() if given.text else "\n\n".join(pydoc_data.topics.topics.values())
    compare(given.model, text, given.tokens)


if __name__ == "__main__":
    main()

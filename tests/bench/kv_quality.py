"""What a KV format costs a model, and what it saves: python tests/bench/kv_quality.py MODEL [TEXT] [--only FORMAT ...]

    quality  perplexity, divergence from the plain cache (nats a token), share of tokens with the same likeliest
             successor, over --tokens (20,480) in sequences of 2,048
    unfitted the same with keys that are not fitted
    drift    divergence over 1,000 tokens that the model wrote itself with a plain cache, by quarters, and the same
             where the cache is refreshed every so many tokens
    speed    a decode step of one sequence at contexts of 512, 2k and 8k tokens (as far as the window goes), in
             milliseconds; rounds in which each format makes some steps in a row, medians
    size     bytes a token, by those of the plain cache, and sequences of 2,048 tokens in 4 GiB

MODEL: a folder or a GGUF file. TEXT: a file; without it the reference manual that Python brings along.
"""

import argparse
import math
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from engines import Engine, Loaded

from configs.kv import KVLayout, LayerKV
from configs.kv_flags import PLAIN, kv_layers
from configs.settings import Settings
from engine.model.registry import read_config
from engine.runner.attention.paged import PagedAttention
from engine.runner.key_fit import KeyFit
from engine.runner.kv_store import UNTRANSFORMED, KVTransforms
from engine.runner.refresh import RefreshAttention
from engine.runner.solo import BLOCK_SIZE, Solo
from engine.sampling_params import SamplingParams
from engine.source import ModelSource
from engine.text.sample import FIT_TOKENS, SAMPLE, TRIED_TOKENS
from engine.text.tokenizer import Tokenizer
from kernels.threads import set_threads

TOKENS, SEQUENCE, CHUNK, ROWS = 20_480, 2048, 512, 128
PROMPT, WRITTEN = 256, 1000
INTERVALS = (64, 250)
ROUNDS, STEPS = 7, 8
CPU = torch.device("cpu")
FORMATS = {
    "bf16": {},
    "fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "int8": {"kv_cache_dtype": "int8"},
    "int8/int4": {"kv_cache_dtype": "int8", "kv_cache_dtype_v": "int4"},
    "int4": {"kv_cache_dtype": "int4"},
}


class Bench:
    def __init__(self, path: Path, text: str, names: Sequence[str], tokens: int) -> None:
        window = read_config(path, trust_remote_code=False).effective_window(None)
        self.loaded = Loaded.load(path, torch.bfloat16, window)
        tokenizer = Tokenizer.load(ModelSource(path, "model", "bench"))
        self.ids = tokenizer.encode(text[: 12 * tokens], add_special_tokens=False)[:tokens]
        self.layers = {name: self.layers_of(FORMATS[name]) for name in names}
        self.plain = self.layers_of({})
        sample = tokenizer.encode(SAMPLE, add_special_tokens=True)[TRIED_TOKENS : TRIED_TOKENS + FIT_TOKENS]
        self.fit = KeyFit.of(self.loaded.model, self.plain, sample, window, CPU)

    def layers_of(self, flags: dict[str, str]) -> tuple[LayerKV, ...]:
        return kv_layers(Settings.create(flags), self.loaded.config, "bfloat16")

    def solo(self, layers: Sequence[LayerKV], tokens: int) -> Solo:
        return Solo(self.loaded.model, layers, tokens, CPU, self.fit.transforms(layers))

    # ------------------------------------------------------------ quality
    @torch.inference_mode()
    def quality(self) -> None:
        self._quality("", self.fit.transforms)

    def unfitted(self) -> None:
        self._quality(", keys not fitted", lambda layers: [UNTRANSFORMED] * len(layers))

    def _quality(self, words: str, transforms: Callable[[Sequence[LayerKV]], Sequence[KVTransforms]]) -> None:
        loss: dict[str, float] = dict.fromkeys(self.layers, 0.0)
        divergence, agree = dict(loss), dict(loss)
        count = 0
        for first in range(0, len(self.ids) - SEQUENCE + 1, SEQUENCE):
            ids = self.ids[first : first + SEQUENCE]
            following = torch.tensor(ids[1:])
            expected = self.solo(self.plain, SEQUENCE).hidden(ids, chunk=CHUNK)[:-1]
            count += len(following)
            for name, layers in self.layers.items():
                solo = Solo(self.loaded.model, layers, SEQUENCE, CPU, transforms(layers))
                hidden = solo.hidden(ids, chunk=CHUNK)[:-1]
                for row in range(0, len(hidden), ROWS):
                    theirs, ours = (self.log_softmax(h[row : row + ROWS]) for h in (expected, hidden))
                    loss[name] -= float(ours.gather(1, following[row : row + ROWS, None]).sum())
                    divergence[name] += float((theirs.exp() * (theirs - ours)).sum())
                    agree[name] += float((theirs.argmax(1) == ours.argmax(1)).sum())
        base = loss["bf16"] / count
        for name in self.layers:
            each = loss[name] / count
            print(f"quality {name:10} perplexity {math.exp(each):8.3f} ({100 * math.expm1(each - base):+7.2f} %), "
                  f"divergence {divergence[name] / count:.5f}, same likeliest {100 * agree[name] / count:6.2f} %"
                  + words, flush=True)  # fmt: skip

    def log_softmax(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.loaded.model.logits(hidden)
        return logits.float().log_softmax(dim=-1)

    # ------------------------------------------------------------ drift
    @torch.inference_mode()
    def drift(self) -> None:
        prompt = self.ids[:PROMPT]
        params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True, repetition_penalty=1.1)
        ids = prompt + Engine(self.loaded).run([prompt], params)[0].token_ids
        expected = self.written(self.plain, ids, None)
        for name, layers in self.layers.items():
            if name == "bf16":
                continue
            for interval in (None, *INTERVALS):
                found = self.written(layers, ids, interval)
                parts = []
                for theirs, ours in zip(expected.chunk(4), found.chunk(4), strict=True):
                    a, b = self.log_softmax(theirs), self.log_softmax(ours)
                    parts.append(float((a.exp() * (a - b)).sum() / len(a)))
                words = "no refresh" if interval is None else f"every {interval}"
                print(f"drift   {name:10} {words:10}", *(f"{part:.5f}" for part in parts), flush=True)

    def written(self, layers: Sequence[LayerKV], ids: list[int], interval: int | None) -> torch.Tensor:
        """Hidden states after which each of the written tokens but the first came, the cache refreshed as a server
        does: before token k x interval + 1 all but the last token so far."""
        solo = self.solo(layers, len(ids))
        usual = solo.attention
        assert isinstance(usual, PagedAttention)
        refresh = RefreshAttention(usual, solo.layout, PLAIN["bfloat16"], len(ids), CPU)

        def forward(start: int, end: int, full: bool) -> torch.Tensor:
            parts = []
            for begin in range(start, end, CHUNK):
                some = torch.tensor(ids[begin : min(end, begin + CHUNK)])
                batch = solo._batch(some, begin, 0)
                parts.append(solo.model.hidden(batch, refresh if full else usual))
            return torch.cat(parts)

        found = [forward(0, PROMPT + (interval or WRITTEN) - 1, False)[PROMPT:]]
        for count in range(interval or WRITTEN, WRITTEN, interval or WRITTEN):
            edge = PROMPT + count - 1
            forward(0, edge, True)
            found.append(forward(edge, min(len(ids) - 1, edge + (interval or 0)), False))
        return torch.cat(found)

    # ------------------------------------------------------------ speed
    def speed(self) -> None:
        longest = min(8192, self.loaded.window)
        for context in (context for context in (512, 2048, 8192) if context <= longest):
            ids = (self.ids * 2)[:context]
            solos = {name: self.solo(layers, context) for name, layers in self.layers.items()}
            for solo in solos.values():
                solo.hidden(ids, chunk=CHUNK)
            times: dict[str, list[float]] = {name: [] for name in solos}
            last = torch.tensor(ids[-1:])
            for _ in range(ROUNDS):
                for name, solo in solos.items():
                    for step in range(STEPS + 2):  # the first two find the caches as the format before left them
                        batch = solo._batch(last, context - 1, 0)
                        begin = time.perf_counter()
                        with torch.inference_mode():
                            solo.model.logits(solo.model.hidden(batch, solo.attention))
                        if step >= 2:
                            times[name].append(1e3 * (time.perf_counter() - begin))
            row = (f"{name} {statistics.median(times[name]):.2f}" for name in solos)
            print(f"speed   context {context:5}, ms a step:", ", ".join(row), flush=True)

    # ------------------------------------------------------------ size
    def size(self) -> None:
        plain = KVLayout.of(self.plain, BLOCK_SIZE)
        for name, layers in self.layers.items():
            layout = KVLayout.of(layers, BLOCK_SIZE)
            fit = 4 * 2**30 // (SEQUENCE // BLOCK_SIZE * layout.block_bytes)
            share = layout.bytes_per_token / plain.bytes_per_token
            print(f"size    {name:10} {layout.bytes_per_token:6} bytes a token, {share:.3f} of bf16; "
                  f"{fit} sequences of {SEQUENCE} in 4 GiB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", default=list(FORMATS))
    parser.add_argument("--parts", nargs="+", default=["size", "quality", "drift", "speed"])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--num-threads", type=int, default=2)
    given = parser.parse_args()
    text = given.text.read_text() if given.text else "\n\n".join(pydoc_data.topics.topics.values())
    names = ["bf16", *(name for name in given.only if name != "bf16")]
    set_threads(given.num_threads)
    bench = Bench(given.model, text, names, given.tokens)
    for part in given.parts:
        getattr(bench, part)()


if __name__ == "__main__":
    main()

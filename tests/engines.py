"""Whole engines on one loaded model: real scheduler, KV manager, runner and kernels, no HTTP. For tests."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from configs.kv import KVLayout, KVOrder, LayerKV, WindowPages
from configs.kv_flags import PLAIN, kv_layers
from configs.limits import SchedulerLimits
from configs.model import DType, Quantization, SizedConfig
from configs.settings import Settings
from engine import device
from engine.cache_setup import prefer_static
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.kv_scales import KVScales
from engine.messages import AddRequest, CacheInfo, TokenLogprobs
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.model.registry import load_model, read_config
from engine.ports import NoGrammar
from engine.runner.ahead import AheadExecutor
from engine.runner.executor import ModelExecutor, SingleExecutor
from engine.runner.key_fit import KeyFit
from engine.runner.kv_store import KVTransforms, static_transforms
from engine.runner.link import CudaLink, Link
from engine.runner.model_runner import CacheUse, ModelRunner
from engine.sampling_params import SamplingParams
from kernels import flash
from kernels.registry import AUTO
from kernels.threads import num_threads, set_threads

DTYPES: dict[torch.dtype, DType] = {dtype: name for name, dtype in device.DTYPES.items()}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loaded:
    """A model in memory. Engines on it share the weights."""

    model: CausalLM
    config: SizedConfig
    dtype: torch.dtype
    window: int
    device: torch.device = CPU
    kv: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the KV cache's formats and refreshes."""
    fits: list[KeyFit] = field(default_factory=list)
    """The one of all formats, once it is asked for: `replace` hands it on."""

    @property
    def refresh_interval(self) -> int | None:
        return Settings.create(self.kv).kv_refresh_interval

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        return kv_layers(Settings.create(self.kv), self.config, DTYPES[self.dtype])

    @cached_property
    def transforms(self) -> list[KVTransforms]:
        """Keys fitted to random tokens; of the file of scales, if there is one, what is static."""
        if not self.fits:
            plain = self.config.kv_layers(PLAIN[DTYPES[self.dtype]])
            tokens = torch.randint(self.config.vocab_size, (128,), generator=torch.Generator().manual_seed(0)).tolist()
            self.fits.append(KeyFit.of(self.model, plain, tokens, self.window, self.device))
        fitted = self.fits[0].transforms(self.kv_layers)
        path = self.kv.get("kv_cache_scales")
        if path is None:
            return fitted
        static = static_transforms(KVScales.load(Path(path)), self.kv_layers, self.device)
        return [prefer_static(*both) for both in zip(static, fitted, strict=True)]

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        window: int,
        device: torch.device = CPU,
        quantization: Quantization = "none",
    ) -> "Loaded":
        config = read_config(path, trust_remote_code=False)
        model = load_model(path, config, dtype, window, lambda fraction: None, device, quantization)
        return cls(model, config, dtype, window, device)


@dataclass
class Completion:
    """What one sequence brought."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def chosen(self) -> torch.Tensor:
        """fp64 [tokens]: log-probabilities of the chosen tokens and of the most likely ones, to compare bit for bit."""
        rows = [[entry.logprob, *entry.top_logprobs] for entry in self.logprobs]
        return torch.tensor(rows, dtype=torch.float64)


class Engine:
    """`run` completes prompts together; `check()` follows every step. No token ends a sequence by itself."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_num_seqs: int = 64,
        chunk: int = 512,
        prefix_caching: bool = True,
        num_extents: int | None = None,
        link: Link | None = None,
        backend: str = AUTO,
    ) -> None:
        """`num_extents`: pages of each windowed group, as many as `num_blocks` if not given; `link`: to a device that
        the host runs ahead of; a GPU has its own; `backend`: of attention; flash-attn reads pages as a GPU has them."""
        order = KVOrder.of(loaded.device.type != "cpu" or backend == flash.BACKEND)
        layout = KVLayout.of(loaded.kv_layers, block_size, order=order)
        counts = [num_blocks, *[num_extents or num_blocks] * (len(layout.groups) - 1)]
        pages = [
            WindowPages.plan(group.window, count, block_size, chunk)
            for group, count in zip(layout.groups, counts, strict=True)
            if group.window is not None
        ]
        kv = KVManager(num_blocks, block_size, prefix_caching, windows=pages)
        window = min(loaded.window, kv.usable_tokens)
        limits = SchedulerLimits(max_num_seqs, chunk, window, kv_refresh_interval=loaded.refresh_interval)
        plain = None if loaded.refresh_interval is None else PLAIN[DTYPES[loaded.dtype]]
        model, device = loaded.model, loaded.device
        use = CacheUse(loaded.transforms, plain, backend)
        runner = ModelRunner(model, loaded.config, layout, counts, limits, device, use)
        if link is None and device.type != "cpu":
            link = CudaLink(device)
        self.executor: ModelExecutor = SingleExecutor(runner, ())
        if link is not None:
            self.executor = AheadExecutor(runner, (), device, link)
        scheduler = Scheduler(limits, kv)
        info = CacheInfo(num_blocks, block_size, layout.block_bytes, layout.bytes_per_token, "", window, prefix_caching)
        self.core = EngineCore(scheduler, self.executor, NoGrammar(), info, 1 if link is None else 2)
        self._count = 0

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, salt: str | None = None, index: int | None = None
    ) -> list[str]:
        """Queues the n choices; their ids. index: of one choice, queued as if it were alone."""
        self._count += 1
        ids = []
        for number in range(params.n) if index is None else [index]:
            request_id = f"r{self._count}-{number}"
            group = f"r{self._count}" if params.n > 1 else None
            add = AddRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                params=params,
                arrival=time.monotonic(),
                group=group,
                index=number,
                salt=salt,
            )
            self.core.add(add)
            ids.append(request_id)
        return ids

    def drain(self, results: dict[str, Completion]) -> None:
        """Steps until nothing is left."""
        while self.core.has_work:
            self.step(results)

    def step(self, results: dict[str, Completion]) -> None:
        """One step; what it brought goes to `results`."""
        for output in self.core.step():
            result = results.setdefault(output.request_id, Completion())
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or []
            result.prompt_logprobs += output.prompt_logprobs or []
            result.finish_reason = output.finish_reason or result.finish_reason
            result.cached_tokens = max(result.cached_tokens, output.cached_tokens)
            result.num_preemptions = max(result.num_preemptions, output.num_preemptions)
            assert output.error is None, output.error
        self.core.check()

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """All together; with n > 1, the choices of one prompt follow one another."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = [i for prompt, one in zip(prompts, each, strict=True) for i in self.add(prompt, one)]
        results: dict[str, Completion] = {}
        self.drain(results)
        return [results[i] for i in ids]

    @property
    def preemptions(self) -> int:
        return sum(self.core.stats().preemptions_total.values())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = num_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


class Unsteady(CausalLM):
    """A model whose last bit depends on the number of rows."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        return self.model.hidden(batch, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(hidden)
        return torch.nextafter(logits, torch.full_like(logits, torch.inf)) if len(hidden) > 1 else logits

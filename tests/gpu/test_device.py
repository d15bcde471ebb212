"""A GPU against the CPU: tokens, log-probabilities, company, chunks, the memory that was reckoned with.

pytest -m gpu tests/gpu
"""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import Engine, Loaded
from paged import make_paged
from tiny_models import FALLBACKS, FAMILIES, VARIANTS

from configs.kv import KVFormat, KVLayout, KVOrder
from configs.pool import step_bytes
from configs.settings import Settings
from engine import LLM, SamplingParams
from engine.device import GPU, Device, look_for_gpu
from engine.runner.warm_up import warm_up
from kernels import ops, reference
from kernels.exactness import ON_A_GPU
from kernels.int8_weight import Int8Weight
from kernels.reference.attention import attend_alone, attend_together
from kernels.reference.pages import Past
from kernels.triton import offers

pytestmark = [pytest.mark.gpu]
WINDOW = 256
PROMPTS = [[(7 * i * i + 3 * i + 1) % 256 for i in range(length)] for length in (90, 1, 17, 64, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def gpu() -> Device:
    found = look_for_gpu()
    if not isinstance(found, GPU):
        pytest.skip(f"no GPU: {found.reason}")
    device = Device.find(Settings(device="cuda"), lambda: found)
    device.prepare()
    return device


@pytest.fixture(scope="module", params=[*FAMILIES, "olmo2", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp(request.param) / "tiny", (VARIANTS | FALLBACKS)[request.param])


def engine_on(place: torch.device, folder: Path, dtype: torch.dtype, chunk: int = 512, **options: object) -> Engine:
    return Engine(Loaded.load(folder, dtype, WINDOW, place), chunk=chunk, **options)


def test_in_fp32_a_gpu_gives_the_cpus_tokens(gpu: Device, folder: Path) -> None:
    expected = engine_on(torch.device("cpu"), folder, torch.float32).run(PROMPTS, GREEDY)
    engine = engine_on(gpu.place, folder, torch.float32)
    assert {pool.device for pool in engine.executor.runner.pools} == {gpu.place}
    warm_up(engine.executor, largest=True)
    found = engine.run(PROMPTS, GREEDY)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(ours.chosen, theirs.chosen, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_the_bits_log_probabilities_are_near(gpu: Device, folder: Path, dtype: torch.dtype) -> None:
    """Of the prompt's tokens, which are the same on both sides, against fp32 on the CPU."""
    if dtype is torch.bfloat16 and gpu.dtype is not torch.bfloat16:
        pytest.skip(f"{gpu.name} does not compute in bfloat16")
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    expected = engine_on(torch.device("cpu"), folder, torch.float32).run(PROMPTS, scored)
    found = engine_on(gpu.place, folder, dtype).run(PROMPTS, scored)
    for ours, theirs in zip(found, expected, strict=True):
        ours_, theirs_ = ([entry.logprob for entry in one.prompt_logprobs] for one in (ours, theirs))
        torch.testing.assert_close(torch.tensor(ours_), torch.tensor(theirs_), atol=0.3, rtol=0.1)


@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, "int8") for name in FAMILIES), *((name, "int4") for name in ("head-dim", "qwen3", "gemma3"))],
)
def test_of_few_bits_log_probabilities_are_near(gpu: Device, name: str, format: str, tmp_path: Path) -> None:
    """With keys fitted on each side. A number between two codes may become either: tokens need not be the same."""
    folder = tiny_models.build(tmp_path, VARIANTS[name])
    here, there = (
        replace(Loaded.load(folder, torch.float32, WINDOW, place), kv={"kv_cache_dtype": format})
        for place in (torch.device("cpu"), gpu.place)
    )
    for (ours, _), (theirs, _) in zip(there.transforms, here.transforms, strict=True):
        on_cpu = {part: None if x is None else x.cpu() for part, x in vars(ours).items()}
        torch.testing.assert_close(on_cpu, vars(theirs), atol=1e-3, rtol=1e-3)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for ours, theirs in zip(*(Engine(each).run(PROMPTS, scored) for each in (there, here)), strict=True):
        ours_, theirs_ = ([entry.logprob for entry in one.prompt_logprobs] for one in (ours, theirs))
        torch.testing.assert_close(torch.tensor(ours_), torch.tensor(theirs_), atol=0.1, rtol=0.1)


def test_company_chunks_and_cached_pages_change_no_token(gpu: Device, folder: Path) -> None:
    alone = [engine_on(gpu.place, folder, torch.float32).run([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    engine = engine_on(gpu.place, folder, torch.float32, chunk=64)
    for _ in range(2):  # the second time from cached pages
        assert [one.token_ids for one in engine.run(PROMPTS, GREEDY)] == alone
    tight = engine_on(gpu.place, folder, torch.float32, chunk=64, num_blocks=12)
    assert [one.token_ids for one in tight.run(PROMPTS, GREEDY)] == alone
    assert tight.preemptions, "the pool was meant to be too small for all"


def test_seeded_draws_and_penalties_are_the_cpus(gpu: Device, folder: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, presence_penalty=0.5, max_tokens=12, n=2)
    expected = engine_on(torch.device("cpu"), folder, torch.float32).run(PROMPTS, params)
    found = engine_on(gpu.place, folder, torch.float32).run(PROMPTS, params)
    same = sum(ours.token_ids == theirs.token_ids for ours, theirs in zip(found, expected, strict=True))
    assert same >= len(expected) - 1, "a draw may fall between two roundings, two may not"


@pytest.mark.parametrize("window", [None, 24])
def test_attention_is_the_row_by_row_oracle(gpu: Device, window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(33, 6, 64, generator=generator)
    k, v = torch.randn(2, 2, 700, 64, generator=generator)
    expected = torch.empty(33, 6, 64)
    attend_alone(q, Past(k), Past(v), 0.125, window, None, None, expected)
    found = torch.empty(33, 6, 64, device=gpu.place)
    q, k, v = (x.to(gpu.place) for x in (q, k, v))
    attend_together(q, Past(k), Past(v), 0.125, window, None, None, found)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("format", KVFormat)
def test_codes_and_scales_have_the_cpus_bits(gpu: Device, format: KVFormat, static: bool) -> None:
    if static and not format.may_be_static:
        pytest.skip("has no scales")
    here = make_paged([70], dtype=torch.bfloat16, formats=(format, format), static=static, order=KVOrder.ROWS)
    sizes, slots = torch.logspace(-6, 6, 70)[:, None, None].bfloat16(), torch.arange(70)
    there = here.pool.to(gpu.place)
    transforms = [
        ops.KVTransform(*(None if x is None else x.to(gpu.place) for x in (each.channels, each.centre, each.feedback)))
        for each in here.transforms
    ]
    on_gpu = ops.LayerPages(there, here.spec, 1, *transforms)
    for k, v in ((here.k[0] * sizes, here.v[0] * sizes), (here.k[0], here.v[0])):
        reference.store_kv(k, v, here.pages(), slots)
        ops.store_kv(k.to(gpu.place), v.to(gpu.place), on_gpu, slots.to(gpu.place))
        assert torch.equal(there.cpu(), here.pool)
    tables, ends = torch.arange(5, dtype=torch.int32)[None], torch.tensor([0, 70], dtype=torch.int32)
    asked = tables, ends, ends[1:]
    expected = reference.paged_attention(here.q[0], here.pages(), *asked, here.scale)
    found = ops.paged_attention(here.q[0].to(gpu.place), on_gpu, *(x.to(gpu.place) for x in asked), here.scale)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-2, rtol=2e-2)


def test_fp32_products_are_fp32(gpu: Device) -> None:
    """TF32 would be off by 1e-3."""
    x, weight = torch.randn(64, 1024), torch.randn(128, 1024) / 32
    found = ops.linear(x.to(gpu.place), ops.pack_linear(weight.to(gpu.place))).cpu()
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


def test_int8_weights(gpu: Device) -> None:
    """In Triton, on tensor cores, which truncate sums of fp32: see `gpu.bench.check_products`."""
    x, weight = torch.randn(64, 1024), torch.randn(128, 1024) / 32
    made = Int8Weight.empty(128, 1024, gpu.place)
    made.fill(slice(0, 128), weight)
    found = ops.linear(x.to(gpu.place), ops.pack_coded_linear(made, torch.float32)).cpu()
    expected = x.double() @ (made.codes.cpu().double() * made.scales.cpu().double().unsqueeze(1)).T
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_a_step_waits_for_nothing(gpu: Device, tmp_path: Path) -> None:
    """torch raises where the host would wait for the device. (The reference's attention does.)"""
    engine = engine_on(gpu.place, tiny_models.build(tmp_path), gpu.dtype)
    if ops.choose("paged_attention", "cuda", gpu.dtype).name == reference.NAME:
        pytest.skip("plain torch serves attention")
    executor = engine.executor
    warm_up(executor, largest=True)
    executor.capture([1, 4, 8])
    forward = executor.forward

    def unwaiting(plan: object) -> object:
        try:
            torch.cuda.set_sync_debug_mode("error")
            return forward(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.forward = unwaiting
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=16, ignore_eos=True)
    assert len(engine.run(PROMPTS, params)) == len(PROMPTS)


def test_captured_steps_are_the_launched_ones(gpu: Device, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path)
    params = [SamplingParams(temperature=t, seed=1, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8, 0.0, 1.2, 0.0)]
    plain, captured = (engine_on(gpu.place, folder, gpu.dtype) for _ in range(2))
    if ops.choose("paged_attention", "cuda", gpu.dtype).name == reference.NAME:
        pytest.skip("plain torch serves attention")
    warm_up(captured.executor, largest=True)
    captured.executor.capture([1, 2, 4, 5])
    expected = [one.token_ids for one in plain.run(PROMPTS, params)]
    assert [one.token_ids for one in captured.run(PROMPTS, params)] == expected


def test_the_largest_step_takes_no_more_than_was_reckoned(gpu: Device, tmp_path: Path) -> None:
    loaded = Loaded.load(tiny_models.build(tmp_path), torch.float32, WINDOW, gpu.place)
    engine = Engine(loaded, chunk=2048, max_num_seqs=256, num_blocks=4096)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    warm_up(engine.executor, largest=True)
    settings = Settings(max_num_seqs=256, max_num_batched_tokens=2048)
    sizes = {"vocab_size": loaded.config.vocab_size, "num_parameters": loaded.config.num_parameters}
    reckoned = step_bytes(settings, KVLayout.of(loaded.config.kv_layers(KVFormat.FP32), 16), window=WINDOW, **sizes)
    assert torch.cuda.max_memory_allocated() - before < reckoned.total


def test_the_whole_product_finds_the_gpu_by_itself(gpu: Device, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path)
    common = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8}
    llm, on_cpu = LLM(str(folder), **common), LLM(str(folder), device="cpu", **common)
    serves = offers.NAME if offers.refusal() is None else reference.NAME
    assert gpu.name in llm.info.summary["device"] and llm.info.summary["attention"].startswith(serves)
    assert llm.info.summary["answers"] == ON_A_GPU
    for ours, theirs in zip(llm.generate(PROMPTS, GREEDY), on_cpu.generate(PROMPTS, GREEDY), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids

"""docs/kv-arithmetic.md, figure by figure: computed here, or quoted by name. A changed digit is found."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import published_models
import pytest

from configs.files import MAX_MIB
from configs.kv import KVFormat, KVLayout, LayerKV
from configs.plan import Plan, layer_kinds, make_plan
from configs.plan_costs import paged_bytes, payload_bytes
from configs.plan_lengths import assumed_lengths
from configs.plan_model import even_splits, rank_of, with_kv_heads
from configs.plan_options import MAX_PERCENT, Question
from configs.pool import AUTO_BYTES, PROCESS_BYTES, TOKEN_BYTES, Memory
from configs.settings import Settings

TEXT = (Path(__file__).parent.parent / "docs/kv-arithmetic.md").read_text()
GIB = 2**30
TABLE = (
    "Llama-2-7B", "Llama-2-13B", "Llama-2-70B", "Llama-3.1-8B", "Qwen2.5-7B", "Qwen2.5-0.5B", "Qwen3-8B",
    "SmolLM2-135M", "SmolLM2-1.7B", "Gemma-3-1B", "Gemma-3-27B", "Phi-4-14B",
)  # fmt: skip
QUOTED = (
    "5 % of its original steps",
    "| multi-head | 47.2 | 1.51 |",
    "| grouped-query, 8 KV heads | 47.1 | 0.28 |",
    "| multi-query | 46.6 | 0.24 |",
    "cost 0.1 points of the average and one group 0.6",
    "“2,048 tokens of a 70B model take 10.74 GB.”",
    "“MQA makes the cache 8 times smaller.”",
    "“GQA makes it 4 times smaller.”",
    "“2,048 tokens are 8 pages.”",
)
"""Figures of others: Ainslie et al. 2023, table 1, and what articles say; and one that was measured."""
NAMES = re.compile(
    r"""Llama-[\d.]+-\d+B | Llama\ 2 | Gemma\ ?3 | Qwen[\d.]+-[\d.]+B | Qwen3 | Gemma-3-\d+B | SmolLM2-[\d.]+[MB]
    | Phi-4-14B | T5-XXL | table\ 1\b
    | arXiv:\d+\.\d+ | arxiv\.org/abs/\d+\.\d+ | (Shazeer|al\.|encoder-decoder\ of)\ 20\d\d
    | \b(4B|7B|13B|27B|70B)\b | int[48] | fp8(_e5m2)? | bf16 | bfloat16 | code\ is\ 0\ if | served,\ 1\ if\ not,\ 2\ for
    | 80GiB | 64GiB | 10⁹ | 2³⁰ | bytes\ =\ 2\ ×\ layers | [Tt]he\ 2\ (stands\ )?for\ K\ and\ V""",
    re.VERBOSE,
)
"""Digits that are no figures: names, dates, exit codes, and the formula's own 2."""


@cache
def model(name: str) -> Any:
    with TemporaryDirectory() as folder:
        return published_models.sizes(Path(folder), name)


def layout(sizes: Any, form: KVFormat = KVFormat.BF16, whole: bool = False, block_size: int = 16) -> KVLayout:
    """`whole`: as if every layer saw everything."""
    layers = sizes.kv_layers(form)
    if whole:
        layers = tuple(LayerKV(layer.kv_heads, layer.head_dim, form) for layer in layers)
    return KVLayout.of(layers, block_size)


def kv(sizes: Any, tokens: int, whole: bool = False) -> int:
    return payload_bytes(layout(sizes, whole=whole), tokens)


def gb(size: float, digits: int = 2) -> str:
    return f"{size / 1e9:.{digits}f} GB"


def gib(size: float) -> str:
    return f"{size / GIB:.4g} GiB"


def plan(name: str, gpu: int, context: int | None = None, **given: Any) -> Plan:
    return make_plan(
        Question(Settings(**given), model(name), Memory(gpu * GIB, is_gpu=True)), assumed_lengths(), context
    )


def row(name: str) -> str:
    sizes, pages = model(name), layout(model(name), whole=True)
    kind = layer_kinds(Settings(), sizes, "bfloat16")[0]
    cells = [name, sizes.num_layers, sizes.num_heads, f"{sizes.num_kv_heads} ({kind.attention})", sizes.head_dim]
    cells += [f"{pages.bytes_per_token:,}", f"{pages.block_bytes // 1024:,} KiB"]
    cells += [gb(payload_bytes(pages, 4096), 3), gb(payload_bytes(pages, 32768))]
    return "| " + " | ".join(map(str, cells)) + " |"


def of_the_formula() -> list[str]:
    head = f"| bytes a token | page of {Settings().block_size} tokens | {4096:,} tokens | {32768:,} tokens |"
    return [head, "In bf16, 2 bytes a number", *map(row, TABLE)]


def of_what_it_leaves_out() -> list[str]:
    large, smaller, llama, qwen = (model(n) for n in ("Gemma-3-27B", "Gemma-3-12B", "Llama-3.1-70B", "Qwen2.5-7B"))
    _, *some, most = even_splits(qwen)
    windows = [layer.window for layer in large.kv_layers(KVFormat.BF16)]

    def share(form: KVFormat, head_dim: int) -> float:
        return LayerKV(1, head_dim, form).bytes_per_token() / LayerKV(1, head_dim, KVFormat.BF16).bytes_per_token()

    def on_each(sizes: Any, ranks: int) -> int:
        return layout(rank_of(sizes, ranks)).bytes_per_token

    assert share(KVFormat.INT8, 64) == share(KVFormat.FP8_E4M3, 64) and on_each(llama, 16) == on_each(llama, 8)
    return [
        f"has {windows.count(None)} layers that see everything and {windows.count(1024)} that see {1024:,} tokens: "
        f"{32768:,} tokens take {gb(kv(large, 32768))}, not {gb(kv(large, 32768, whole=True))}",
        f"Gemma-3-12B: {gb(kv(smaller, 32768))}, not {gb(kv(smaller, 32768, whole=True))}",
        f"take {share(KVFormat.INT8, 64):.3f} at head_dim 64 and {share(KVFormat.INT8, 128):.3f} at 128",
        f"for each 32 numbers {share(KVFormat.INT4, 64):.4f}",
        f"which has no scales, {share(KVFormat.FP8_E5M2, 64):g}",
        "a multiple of 4 KiB",
        f"on 8 GPUs takes {on_each(llama, 8):,} bytes a token on each, {8 * on_each(llama, 8):,} in all",
        f"has {llama.num_kv_heads} KV heads: on 16 GPUs each is kept twice, still {on_each(llama, 16):,} bytes a token "
        f"on each GPU and {16 * on_each(llama, 16):,} in all",
        f"with {qwen.num_heads} query and {qwen.num_kv_heads} KV heads, can be split among "
        f"{', '.join(map(str, some))} or {most} GPUs",
    ]


def of_articles() -> list[str]:
    small, large, newer, qwen = (model(n) for n in ("Llama-2-7B", "Llama-2-70B", "Llama-3.1-8B", "Qwen2.5-7B"))
    gemma = model("Gemma-3-27B")
    wrong = 2 * 2 * large.num_layers * large.hidden_size * 2 * 2048
    right = kv(large, 2048)
    assert wrong == 16 * right and large.hidden_size == 8192 and gb(wrong) == gb(kv(large, 32768)) == "10.74 GB"
    assert kv(small, 2048) > kv(large, 2048) and 9.9 < large.num_parameters / small.num_parameters < 10.5
    assert (small.num_layers, small.hidden_size) == (newer.num_layers, newer.hidden_size)
    assert model("Llama-2-13B").num_kv_heads == model("Llama-2-13B").num_heads

    def saved(sizes: Any, kv_heads: int) -> str:
        """By how much the cache shrinks from one KV head for each query head to `kv_heads`."""
        most = with_kv_heads(sizes, kv_heads)
        everyone = layout(with_all_heads(sizes)).bytes_per_token
        return f"{everyone / layout(most).bytes_per_token:g}"

    def ratio(sizes: Any) -> str:
        return f"({sizes.num_heads} ÷ {sizes.num_kv_heads})"

    heads, pages = large.num_kv_heads, layout(small).groups[0].spec.blocks_for_tokens(2048)
    return [
        f"That is 2 × 2 × {large.num_layers} × {large.hidden_size:,} × 2 bytes × {2048:,}",
        f"in place of {heads} KV heads of {large.head_dim} numbers",
        f"True is 2 × {large.num_layers} × {heads} × {large.head_dim} × 2 bytes × {2048:,} = {gb(right, 3)}, a "
        f"{wrong // right}th. ({gb(kv(large, 32768))} is what {32768:,} tokens take.)",
        f"{2048:,} tokens of Llama-2-7B take {gb(kv(small, 2048))}",
        f"by {saved(small, 1)} in a model of Llama-2-7B's shape, by {saved(large, 1)} in one of Llama-2-70B's, by 8 "
        "only where there are 8",
        f"{saved(large, heads)} in Llama-2-70B {ratio(large)}, {saved(newer, newer.num_kv_heads)} in Llama-3.1-8B "
        f"{ratio(newer)}, {saved(qwen, qwen.num_kv_heads)} in Qwen2.5-7B {ratio(qwen)}, "
        f"{saved(gemma, gemma.num_kv_heads)} in Gemma-3-27B {ratio(gemma)}",
        f"With {Settings().block_size} tokens a page they are {pages}; 8 pages hold {8 * Settings().block_size} tokens",
        f"a token takes {layout(small).bytes_per_token:,} bytes in the 7B, and {layout(newer).bytes_per_token:,} in "
        "Llama-3.1-8B",
    ]


def with_all_heads(sizes: Any) -> Any:
    return replace(sizes, num_kv_heads=sizes.num_heads)


def of_shares() -> list[str]:
    found = plan("Llama-3.1-8B", 80)
    pool, costs = found.pool, found.costs
    assert pool is not None
    pages = costs.layout.groups[0].spec.blocks_for_tokens(1000)
    page = costs.layout.block_bytes
    reserved = 4096 * costs.layout.bytes_per_token
    return [
        f"0.9 of the memory are {0.9 * 80:g} GiB; weights take {gib(costs.weight_bytes)}, a step at most "
        f"{gib(costs.step.total)}, so the pool has {gib(pool.pool_bytes)}, {pool.num_blocks:,} pages",
        f"requests of {1000:,} tokens hold {pages} pages each: pool usage is {10 * pages / pool.num_blocks:.1%}, slot "
        f"utilisation {1000 / (16 * pages):.1%}.".replace("%", " %"),
        f"reserves {4096:,} tokens for each request would fill {1000 / 4096:.1%} of what it reserves".replace(
            "%", " %"
        ),
        f"would be full with {pool.pool_bytes // reserved} requests",
        f"In pages, {pool.pool_bytes // (pages * page)} requests of {1000:,} tokens fit",
    ]


def of_the_planner() -> list[str]:
    found = plan("Llama-2-7B", 80, max_num_seqs=128)
    lengths = assumed_lengths()
    lines = [
        f"| {option.words} | {option.bytes_per_token:,} | {option.at_p50:,} | {option.at_p95:,} | "
        f"{gib(option.memory_bytes or 0)} |"
        for option in found.options
    ]
    few, many = (plan("Gemma-3-27B", 80, 32768, max_model_len=32768, max_num_seqs=count) for count in (8, 128))
    fewest = next(option for option in many.options if option.kind == "requests")
    return [
        *lines,
        f"at most {lengths.p50:,} tokens long, prompt and output together, and 95 % at most {lengths.p95:,}",
        "the 95th percentile",
        f"at most {MAX_MIB} MiB",
        f"this one up to {MAX_PERCENT / 100:g}",
        "For Llama-2-7B on 80 GiB, `--max-num-seqs 128`",
        f"| of {found.lengths.p50:,} tokens | of {found.lengths.p95:,} tokens | memory for {found.load.count} of "
        f"{found.load.tokens:,} |",
        f"`--max-model-len 32768` on 80 GiB holds {many.in_pages.at_load} requests of {32768:,} tokens with "
        f"`--max-num-seqs 128`, {few.in_pages.at_load} with 8, and {fewest.at_load} with {fewest.words.split()[1]}, "
        "which is what the planner proposes",
        f"On a CPU {PROCESS_BYTES / 2**20:g} MiB and {TOKEN_BYTES:,} bytes for each entry of the vocabulary are, for",
        f"had 367 MiB with SmolLM2 ({(PROCESS_BYTES + 49_152 * TOKEN_BYTES) / 2**20:.0f} are reckoned) and 556 with "
        f"Qwen2.5-Coder-0.5B ({(PROCESS_BYTES + 151_936 * TOKEN_BYTES) / 2**20:.0f})",
        f"half of what is left, {AUTO_BYTES / 2**30:g} GiB at most",
        "differ by less than 1 %",
        "filled up to 32 rows",
    ]


@cache
def claims() -> tuple[str, ...]:
    """Longest first."""
    sections = (of_the_formula, of_what_it_leaves_out, of_articles, of_shares, of_the_planner)
    return tuple(sorted((claim for section in sections for claim in section()), key=len, reverse=True))


def unproven(text: str) -> list[str]:
    """Claims that the text does not hold, then figures in it that nobody claims."""
    text = " ".join(text.split())
    problems = [f"not said: {claim}" for claim in (*claims(), *QUOTED) if claim not in text]
    for claim in (*claims(), *QUOTED):
        text = text.replace(claim, " … ")
    left = NAMES.sub("", text)
    figures = re.finditer(r"\d[\d,.]*", left)
    return problems + [f"not proven: {left[max(0, found.start() - 40) : found.end() + 20]}" for found in figures]


def test_every_figure_is_computed_or_quoted() -> None:
    assert unproven(TEXT) == []


def test_every_changed_digit_is_found() -> None:
    names = {place for found in NAMES.finditer(TEXT) for place in range(*found.span())}
    figures = [found for found in re.finditer(r"\d", TEXT) if found.start() not in names]
    assert len(figures) > 500
    for found in figures:
        changed = TEXT[: found.start()] + str((int(found[0]) + 1) % 10) + TEXT[found.end() :]
        assert unproven(changed), TEXT[found.start() - 40 : found.end() + 20]


def test_pages_are_whole(tmp_path: Path) -> None:
    """Half a page more than the tokens, on average over lengths."""
    pages = layout(model("Llama-2-7B"))
    lengths = range(1, 161)
    more = sum(paged_bytes(pages, n) - payload_bytes(pages, n) for n in lengths) / len(lengths)
    assert more == pytest.approx(7.5 * pages.bytes_per_token)

"""`octavo plan`: what a model takes of memory and what fits, before anything is loaded, for people or as JSON.

The figures are `configs.plan`'s; here are flags and words.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from configs.errors import SettingsError
from configs.load import FlagParser, load
from configs.plan import LayerKind, Plan, make_plan
from configs.plan_lengths import assumed_lengths, read_lengths
from configs.plan_model import check_plausible
from configs.plan_options import Option, Question
from configs.pool import AUTO_BYTES, PROCESSES, Memory, PoolPlan, weights_in_words
from configs.setting_types import parse_size, write_size
from configs.version import VERSION
from server.doctor import table, wrapped

MIB = 2**20
OWN_FLAGS = ("--gpu", "--memory", "--tp", "--context", "--lengths", "--json")
TRIED = "octavo serve tries a quantised cache at start, and refuses one that gives nonsense with the model"
SLOWER = "Steps are slower for it on a GPU."
WAY_WIDTH = 35
"""Columns for the words of a way to hold the load."""
USAGE = """\
usage: octavo plan MODEL [--gpu SIZE | --memory SIZE] [--tp N] [--context N]
                   [--lengths FILE] [--json] [flags of octavo serve]

Says, from config.json or a GGUF file's metadata alone, what a model takes of
memory: weights, KV cache, a step; and what fits, how many requests at once, and
what would have to change. No weights are read; of a Hub id config.json is
fetched and nothing else.

  --gpu SIZE      free memory of a GPU, e.g. 80GiB
  --memory SIZE   free main memory, for a CPU. Without either nothing is said of
                  what fits, and the figures are a GPU's, or a CPU's of a GGUF
                  file whose weights that keeps as they are
  --tp N          GPUs among which the model is split, each of --gpu SIZE.
                  Arithmetic alone: octavo serve uses one
  --context N     tokens of one sequence (default: the longest); the load is
                  then so long too
  --lengths FILE  lengths of requests: lines of JSON with prompt_tokens and
                  completion_tokens, or input_length and output_length, or a log
                  of octavo serve --log-format json. Default: half of all
                  requests at most 1,024 tokens long, 95 % at most 4,096
  --json          the same for programs

Flags of octavo serve count as they do there: --dtype, --max-model-len,
--max-num-seqs, --max-num-batched-tokens, --block-size, --kv-cache-dtype,
--gpu-memory-utilization and all others; --config FILE too. The load that is to
fit is --max-num-seqs requests at once, each as long as 95 % of --lengths are at
most.

The exit code is 0 if the model would be served, with the context if one is
given, 1 if not, and 2 if something is wrong. A load that does not fit waits.
"""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises `StartupError` for flags and models that cannot be."""
    if any(argument in ("--help", "-h") for argument in arguments):
        print(USAGE, end="")
        return 0
    own, rest = _parser().parse_known_args(_joined(arguments))
    settings = load(rest, others=OWN_FLAGS).settings
    memory, ranks = _memory(own), _count("--tp", own.tp) or 1
    if ranks > 1 and own.memory is not None:
        raise SettingsError(f"--tp {ranks} splits a model among GPUs: give --gpu in place of --memory.")
    context = _size("--context", own.context)
    lengths = assumed_lengths() if own.lengths is None else read_lengths(own.lengths)
    from engine import find_config, sizes_of

    source = find_config(settings)
    model = sizes_of(source, settings.trust_remote_code)
    check_plausible(model, source.path)
    question = Question(settings, model, memory, ranks)
    plan = make_plan(question, lengths, context)
    if settings.kv_cache_scales is not None:
        from engine import scales_of

        scales_of(settings, model, question.dtype)
    name = {"name": source.name, "origin": source.origin}
    print(json.dumps(as_json(plan, name), indent=2, ensure_ascii=False) if own.json else as_text(plan, name))
    return 1 if plan.is_served is False else 0


# ------------------------------------------------------------------ flags
def _parser() -> argparse.ArgumentParser:
    """Of the flags that octavo serve does not have. Values stay text."""
    parser = FlagParser(prog="octavo plan", add_help=False, allow_abbrev=False)
    for name in OWN_FLAGS[:-1]:
        parser.add_argument(name)
    parser.add_argument(OWN_FLAGS[-1], action="store_true")
    return parser


def _joined(arguments: Sequence[str]) -> list[str]:
    """'--gpu', '-1GiB' → '--gpu=-1GiB': argparse would take the value for a flag."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in OWN_FLAGS[:-1] and re.match(r"-\d", argument):
            argument = f"{joined.pop()}={argument}"
        joined.append(argument)
    return joined


def _memory(own: argparse.Namespace) -> Memory | None:
    if own.gpu is not None and own.memory is not None:
        raise SettingsError(f"--gpu {own.gpu} and --memory {own.memory}: give one, for a GPU or for a CPU.")
    name, text = ("--gpu", own.gpu) if own.gpu is not None else ("--memory", own.memory)
    size = _size(name, text)
    if size is None:
        return None
    if size < MIB:
        hint = f": write {size}GiB?" if size and str(size) == text else "."
        raise SettingsError(f"{name} {text} is {size} bytes, and no model fits into less than 1MiB{hint}")
    return Memory(size, is_gpu=name == "--gpu", is_before_start=True)


def _size(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"{name} {error}, got {text!r}.") from None


def _count(name: str, text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SettingsError(f"{name} must be a whole number of at least 1, got {text!r}.")
    return None if text is None else int(text)


# ------------------------------------------------------------------ for people
def as_text(plan: Plan, name: dict[str, str]) -> str:
    """Tables, then the verdict."""
    blocks = [
        f"Octavo {VERSION}",
        table("model", _model(plan, name)),
        table("KV cache" + _each(plan), _cache(plan)),
    ]
    memory = plan.question.memory
    if plan.question.kind.is_gpu:
        blocks.append(table("a step" + _each(plan), _step(plan)))
    if memory is not None:
        blocks.append(table("memory" + _each(plan), _room(plan, memory)))
    blocks += [table("requests", _requests(plan)), _ways(plan), wrapped(" ".join(verdict(plan)), "")]
    return "\n\n".join(blocks)


def _each(plan: Plan) -> str:
    ranks = plan.question.ranks
    return f", on each of {ranks} GPUs" if ranks > 1 else ""


def _model(plan: Plan, name: dict[str, str]) -> dict[str, str]:
    model, costs = plan.question.model, plan.costs
    return {
        "name": f"{name['name']} ({name['origin']})",
        "sizes": model.title,
        "weights": weights_in_words(costs, plan.question.dtype) + _each(plan),
        "window": f"{costs.window:,} tokens",
    }


def _cache(plan: Plan) -> dict[str, str]:
    layout, size = plan.costs.layout, plan.question.settings.block_size
    kinds = layer_words(plan)
    rows = {f"layers {number}" if len(kinds) > 1 else "layers": words for number, words in enumerate(kinds, 1)}
    rows["a token"] = f"{layout.bytes_per_token:,} bytes"
    rows["a page"] = f"of {size} tokens: {write_size(layout.block_bytes)}"
    rows["a request"] = (
        f"of {plan.context:,} tokens: {write_size(plan.context_bytes)} ({plan.context_bytes:,} bytes); in pages "
        f"{write_size(plan.context_page_bytes)}"
    )
    if plan.replication > 1:
        rows["replication"] = f"KV heads are kept {plan.replication:.3g} times, since there are fewer of them than GPUs"
    if any(form.is_quantised for kind in plan.kinds for form in kind.layer.formats):
        rows["check"] = TRIED
    return rows


def layer_words(plan: Plan) -> list[str]:
    """A line for each kind of layers."""
    return [_layers(kind, rank) for kind, rank in zip(plan.kinds, plan.rank_kinds, strict=True)]


def _layers(kind: LayerKind, rank: LayerKind) -> str:
    """`rank`: the same, as one GPU holds it."""
    layer, (k_format, v_format) = kind.layer, kind.layer.formats
    heads = f"{kind.query_heads} query and {layer.kv_heads} KV heads of {layer.head_dim} numbers"
    if rank != kind:
        heads += f" (on each GPU {rank.query_heads} and {rank.layer.kv_heads})"
    formats = f"K and V {k_format.value}" if k_format is v_format else f"K {k_format.value}, V {v_format.value}"
    seen = "" if layer.window is None else f" that see the last {layer.window:,} tokens"
    return (
        f"{kind.num_layers} {kind.attention}{seen}: {heads}, {formats}: {rank.bytes_per_token:,} bytes a token, "
        f"{write_size(rank.bytes_per_block)} a page"
    )


def _step(plan: Plan) -> dict[str, str]:
    step = plan.costs.step
    tokens = f"{plan.costs.step_tokens:,} tokens (--max-num-batched-tokens)"
    rows = {
        "logits": write_size(step.logits),
        "activations": f"{write_size(step.activations)} of {tokens}",
        **({"one context": f"{write_size(step.context)}, gathered"} if step.context else {}),
        **({"CUDA graphs": write_size(step.graphs)} if step.graphs else {}),
        "other": f"{write_size(step.scores)} of scores, {write_size(step.libraries)} for libraries",
        "in all": f"{write_size(step.total)} at most, set aside on a GPU",
    }
    return rows | _refresh(plan)


def _refresh(plan: Plan) -> dict[str, str]:
    size = plan.costs.refresh_bytes
    return {"refresh": f"{write_size(size)} for one sequence in full precision"} if size else {}


def _room(plan: Plan, memory: Memory) -> dict[str, str]:
    rows = {"GPU" if memory.is_gpu else "CPU": f"{write_size(memory.available_bytes)} free"}
    if not memory.is_gpu:
        rows["Octavo"] = f"{write_size(plan.costs.work(memory)[PROCESSES])} for its processes and a step's work"
        rows |= _refresh(plan)
    pool = plan.pool
    if pool is None:
        enough = f" Split among GPUs, --tp {plan.ranks_needed} would do." if plan.ranks_needed else ""
        return rows | {"refused": plan.refusal + enough}
    rows["KV pool"] = f"{write_size(pool.pool_bytes)}: {pool.decided_by}"
    rows["holds"] = (
        f"{pool.num_tokens:,} tokens of one sequence, {pool.full_sequences:.1f} requests of {pool.max_model_len:,}"
    )
    return rows | ({"note": " ".join(pool.notes)} if pool.notes else {})


def _requests(plan: Plan) -> dict[str, str]:
    lengths = plan.lengths
    rows = {
        "lengths": lengths.source,
        "tokens": f"p50 {lengths.p50:,}, p95 {lengths.p95:,}, mean {lengths.mean:,.0f}, prompt and output together",
        "in use": f"{plan.useful_in_pages:.1%} of what they hold in pages, {plan.useful_in_reservations:.1%} of "
        f"{plan.costs.window:,} tokens reserved for each",
    }
    if lengths.num_cut:
        rows["cut"] = f"{lengths.num_cut / len(lengths.tokens):.1%} are longer than the window: counted as long as that"
    return rows


def _ways(plan: Plan) -> str:
    """The options beside each other."""
    lengths = plan.lengths
    head = ("requests at once", "B/token", f"p50 {lengths.p50:,}", f"p95 {lengths.p95:,}", "load needs")
    rows: list[tuple[str, ...]] = [head]
    for option in plan.options:
        words, *numbers = _way(option)
        first, *more = textwrap.wrap(words, WAY_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        rows += [("  " + first, *numbers), *(("  " + line, *[""] * len(numbers)) for line in more)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for first, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _way(option: Option) -> tuple[str, ...]:
    counts = ["-" if number is None else f"{number:,}" for number in (option.at_p50, option.at_p95)]
    need = "-" if option.memory_bytes is None else write_size(option.memory_bytes)
    return option.words, f"{option.bytes_per_token:,}", *counts, need


def verdict(plan: Plan) -> list[str]:
    """Whether the load fits, and a change with which it does: sentences."""
    load, memory, paged = plan.load, plan.question.memory, plan.in_pages
    origin = "--context" if plan.is_context_given else "p95"
    requests = f"{_counted(load.count, 'request')} of {_counted(load.tokens, 'token')}"
    asked = f"The load is {requests} at once (--max-num-seqs, {origin})"
    need = "No memory holds it."
    if paged.memory_bytes is not None and paged.pool_bytes is not None:
        kind = "a GPU's memory" if plan.question.kind.is_gpu else "main memory"
        each = " on each" if plan.question.ranks > 1 else ""
        need = (
            f"It takes {write_size(paged.memory_bytes)} of {kind}{each}, {write_size(paged.pool_bytes)} of it KV cache."
        )
    if memory is None:
        return [f"{asked}.", need]
    if paged.fits:
        reserved = plan.options[0].at_load
        return [f"{asked}: it fits, and {paged.at_load:,} would; reserved in one piece, {reserved:,} would."]
    fit = "1 fits" if paged.at_load == 1 else f"{paged.at_load:,} fit" if paged.at_load else "none fits"
    return [f"{asked}: {fit}.", need, *_told(plan), *_advice(plan)]


def _told(plan: Plan) -> list[str]:
    """What a CPU with that much memory would have to be told: a sentence, or none."""
    told, best = plan.told_on_a_cpu, plan.advised
    if told is None or (best is not None and best.kind == "memory"):
        return []
    return [
        f"There {told} is needed: without a flag the KV cache takes half of what the weights leave, at most "
        f"{write_size(AUTO_BYTES)}."
    ]


def _advice(plan: Plan) -> list[str]:
    """A change with which the load fits: sentences."""
    best = plan.advised
    if best is None:
        split = f"; --tp {plan.ranks_for_load} does" if plan.ranks_for_load else ""
        fewer = [f"{each.at_load} run at once with {each.words}." for each in plan.options if each.kind == "requests"]
        return [f"No single change above makes it fit{split}.", *fewer]
    if best.kind == "memory":
        return [f"The memory is there: {best.words} gives it to the KV cache."]
    if best.kind == "weights":
        sizes = f"{write_size(best.weight_bytes)} of weights in place of {write_size(plan.costs.weight_bytes)}"
        memory = plan.question.memory
        slower = [SLOWER] if memory is not None and memory.is_gpu else []
        return [f"With this change it fits: {best.words} ({sizes}).", *slower]
    change = f"With this change it fits: {best.words} ({best.bytes_per_token:,} bytes a token)."
    return [change, f"It may be refused: {TRIED}."] if best.kind == "format" else [change]


def _counted(count: int, name: str) -> str:
    """'1 token', '2,048 tokens'"""
    return f"{count:,} {name}{'s' * (count != 1)}"


# ------------------------------------------------------------------ for programs
def as_json(plan: Plan, name: dict[str, str]) -> dict[str, Any]:
    """Bytes are those of one GPU, unless a key says otherwise."""
    question, costs, lengths, memory = plan.question, plan.costs, plan.lengths, plan.question.memory
    given = memory and {
        "kind": "gpu" if memory.is_gpu else "cpu",
        "bytes": memory.available_bytes,
        "process_bytes": costs.work(memory).get(PROCESSES, 0),
    }
    step = {**asdict(costs.step), "bytes": costs.step.total} if question.kind.is_gpu else None
    model, layout = question.model, costs.layout
    return {
        "octavo": VERSION,
        "model": {
            **name,
            "architecture": model.architecture,
            "parameters": model.num_parameters,
            "window": costs.window,
        },
        "dtype": question.dtype,
        "quantization": costs.quantization,
        "device": "gpu" if question.kind.is_gpu else "cpu",
        "gpus": question.ranks,
        "weight_bytes": costs.weight_bytes,
        "kv": {
            "block_size": layout.block_size,
            "bytes_per_token": layout.bytes_per_token,
            "bytes_per_block": layout.block_bytes,
            "bytes_per_token_all_gpus": question.ranks * layout.bytes_per_token,
            "replication": plan.replication,
            "layers": [*map(_layer_facts, plan.kinds, plan.rank_kinds)],
        },
        "step": step,
        "refresh_bytes": costs.refresh_bytes,
        "context": {
            "tokens": plan.context,
            "bytes": plan.context_bytes,
            "bytes_in_pages": plan.context_page_bytes,
            "served": plan.is_served,
        },
        "lengths": {
            **{key: getattr(lengths, key) for key in ("source", "p50", "p95", "mean", "num_cut")},
            "useful_share_in_pages": plan.useful_in_pages,
            "useful_share_reserved": plan.useful_in_reservations,
        },
        "memory": given,
        "pool": plan.pool and _pool_facts(plan.pool),
        "refusal": plan.refusal or None,
        "gpus_needed": plan.ranks_needed,
        "load": {
            "requests": plan.load.count,
            "tokens": plan.load.tokens,
            "fits": plan.in_pages.fits,
            "gpus_needed": plan.ranks_for_load,
        },
        "options": [asdict(option) for option in plan.options],
    }


def _layer_facts(kind: LayerKind, rank: LayerKind) -> dict[str, Any]:
    layer, (k_format, v_format) = kind.layer, kind.layer.formats
    return {
        "layers": kind.num_layers,
        "attention": kind.attention,
        "query_heads": kind.query_heads,
        "kv_heads": layer.kv_heads,
        "kv_heads_per_gpu": rank.layer.kv_heads,
        "head_dim": layer.head_dim,
        "window": layer.window,
        "k_format": k_format.value,
        "v_format": v_format.value,
        "bytes_per_token": rank.bytes_per_token,
        "bytes_per_block": rank.bytes_per_block,
    }


def _pool_facts(pool: PoolPlan) -> dict[str, Any]:
    return {
        "bytes": pool.pool_bytes,
        "pages": list(pool.num_pages),
        "tokens": pool.num_tokens,
        "max_model_len": pool.max_model_len,
        "full_sequences": pool.full_sequences,
        "decided_by": pool.decided_by,
        "notes": list(pool.notes),
    }

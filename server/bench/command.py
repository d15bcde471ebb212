"""The command `octavo bench`: its flags, and the rounds in their order."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from tqdm import tqdm

from configs.errors import SettingsError, StartupError
from configs.files import open_text
from configs.load import FlagParser
from server.bench.drive import Load
from server.bench.endpoint import Endpoint
from server.bench.report import Outcome, Report
from server.bench.values import printable
from server.bench.workloads import MIN_CHARACTERS, WARM_UP, WORKLOADS, Cutter, Round, python_text

MAX_CHARACTERS = 10_000_000
"""That are read of --text."""
DESCRIPTION = """\
usage: octavo bench URL [--compare URL] [--workloads W1,W2,W3,W4,turns]
                    [--rounds N] [--seed N] [--text FILE] [--json FILE]
                    [--model NAME] [--api-key KEY] [--no-ignore-eos]

Measures a running server with OpenAI's API, such as Octavo, vLLM, SGLang or
llama.cpp, with greedy streams, and prints a table.

  --compare URL      A second server. Rounds alternate between the two, with the
                     same prompts, and the table says by how much the first is
                     ahead: the median of the rounds' ratios, and the range.
  --workloads NAMES  Some of these (default: all):
                     W1     8 requests, one after another
                     W2     32 requests, 16 at once, short prompts
                     W3     32 requests, 8 at once, behind a shared prefix
                     W4     4 prompts of 6,000 tokens at once
                     turns  6 chats of 5 turns at once, each turn with what was
                            said before it
  --rounds N         Rounds of each; figures are medians. (default: 3)
  --seed N           Of the prompts. With the same one a server may find them in
                     its cache. (default: another one each time)
  --text FILE        What prompts are cut from, in UTF-8. (default: the language
                     reference that comes with Python)
  --json FILE        Writes all figures there as JSON; -: to stdout, in place of
                     the table.
  --model NAME       Of both servers. (default: the first that a server lists)
  --api-key KEY      For both servers.
  --no-ignore-eos    For servers that refuse ignore_eos: answers may end early.

The exit code is 0, 1 if a request failed, and 2 if nothing could be measured.
"""


@dataclass(frozen=True)
class Question:
    urls: tuple[str, ...]
    names: tuple[str, ...]
    rounds: int
    seed: int
    text: str
    model: str | None
    api_key: str | None
    ignores_eos: bool

    @property
    def fields(self) -> dict[str, Any]:
        """Of every request."""
        return {"ignore_eos": True} if self.ignores_eos else {}


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises `StartupError`."""
    if any(argument in ("--help", "-h") for argument in arguments):
        print(DESCRIPTION, end="")
        return 0
    own = _parser().parse_args(list(arguments))
    question = _question(own)
    file = None if own.json in (None, "-") else Path(own.json)
    if file is not None:
        from server.calibrate import check_writable

        check_writable("--json", file)
    try:
        report = asyncio.run(_measure(question))
    except KeyboardInterrupt:
        print("octavo: bench was interrupted: nothing is reported.", file=sys.stderr)
        return 130
    found = json.dumps(report.as_json(), indent=2, ensure_ascii=False)
    print(found if own.json == "-" else report.as_text())
    if file is not None:
        _write(file, found)
    if report.is_empty:
        return 2
    return 1 if report.num_failed else 0


def _write(file: Path, found: str) -> None:
    try:
        file.write_text(f"{found}\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--json {file} cannot be written: {error.strerror}.") from None


# ------------------------------------------------------------------ flags
def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="octavo bench", add_help=False, allow_abbrev=False)
    parser.add_argument("url", metavar="URL")
    for name in ("--compare", "--text", "--json", "--model", "--api-key"):
        parser.add_argument(name)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--no-ignore-eos", action="store_true")
    return parser


def _question(own: argparse.Namespace) -> Question:
    names = tuple(dict.fromkeys(own.workloads.split(",")))
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise SettingsError(f"--workloads: there is no {unknown[0]!r}, but {', '.join(WORKLOADS)}.")
    if own.rounds < 1:
        raise SettingsError(f"--rounds must be at least 1, got {own.rounds}.")
    seed = SystemRandom().randrange(1_000_000) if own.seed is None else own.seed
    urls = (own.url,) if own.compare is None else (own.url, own.compare)
    text = python_text() if own.text is None else _read(own.text)
    return Question(urls, names, own.rounds, seed, text, own.model, own.api_key, not own.no_ignore_eos)


def _read(path: str) -> str:
    with open_text("--text", path) as file:
        text = file.read(MAX_CHARACTERS)
    if len(text) < MIN_CHARACTERS:
        raise SettingsError(f"--text {path} has {len(text):,} characters, and {MIN_CHARACTERS:,} are needed at least.")
    return text


# ------------------------------------------------------------------ rounds
async def _measure(question: Question) -> Report:
    """Raises `StartupError` where a server cannot be measured at all."""
    endpoints = [Endpoint(url, question.api_key) for url in question.urls]
    if len({endpoint.url for endpoint in endpoints}) < len(endpoints):
        raise SettingsError("--compare names the same server: it would find every prompt in its cache.")
    for endpoint in endpoints:
        await endpoint.find_model(question.model)
    cutter = Cutter(question.text, endpoints[0].count)
    warm_up = await cutter.round(WARM_UP, Random(f"{question.seed} warm-up"))
    for place, endpoint in enumerate(endpoints):
        tokens = await _warmed_up(endpoint, question, warm_up)
        if place == 0 and tokens:
            cutter.characters_a_token = sum(len(turn.prompt) for [turn] in warm_up) / tokens
    servers = [{"url": one.url, "model": printable(one.model), "max_model_len": one.window} for one in endpoints]
    report = Report(servers, question.seed, question.rounds)
    each = sum(WORKLOADS[name].conversations * WORKLOADS[name].turns for name in question.names)
    total = each * question.rounds * len(endpoints)
    with tqdm(total=total, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:
        for name in question.names:
            report.outcomes[name] = await _outcome(name, question, endpoints, cutter, bar)
    return report


async def _warmed_up(endpoint: Endpoint, question: Question, prompts: Round) -> int | None:
    """A server's first requests are slow: nothing is taken from them but how many tokens their prompts had."""
    load = Load(endpoint, question.fields)
    measured = await load.run(prompts, WARM_UP.at_once)
    if measured.first_error is not None:
        hint = ": see --no-ignore-eos" if "ignore_eos" in measured.first_error else ""
        raise StartupError(f"{endpoint.url} fails: {measured.first_error.rstrip('.')}{hint}.")
    return measured.prompt_tokens


async def _outcome(
    name: str, question: Question, endpoints: Sequence[Endpoint], cutter: Cutter, bar: "tqdm[Any]"
) -> Outcome:
    workload = WORKLOADS[name]
    outcome = Outcome(tuple([] for _ in endpoints))
    for endpoint in endpoints:
        if endpoint.window is not None and workload.longest > endpoint.window:
            words = f"it takes {workload.longest:,} tokens, and the window of {endpoint.url} is {endpoint.window:,}"
            return Outcome(outcome.rounds, words)
    for number in range(question.rounds):
        prompts = await cutter.round(workload, Random(f"{question.seed} {name} {number}"))
        order = list(zip(endpoints, outcome.rounds, strict=True))
        for endpoint, rounds in order if number % 2 == 0 else reversed(order):
            bar.set_description(f"{name}, round {number + 1} of {question.rounds}, {endpoint.url}")
            load = Load(endpoint, question.fields, bar.update)
            rounds.append(await load.run(prompts, workload.at_once))
            if too_long := [error for error in load.errors if error.too_long]:
                return Outcome(tuple([] for _ in endpoints), f"{endpoint.url} says: {too_long[0]}")
    return outcome

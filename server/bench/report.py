"""What was measured, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.version import VERSION
from server.bench.drive import Measured, median, ratios
from server.bench.workloads import WORKLOADS

LETTERS = "AB"
SPANS: dict[str, tuple[str, int | None]] = {
    "prompt_tokens": ("tokens in", None),
    "cached_tokens": ("  of them cached", None),
    "output_tokens": ("tokens out", None),
    "output_tokens_per_s": ("output tokens/s", 1),
    "total_s": ("total time, s", 1),
    "ttft_s": ("time to first token, s", 1),
    "ttft_p95_s": ("  p95", 1),
    "token_s": ("time between tokens, ms", 1000),
    "gap_p95_s": ("  p95 of single gaps", 1000),
}
"""Field of `Measured` -> what the table calls it, and by what it is multiplied there; None: a count."""
COMPARED = {name: name == "output_tokens_per_s" for name in list(SPANS)[3:]}
"""Fields that have a ratio -> whether more is better."""


@dataclass
class Outcome:
    """Of one workload."""

    rounds: tuple[list[Measured], ...]
    """For each server, round by round."""
    skipped: str | None = None
    """Why there is nothing."""

    def median(self, server: int, name: str) -> float | None:
        return median([getattr(measured, name) for measured in self.rounds[server]])

    def ratios(self, name: str) -> list[float]:
        ours, theirs = ([getattr(measured, name) for measured in rounds] for rounds in self.rounds)
        return ratios(ours, theirs, more_is_better=COMPARED[name])


@dataclass
class Report:
    servers: list[dict[str, Any]]
    """url, model and max_model_len."""
    seed: int
    num_rounds: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        return sum(one.failed for outcome in self.outcomes.values() for rounds in outcome.rounds for one in rounds)

    @property
    def is_empty(self) -> bool:
        return all(outcome.skipped is not None for outcome in self.outcomes.values())

    def as_json(self) -> dict[str, Any]:
        workloads = {name: self._workload(outcome) for name, outcome in self.outcomes.items()}
        return {
            "octavo": VERSION,
            "seed": self.seed,
            "rounds": self.num_rounds,
            "servers": self.servers,
            "failed": self.num_failed,
            "workloads": {name: {"description": str(WORKLOADS[name]), **found} for name, found in workloads.items()},
        }

    def _workload(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.skipped is not None:
            return {"skipped": outcome.skipped}
        results = [
            {
                "median": {name: outcome.median(server, name) for name in SPANS},
                "rounds": [asdict(measured) for measured in rounds],
            }
            for server, rounds in enumerate(outcome.rounds)
        ]
        if len(self.servers) == 1:
            return {"servers": results}
        found = {name: outcome.ratios(name) for name in COMPARED}
        spans = {name: {"median": median(r), "min": min(r), "max": max(r)} for name, r in found.items() if r}
        return {"servers": results, "ratios": spans}

    # ------------------------------------------------------------------ for people
    def as_text(self) -> str:
        names = [f"{server['model']} at {server['url']}" for server in self.servers]
        if len(names) > 1:
            names = [f"{letter}: {name}" for letter, name in zip(LETTERS, names, strict=True)]
        rounds = f"{self.num_rounds} round{'s' * (self.num_rounds > 1)}, seed {self.seed}"
        blocks = ["\n".join([f"Octavo {VERSION}, {rounds}", *names])]
        for name, outcome in self.outcomes.items():
            lines = [f"{name}: {WORKLOADS[name]}"]
            if outcome.skipped is not None:
                lines.append(f"  skipped: {outcome.skipped}")
            else:
                lines += [*_table(outcome), *self._notes(outcome)]
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)

    def _notes(self, outcome: Outcome) -> list[str]:
        notes = []
        for server, rounds in zip(self.servers, outcome.rounds, strict=True):
            requests, failed = sum(one.requests for one in rounds), sum(one.failed for one in rounds)
            short = sum(one.short for one in rounds)
            if failed:
                first = next(one.first_error for one in rounds if one.failed)
                notes.append(f"  {failed} of {requests} requests failed at {server['url']}, the first: {first}")
            if short:
                notes.append(f"  {short} of {requests} answers ended early at {server['url']}: it did other work")
            if any(one.counts_chunks for one in rounds):
                notes.append(f"  {server['url']} reports no usage: tokens out are its chunks with text")
        return notes


def _table(outcome: Outcome) -> list[str]:
    compares = len(outcome.rounds) > 1
    head = ["", "A", "B", "A ahead by", "rounds"] if compares else ["", "median", "rounds"]
    rows = [head]
    for name, (words, scale) in SPANS.items():
        medians = [outcome.median(server, name) for server in range(len(outcome.rounds))]
        if all(value is None for value in medians):
            continue
        row = [words, *(_figure(value, scale) for value in medians)]
        if not compares:
            row.append(_range([getattr(one, name) for one in outcome.rounds[0]], scale))
        elif name in COMPARED and (found := outcome.ratios(name)):
            row += [f"{median(found):.2f}×", f"{min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""]
        rows.append(row + [""] * (len(head) - len(row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([f"  {words:<{widths[0]}}", *map(str.rjust, cells, widths[1:])]).rstrip() for words, *cells in rows
    ]


def _range(values: Sequence[float | None], scale: int | None) -> str:
    known = [value for value in values if value is not None]
    return f"{_figure(min(known), scale)} to {_figure(max(known), scale)}" if len(known) > 1 else ""


def _figure(value: float | None, scale: int | None) -> str:
    """Three digits, or all before the point of a larger number."""
    if value is None:
        return "–"
    scaled = value * (scale or 1)
    if scale is None or scaled >= 100:
        return f"{scaled:,.0f}"
    return f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}" if scaled >= 0.1 else f"{scaled:.3f}"

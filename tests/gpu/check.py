"""Checks kernels and engine on one GPU, in less than eight minutes: python -m gpu.check [--interpret] [SECTION ...]

Sections are processes of their own, so that a kernel that hangs, or breaks the GPU's context, takes none of the others
with it. Those that ask what is right run side by side, since most of what they do is compiling; those that measure run
one after the other, alone. Everything is told in one table at the end, and in OUT/check.json. The exit status is 0 if
all sections have come to their end and all that they asked was right; figures that miss a target do not count.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import interpreted
from gpu.findings import Findings

LIMIT = 470.0
"""Seconds for everything."""
END = "the section comes to its end"


@dataclass(frozen=True)
class Section:
    """A module with a function `run(bench)`."""

    name: str
    title: str
    limit: float
    """Seconds."""
    module: str = ""
    """`gpu.checks.NAME` if empty."""
    shares: int = 0
    """Processes among which its cases are dealt; 0: it measures, and has the machine for itself."""

    @property
    def path(self) -> str:
        return self.module or f"gpu.checks.{self.name}"


SECTIONS = (
    Section("dispatch", "What serves on this machine", 170, shares=1),
    Section("attention", "Paged attention is right", 170, shares=7),
    Section("store", "Storing K and V is right", 170, shares=3),
    Section("elementwise", "Norms, rotary embedding, gates and rows are right", 170, shares=1),
    Section("linear", "Linear layers are right", 170, shares=2),
    Section("blocks", "Copies of blocks are right", 120, shares=1),
    Section("sampling", "Draws are right", 170, shares=2),
    Section("engine", "The engine's answers depend on no company", 170, shares=3),
    Section("ceilings", "Ceilings", 40),
    Section("decode", "Decoding: K and V read", 75),
    Section("prefill", "Prompts: products of attention", 60),
    Section("offline", "The engine on a model of random weights", 160),
    Section("kernels", "Short kernels", 60),
    Section("flash", "flash-attn, and ours beside it", 40),
    Section("layout", "Blocks of all layers against a pool for each", 40),
    Section("invariance", "What it costs that company does not matter", 60),
)


@dataclass
class Outcome:
    """What became of a section."""

    section: Section
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0

    @property
    def wrong(self) -> int:
        return sum(line.ok is False for line in self.findings.lines)


class Process:
    """A share of a section, running."""

    def __init__(self, section: Section, share: int, place: "Place", limit: float) -> None:
        self.name = f"{section.name}-{share}" if section.shares > 1 else section.name
        self._found, self._log = place.out / f"{self.name}.json", place.out / f"{self.name}.txt"
        self._found.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "gpu.section", section.path, self.name, str(place.out)]
        command += [str(place.scratch), f"{share}/{max(1, section.shares)}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._end = time.monotonic() + limit
        self._limit = limit

    def finish(self) -> Findings:
        """Waits, no longer than the limit."""
        words = ""
        try:
            code = self._process.wait(max(0.0, self._end - time.monotonic()))
            if code:
                end = signal.Signals(-code).name if code < 0 else f"status {code}"
                words = f"it ended with {end}: {self._last_words()}"
        except subprocess.TimeoutExpired:
            words = f"stopped after {self._limit:g} s"
        self.stop()
        findings = Findings.read(self._found)
        if words:
            findings.verdict(END, False, words)
        return findings

    def stop(self) -> None:
        """It, and whatever it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").split("\n")[-6:]).strip(" |")[-500:]


@dataclass(frozen=True)
class Place:
    """Where a run leaves what it finds, and what it needs for as long as it runs."""

    out: Path
    scratch: Path


def run_apart(sections: Sequence[Section], place: Place, limit: float) -> list[Outcome]:
    """In processes of their own, in `limit` seconds all together."""
    end = time.monotonic() + limit
    together = run_together([section for section in sections if section.shares], place, end)
    return together + [run_together([section], place, end)[0] for section in sections if not section.shares]


def run_together(sections: Sequence[Section], place: Place, end: float) -> list[Outcome]:
    """Side by side, each at most until its own limit and until `end`."""
    start = time.monotonic()
    outcomes = [Outcome(section) for section in sections]
    if start >= end:
        for outcome in outcomes:
            outcome.findings.verdict(END, False, "not begun: no time was left")
        return outcomes
    running: list[tuple[Outcome, Process]] = []
    try:
        for outcome in outcomes:
            section = outcome.section
            limit = min(section.limit, end - start)
            running += [(outcome, Process(section, share, place, limit)) for share in range(max(1, section.shares))]
        for outcome, process in running:
            outcome.findings.extend(process.finish())
            outcome.seconds = time.monotonic() - start
            tell_of(outcome)
    finally:
        for _, process in running:
            process.stop()
    return outcomes


def run_here(sections: Sequence[Section], place: Place) -> list[Outcome]:
    """One after the other in this process, whose kernels are interpreted."""
    from gpu.section import run

    interpreted.improve()
    outcomes = []
    for section in sections:
        start = time.monotonic()
        findings = run(section.path, section.name, place.out, place.scratch, interpreted=True)
        outcomes.append(Outcome(section, findings, time.monotonic() - start))
        tell_of(outcomes[-1])
    return outcomes


# ------------------------------------------------------------------ the table
def table(outcomes: Iterable[Outcome], is_interpreted: bool) -> Iterable[str]:
    """Figures, and what was wrong; what was right is counted."""
    total = wrong = 0
    for outcome in outcomes:
        lines = outcome.findings.lines
        verdicts = [line for line in lines if line.ok is not None]
        total, wrong = total + len(verdicts), wrong + outcome.wrong
        yield f"\n{outcome.section.title}  ({outcome.section.name}, {outcome.seconds:.0f} s)"
        width = max((len(line.what) for line in lines if line.ok is None), default=0)
        yield from (f"  {line.what:{width}}  {line.text}" for line in lines if line.ok is None)
        yield from (f"  WRONG  {line.what}: {line.text}" for line in verdicts if not line.ok)
        if verdicts:
            yield f"  {len(verdicts) - outcome.wrong} of {len(verdicts)} checks right"
    if is_interpreted:
        yield "\nInterpreted on a CPU, tiny shapes: times and what follows from them mean nothing."
    yield f"\n{total - wrong} of {total} checks right" + (f", {wrong} WRONG" if wrong else "")


def write(outcomes: Sequence[Outcome], path: Path, is_interpreted: bool) -> None:
    sections = {
        each.section.name: {
            "title": each.section.title,
            "seconds": each.seconds,
            "wrong": each.wrong,
            "lines": [asdict(line) for line in each.findings.lines],
        }
        for each in outcomes
    }
    path.write_text(json.dumps({"interpreted": is_interpreted, "sections": sections}, indent=1))


def tell_of(outcome: Outcome) -> None:
    """On the way."""
    print(f"{outcome.section.name}: {outcome.wrong} wrong, {outcome.seconds:.1f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str], sections: Sequence[Section] = SECTIONS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on a CPU, to try the script itself")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for what is found (default: a new one)")
    parser.add_argument("section", nargs="*", help=f"only these: {', '.join(each.name for each in sections)}")
    asked = parser.parse_args(arguments)
    unknown = set(asked.section) - {each.name for each in sections}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    wanted = [each for each in sections if not asked.section or each.name in asked.section]
    out = asked.out or Path(tempfile.mkdtemp(prefix="octavo-check-"))
    out.mkdir(parents=True, exist_ok=True)
    place = Place(out, Path(tempfile.mkdtemp(prefix="octavo-check-scratch-")))
    start = time.monotonic()
    try:
        outcomes = run_here(wanted, place) if asked.interpret else run_apart(wanted, place, asked.limit)
    finally:
        shutil.rmtree(place.scratch, ignore_errors=True)
    for line in table(outcomes, asked.interpret):
        print(line)
    write(outcomes, out / "check.json", asked.interpret)
    print(f"{time.monotonic() - start:.0f} s; all figures: {out / 'check.json'}")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

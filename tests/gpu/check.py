"""Checks kernels and engine on one GPU, in less than eight minutes: python -m gpu.check [--interpret] [SECTION ...]

Sections are processes of their own, so that a kernel that hangs, or breaks the GPU's context, takes none of the others
with it. Those that ask what is right run side by side, since most of what they do is compiling; those that measure run
one after the other, alone. Everything is told in one table at the end, which is OUT/table.txt too; OUT/check.json has
all numbers, OUT/log.txt what sections have printed. The exit status is 0 if all sections have come to their end and all
that they asked was right; figures that miss a target do not count.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import interpreted
import torch
from gpu.findings import Finding, Findings

LIMIT = 470.0
"""Seconds for everything."""
END = "the section comes to its end"


@dataclass(frozen=True)
class Section:
    """A module with a function `run(bench)`."""

    name: str
    title: str
    limit: float
    """Seconds that are kept for it. Where others leave time it may take longer."""
    module: str = ""
    """`gpu.checks.NAME` if empty."""
    shares: int = 0
    """Processes among which its cases are dealt; 0: it measures, and has the machine for itself."""

    @property
    def path(self) -> str:
        return self.module or f"gpu.checks.{self.name}"


SECTIONS = (
    Section("attention", "Paged attention is right", 140, shares=7),
    Section("sampling", "Draws are right", 140, shares=4),
    Section("engine", "The engine's answers depend on no company", 140, shares=3),
    Section("linear", "Linear layers are right", 140, shares=2),
    Section("store", "Storing K and V is right", 140, shares=1),
    Section("elementwise", "Norms, rotary embedding, gates and rows are right", 140, shares=1),
    Section("blocks", "Copies of blocks are right", 140, shares=1),
    Section("dispatch", "What serves on this machine", 140, shares=1),
    Section("ceilings", "Ceilings", 20),
    Section("decode", "Decoding: K and V read", 50),
    Section("prefill", "Prompts: products of attention", 25),
    Section("offline", "The engine on a model of random weights", 120),
    Section("kernels", "Short kernels", 35),
    Section("flash", "flash-attn, and ours beside it", 15),
    Section("invariance", "What it costs that company does not matter", 45),
    Section("layout", "Blocks of all layers against a pool for each", 20),
)
"""Those with shares begin in this order, the longest first; those that measure run in it, what matters most first."""


@dataclass
class Outcome:
    """What became of a section."""

    section: Section
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0
    log: str = ""
    """What its processes have printed."""

    @property
    def wrong(self) -> list[Finding]:
        return [line for line in self.findings.lines if line.ok is False]


class Process:
    """A share of a section, running."""

    def __init__(self, section: Section, share: int, scratch: Path, limit: float) -> None:
        self.name = f"{section.name}-{share}" if section.shares > 1 else section.name
        self._found, self._log = scratch / f"{self.name}.json", scratch / f"{self.name}.txt"
        self._found.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "gpu.section", section.path, self.name, str(scratch)]
        command.append(f"{share}/{max(1, section.shares)}")
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
            words = f"stopped after {self._limit:.1f} s"
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

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def _last_words(self) -> str:
        return " | ".join(self.printed.split("\n")[-6:]).strip(" |")[-500:]


def run_apart(sections: Sequence[Section], scratch: Path, limit: float) -> Iterator[Outcome]:
    """In processes of their own, in `limit` seconds all together: first, side by side, those with shares."""
    end = time.monotonic() + limit
    rounds = [[section] for section in sections if not section.shares]
    if together := [section for section in sections if section.shares]:
        rounds.insert(0, together)
    for number, some in enumerate(rounds):
        kept = sum(map(limit_of, rounds[number + 1 :]))
        yield from run_together(some, scratch, until(time.monotonic(), limit_of(some), kept, end))


def limit_of(together: Iterable[Section]) -> float:
    return max(section.limit for section in together)


def until(now: float, limit: float, kept: float, end: float) -> float:
    """When what begins now is stopped: it has `limit` seconds, and whatever is not kept for others, before the end."""
    return min(end, max(now + limit, end - kept))


def run_together(sections: Sequence[Section], scratch: Path, end: float) -> Iterator[Outcome]:
    """Side by side, each at most until `end`."""
    start = time.monotonic()
    if start >= end:
        for section in sections:
            outcome = Outcome(section)
            outcome.findings.verdict(END, False, "not begun: no time was left")
            yield outcome
        return
    running: list[Process] = []
    try:
        for section in sections:
            running += [Process(section, share, scratch, end - start) for share in range(max(1, section.shares))]
        processes = iter(running)
        for section in sections:
            outcome = Outcome(section)
            for process in itertools.islice(processes, max(1, section.shares)):
                outcome.findings.extend(process.finish())
                outcome.log += f"---- {process.name}\n{process.printed}"
            outcome.seconds = time.monotonic() - start
            yield outcome
    finally:
        for process in running:
            process.stop()


def run_here(sections: Sequence[Section], scratch: Path) -> Iterator[Outcome]:
    """One after the other in this process, whose kernels are interpreted."""
    from gpu.section import run

    interpreted.improve()
    for section in sections:
        start = time.monotonic()
        findings = run(section.path, section.name, scratch, interpreted=True)
        yield Outcome(section, findings, time.monotonic() - start)


# ------------------------------------------------------------------ the table
def table(outcomes: Sequence[Outcome], is_interpreted: bool) -> Iterator[str]:
    """Figures, and what was wrong; what was right is counted. At the end once more what was wrong, where it is seen."""
    total = 0
    for outcome in outcomes:
        lines = outcome.findings.lines
        verdicts = sum(line.ok is not None for line in lines)
        total += verdicts
        yield f"\n{outcome.section.title}  ({outcome.section.name}, {outcome.seconds:.0f} s)"
        width = max((len(line.what) for line in lines if line.ok is None), default=0)
        yield from (f"  {line.what:{width}}  {line.text}" for line in lines if line.ok is None)
        yield from (f"  WRONG  {line.what}: {line.text}" for line in outcome.wrong)
        if verdicts:
            yield f"  {verdicts - len(outcome.wrong)} of {verdicts} checks right"
    if is_interpreted:
        yield "\nInterpreted on a CPU, tiny shapes: times and what follows from them mean nothing."
    wrong = [f"  {outcome.section.name}: {line.what}: {line.text}" for outcome in outcomes for line in outcome.wrong]
    if wrong:
        yield "\nWRONG"
        yield from wrong
    yield f"\n{total - len(wrong)} of {total} checks right" + (f", {len(wrong)} WRONG" if wrong else "")


def leave(outcomes: Sequence[Outcome], out: Path, is_interpreted: bool) -> None:
    """What is known so far, in files."""
    sections = {
        each.section.name: {
            "title": each.section.title,
            "seconds": each.seconds,
            "wrong": len(each.wrong),
            "lines": [asdict(line) for line in each.findings.lines],
        }
        for each in outcomes
    }
    (out / "check.json").write_text(json.dumps({"interpreted": is_interpreted, "sections": sections}, indent=1))
    (out / "table.txt").write_text("\n".join(table(outcomes, is_interpreted)) + "\n")
    (out / "log.txt").write_text("".join(each.log for each in outcomes))


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
    if sections is SECTIONS and not asked.interpret and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU here; --interpret tries the script on a CPU")
    wanted = [each for each in sections if not asked.section or each.name in asked.section]
    out = asked.out or Path(tempfile.mkdtemp(prefix="octavo-check-"))
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="octavo-check-scratch-"))
    start, outcomes = time.monotonic(), []
    try:
        for outcome in run_here(wanted, scratch) if asked.interpret else run_apart(wanted, scratch, asked.limit):
            outcomes.append(outcome)
            words = f"{outcome.section.name}: {len(outcome.wrong)} wrong, {outcome.seconds:.1f} s"
            print(words, file=sys.stderr, flush=True)
            leave(outcomes, out, asked.interpret)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for line in table(outcomes, asked.interpret):
        print(line)
    print(f"{time.monotonic() - start:.0f} s; all figures: {out / 'check.json'}")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the core needs of others. `engine/build.py` joins the two sides; neither imports the other."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.messages import RequestSummary, Stats, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans on a model. One caller, one thread; plans come in step order.

    `forward` may return before the work is done; `sample` waits for it. With overlap the loop calls `forward(N+1)`
    before `sample(N)`: rows whose last token is still to come then take it from the runner's own rows.
    """

    def forward(self, plan: StepPlan) -> Any:
        """Starts the step: block copies, K and V of all rows, logits of the sampling rows. Returns a handle."""

    def sample(self, handle: Any, masks: "Masks | None") -> StepResult:
        """Draws the next tokens. Raises whatever broke the step; per-row faults come in `RowResult.error`."""

    def shutdown(self) -> None:
        """Frees what the executor holds. Safe to call twice."""


Masks = dict[int, Sequence[int]]
"""slot -> allowed-token bit mask, int32 words [ceil(vocabulary / 32)]"""


class Grammar(Protocol):
    """Token masks for constrained sequences, made while the model runs.

    They come too late, and `Executor.sample` raises, for a row that a device has drawn (`runner/ahead.py`) and for a
    step behind which another was launched. So constrained rows will have to be the host's to draw from admission on,
    and their steps to be sampled before the next `forward`. Nothing is constrained yet, and nothing sees to that.
    """

    def masks(self, plan: StepPlan) -> Masks | None:
        """Masks of the plan's sampling rows that are constrained, or None."""


class NoGrammar:
    """The null object: nothing is constrained."""

    def masks(self, plan: StepPlan) -> Masks | None:
        return None


class Observer(Protocol):
    """Who counts what the API process sees. Errors raised here are logged and never reach a request."""

    def first_token(self, seconds: float) -> None:
        """From a sequence's arrival to the publication of its first token."""

    def inter_token(self, seconds: float) -> None:
        """Between two publications of one sequence."""

    def published(self, tokens: int) -> None:
        """Generated tokens handed to a reader: what `usage` counts. With every delta."""

    def finished(self, summary: RequestSummary) -> None:
        """Once for each sequence, whatever its end."""

    def rejected(self, reason: str) -> None:
        """Refused: max_num_queued_reqs, max_num_queued_tokens, queue_timeout, draining, loading or dead."""

    def step(self, stats: Stats) -> None:
        """Every snapshot."""


class NoObserver:
    """The null object."""

    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float) -> None: ...
    def published(self, tokens: int) -> None: ...
    def finished(self, summary: RequestSummary) -> None: ...
    def rejected(self, reason: str) -> None: ...
    def step(self, stats: Stats) -> None: ...

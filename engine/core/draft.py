"""A step's plan while the scheduler makes it."""

from engine.messages import NewRow, StepPlan
from engine.request import Request


class Draft:
    """Rows in two runs, so that the plan can put decode rows (one token each, sampled) first."""

    __slots__ = (
        "capped", "chunk_requests", "chunk_samples", "chunk_slots", "chunk_tokens", "decode_slots", "decodes",
        "new_blocks", "new_rows", "preempted", "reentered_slots", "refreshed_slots", "scored_slots", "step",
    )  # fmt: skip

    def __init__(self, step: int) -> None:
        self.step = step
        self.decodes: list[Request] = []
        self.decode_slots: list[int] = []
        self.chunk_requests: list[Request] = []
        self.chunk_slots: list[int] = []
        self.chunk_tokens: list[int] = []
        self.chunk_samples: list[bool] = []
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[tuple[int, list[list[int]]]] = []
        self.reentered_slots: list[int] = []
        self.scored_slots: list[int] = []
        self.refreshed_slots: list[int] = []
        self.preempted = False
        """Somebody was preempted for this step."""
        self.capped: Request | None = None
        """The first running prefill that got less than it wanted."""

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(self.chunk_tokens)

    @property
    def requests(self) -> list[Request]:
        """In the order of the plan's rows."""
        return self.decodes + self.chunk_requests

    def add_chunk(self, request: Request, tokens: int, samples: bool) -> None:
        if samples and tokens == 1:
            self.decodes.append(request)
            self.decode_slots.append(request.slot)
            return
        self.chunk_requests.append(request)
        self.chunk_slots.append(request.slot)
        self.chunk_tokens.append(tokens)
        self.chunk_samples.append(samples)

    def enter(self, request: Request, block_ids: list[list[int]]) -> None:
        """The request's row is told to the executor from scratch; `block_ids`: its table by KV group."""
        self.new_rows.append(
            NewRow(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt,
                params=request.params,
                index=request.index,
                block_ids=block_ids,
                num_computed=request.num_computed,
            )
        )

    def plan(self, copies: list[tuple[int, int, int]], freed_slots: list[int]) -> StepPlan:
        decodes = len(self.decodes)
        return StepPlan(
            step=self.step,
            slots=self.decode_slots + self.chunk_slots,
            num_tokens=[1] * decodes + self.chunk_tokens,
            samples=[True] * decodes + self.chunk_samples,
            new_rows=self.new_rows,
            new_blocks=self.new_blocks,
            copies=copies,
            transfers=[],
            freed_slots=freed_slots + self.reentered_slots,
            scored_slots=self.scored_slots,
            refreshed_slots=self.refreshed_slots,
        )

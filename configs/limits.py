"""What the scheduler may do in a step: a part of the settings, resolved."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    """Sequences in the running set; also the number of slots."""
    max_num_batched_tokens: int
    """Token budget of a step."""
    max_model_len: int
    """Effective window: min(model, --max-model-len, pool)."""
    max_passed_over: int = 64
    """Steps a waiting request may be overtaken before the next free blocks are kept for it."""
    policy: Policy = "fcfs"
    """Whether requests' priorities count."""
    kv_refresh_interval: int | None = None
    """Generated tokens after which a sequence's K and V are computed anew in full precision; None: never."""

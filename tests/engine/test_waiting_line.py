"""What counts as waiting, and when the line is full."""

from engine.errors import Overloaded
from engine.messages import Stats
from engine.waiting_line import QueueLimits, WaitingLine

IDLE = Stats()


def line(**limits: int) -> WaitingLine:
    return WaitingLine(QueueLimits(max_num_seqs=2, **limits))


def test_sequences_on_their_way_count_until_the_engine_has_them() -> None:
    waiting = line()
    for _ in range(5):
        waiting.sent(10)
    assert waiting.num_sent == 5 and waiting.length(IDLE) == 3, "two find a free row"
    seen = Stats(running=2, waiting=2, received_total=4)
    waiting.counted(seen)
    assert waiting.length(seen) == 3
    waiting.counted(Stats(received_total=5))
    assert waiting.length(Stats(running=1)) == 0


def test_a_line_of_sequences_is_full() -> None:
    waiting = line(max_num_queued_reqs=3)
    seen = Stats(running=2, waiting=2)
    assert not waiting.is_full(seen) and waiting.refusal(seen, 1, 10**9, 0.0) is None
    refusal = waiting.refusal(seen, 2, 1, 0.0)
    assert isinstance(refusal, Overloaded) and refusal.reason == "max_num_queued_reqs" and refusal.retry_after == 1.0
    assert refusal.message == "The queue is full: 4 sequences would wait; the limit is 3 (--max-num-queued-reqs)."
    waiting.sent(1)
    assert waiting.is_full(seen)
    assert line(max_num_queued_reqs=0).is_full(Stats(running=2, waiting=1))
    assert not line(max_num_queued_reqs=0).is_full(Stats(running=2)), "nobody waits"


def test_a_line_of_tokens_is_full() -> None:
    waiting = line(max_num_queued_tokens=100)
    waiting.sent(30)
    seen = Stats(running=2, waiting=1, waiting_tokens=50)
    assert waiting.refusal(seen, 1, 20, 0.0) is None
    refusal = waiting.refusal(seen, 1, 21, 0.0)
    assert refusal is not None and refusal.reason == "max_num_queued_tokens"
    assert refusal.message.startswith("The queue is full: 101 prompt tokens would wait; the limit is 100")
    assert waiting.refusal(Stats(waiting_tokens=50), 1, 21, 0.0) is None, "it runs at once, and does not wait"


def test_without_limits_nothing_is_refused() -> None:
    seen = Stats(running=2, waiting=10**6, waiting_tokens=10**9)
    assert line().refusal(seen, 10**6, 10**9, 0.0) is None and not line().is_full(seen)


def test_when_to_come_again_is_reckoned_from_how_many_wait() -> None:
    waiting = line()
    times = iter([*range(10), 9])
    waiting.throughput.clock = lambda: float(next(times))
    for _ in range(10):
        waiting.throughput.finished()
    refusal = waiting.timed_out(Stats(running=2, waiting=20), "late", 0.0)
    assert (refusal.message, refusal.reason) == ("late", "queue_timeout") and 15 < refusal.retry_after < 25


def test_when_to_come_again_before_anything_was_finished() -> None:
    seen = Stats(running=2, waiting=3)
    refused = line(max_num_queued_reqs=3).refusal(seen, 1, 1, 7.0)
    assert refused is not None and refused.retry_after == 14.0, "four come after two, which have taken 7 s so far"
    refused = line(max_num_queued_tokens=10).refusal(seen, 1, 11, 7.0)
    assert refused is not None and refused.retry_after == 14.0
    assert line().timed_out(Stats(running=2, waiting=1), "late", 7.0).retry_after == 7.0

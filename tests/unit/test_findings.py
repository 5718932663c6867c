"""The cause, told apart from its victims; and the words for it."""

from __future__ import annotations

from phalanx.diagnose import report
from phalanx.diagnose.findings import find_cause, is_consequence
from phalanx.diagnose.repetition import Repetition
from phalanx.events import Ending, ErrorRecord, Frame

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2711"


def error(rank: int, moment: float, kind: str = "ValueError", message: str = "x", frames: int = 1) -> ErrorRecord:
    lines = tuple(Frame(f"/elsewhere/train{n}.py", n, "step", "do()") for n in range(frames))
    return ErrorRecord(rank, 100 + rank, moment, kind, message, lines, "Traceback …", 1)


def raised(rank: int, moment: float, kind: str = "ValueError", message: str = "x", **more) -> Ending:
    return Ending(rank, 100 + rank, moment, exit_code=1, error=error(rank, moment, kind, message), **more)


def test_the_first_failure_in_time_is_the_cause() -> None:
    verdict = find_cause([raised(0, 5.0), raised(1, 3.0), raised(2, 4.0)])
    assert (verdict.cause.rank, verdict.victims) == (1, (0, 2))


def test_a_lost_connection_is_never_the_cause_while_another_error_is_known() -> None:
    endings = [
        raised(0, 1.0, "RuntimeError", GLOO),
        raised(1, 9.0, "KeyError"),
        Ending(2, 102, 2.0, signal=15, asked=True),
    ]
    assert find_cause(endings).cause.rank == 1


def test_a_rank_that_was_told_to_stop_is_no_cause() -> None:
    endings = [Ending(0, 100, 1.0, signal=15, asked=True), Ending(1, 101, 2.0, signal=9)]
    verdict = find_cause(endings)
    assert (verdict.cause.rank, verdict.victims) == (1, (0,))


def test_only_lost_connections_point_at_who_left() -> None:
    verdict = find_cause([raised(0, 2.0, "RuntimeError", GLOO), Ending(1, 101, 1.0, exit_code=0)])
    assert (verdict.cause.rank, verdict.left_early) == (0, (1,))


def test_what_counts_as_a_consequence() -> None:
    assert is_consequence(error(0, 0, "torch.distributed.DistNetworkError", "anything"))
    assert is_consequence(error(0, 0, "RuntimeError", GLOO))
    assert is_consequence(error(0, 0, "phalanx.errors.PeerFailed", "rank 0 went first and failed"))
    assert not is_consequence(error(0, 0, "RuntimeError", "mat1 and mat2 shapes cannot be multiplied"))
    assert not is_consequence(error(0, 0, "ValueError", "connection closed by peer"))


def test_the_block_never_exceeds_15_lines() -> None:
    long = error(1, 1.0, message="a" * 500 + "\nsecond line", frames=9)
    cause = Ending(1, 101, 1.0, exit_code=1, error=long, tail=tuple(f"printed {n}" * 40 for n in range(5)))
    verdict = find_cause([cause, *(Ending(r, 100 + r, 2.0, signal=15, asked=True) for r in range(2, 40))])
    block = report.failure_block(verdict, world_size=40, host="h", started=0.0, log="/x/rank-1.log", attempts=3)
    assert len(block) <= 15
    assert all(len(line) <= 160 for line in block)
    assert "38 other ranks fell with it" in "".join(block)


def test_headlines() -> None:
    assert report.headline(Ending(0, 1, 0.0, signal=9)).startswith("SIGKILL, killed from outside")
    assert report.headline(Ending(0, 1, 0.0, signal=60)) == "signal 60"
    assert report.headline(Ending(0, 1, 0.0, exit_code=4)) == "exit code 4, without an exception"
    assert report.headline(raised(0, 0.0, "MemoryError", "")) == "MemoryError"


def test_only_one_kind_of_failure_within_seconds_is_a_crash_loop() -> None:
    repetition = Repetition()
    assert [repetition.add(raised(0, 9.0 * n)) for n in range(5)] == [False, False, False, False, True]
    slow, mixed = Repetition(), Repetition()
    assert not any(slow.add(raised(0, 11.0 * n)) for n in range(9))
    assert not any(mixed.add(raised(0, float(n), message=f"attempt {n % 4 // 2}")) for n in range(9))

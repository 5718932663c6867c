"""Pure functions from how the ranks ended to why: the cause, told apart from its victims."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.events import Ending, ErrorRecord, Frame
from phalanx.failure.signal_meaning import gloo_mismatch

# What a rank says when another one has gone away under it. Such an error is never the cause while any other is known.
_CONSEQUENCES = re.compile(
    r"connection (was )?(likely )?closed|closed by peer|connection reset|connection refused|broken pipe"
    r"|socket (timeout|closed|is closed)|failed to recv|remote process exited|remote server shutdown"
    r"|timed out waiting|timed out after|wait timeout|watchdog caught collective operation timeout"
    r"|application timeout caused pair closure"
    r"|has ended without taking part in collective|has left the group and never comes|aborted the group",
    re.IGNORECASE,
)
_CONSEQUENCE_TYPES = (
    *("DistNetworkError", "DistBackendError", "DistStoreError", "PeerFailed"),
    *("PeerLost", "CollectiveTimeout", "CollectiveAborted"),
)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Warning)(: |$)")
_SAME_MOMENT = 1.0  # for a signal to reach all nodes, and for clocks to differ


@dataclass(frozen=True)
class Verdict:
    """Why an attempt failed."""

    cause: Ending
    victims: tuple[int, ...]
    """Ranks that ended because of it, by an error of their own or because they were stopped."""
    alike: tuple[int, ...]
    """Ranks that failed by themselves in the same way, so are nobody's victims."""
    left_early: tuple[int, ...]
    """Ranks that ended normally, when the cause is itself only a lost connection: perhaps to one of them."""
    elsewhere: tuple[tuple[Frame, tuple[int, ...]], ...] = ()
    """When ranks have called different collectives, the lines of those that called another one than the cause."""


def is_consequence(error: ErrorRecord) -> bool:
    """Whether this error says no more than that another rank went away."""
    if error.type.rpartition(".")[2] in _CONSEQUENCE_TYPES:
        return True
    if error.message.startswith("Caught "):  # by a DataLoader's worker, which is connected with no other rank
        return False
    return error.type in ("RuntimeError", "OSError", "ConnectionError") and bool(_CONSEQUENCES.search(error.message))


def final_report(ending: Ending) -> str:
    """The exception that Python printed, of a rank that could not tell it itself; empty if it printed none."""
    last = ending.tail[-1] if ending.tail else ""
    return last if ending.error is None and _EXCEPTION.match(last) else ""


def is_victim(ending: Ending) -> bool:
    """Whether it ended only because another rank went away."""
    return ending.error is not None and is_consequence(ending.error)


def failed_before(signal: float, endings: Sequence[Ending]) -> bool:
    """Whether there is more to be told of a run than that a signal has stopped it, at that moment (of time.time).

    It does not reach all nodes at once: who has just lost a rank that heard of it earlier has not failed.
    """
    return any(
        ending.failed and not ending.asked and not (is_victim(ending) and ending.time > signal - _SAME_MOMENT)
        for ending in endings
    )


def find_cause(endings: Sequence[Ending]) -> Verdict:
    """The first failure in time that is not the consequence of another; at least one ending must be a failure."""
    failures = sorted((ending for ending in endings if ending.failed), key=lambda ending: ending.time)
    # Whom the kernel kills may take a while to end: the others may have been told to stop before that.
    by_themselves = [ending for ending in failures if not ending.asked or ending.out_of_memory] or failures
    causes = [ending for ending in by_themselves if ending.error is None or not is_consequence(ending.error)]
    killed = [ending for ending in causes if ending.out_of_memory]
    cause = (killed or causes or by_themselves)[0]
    sides = _sides(cause, failures)
    own_side = sides.pop(cause.called, [])
    # Who is told to stop in the moment in which it fails by itself is nobody's victim either.
    same = (ending.rank for ending in failures if not is_victim(ending) and _is_alike(ending, cause))
    alike = tuple(sorted({*own_side, *same} - {cause.rank}))
    not_victims = {cause.rank, *alike, *itertools.chain(*sides.values())}
    victims = tuple(sorted(ending.rank for ending in failures if ending.rank not in not_victims))
    left_early = ()
    if not causes:
        left_early = tuple(ending.rank for ending in endings if not ending.failed and not ending.asked)
    elsewhere = tuple((frame, tuple(sorted(ranks))) for frame, ranks in sides.items() if frame is not None)
    return Verdict(cause, victims, alike, left_early, elsewhere)


def _sides(cause: Ending, failures: Sequence[Ending]) -> dict[Frame | None, list[int]]:
    """Ranks that have called different collectives, by the lines from where. None of them is a victim of the others.

    All are told of it at once; who is stopped before it has told its own error was in the midst of it as well.
    """
    sides: dict[Frame | None, list[int]] = {}
    by_gloo = gloo_mismatch(cause) is not None
    by_shm = cause.error is not None and cause.error.type.endswith("CollectiveMismatch")
    for ending in failures if by_gloo or by_shm else ():
        # On gloo, one rank notices and ends itself; the others lose their connection to it.
        is_same = ending.error is None or (cause.error is not None and ending.error.message == cause.error.message)
        if ending.called is not None and (is_same or (by_gloo and is_victim(ending))):
            sides.setdefault(ending.called, []).append(ending.rank)
    return sides if cause.called in sides else {}


def _is_alike(one: Ending, other: Ending) -> bool:
    """The same exception from the same line, the same crash there, or killed by the kernel for the same reason."""
    if one.out_of_memory or other.out_of_memory:
        return one.out_of_memory is not None and other.out_of_memory is not None and one.host == other.host
    if one.error is None and other.error is None and one.signal is None and other.signal is None:
        return one.exit_code == other.exit_code and final_report(one) == final_report(other) != ""
    if one.error is None or other.error is None:
        return one.signal == other.signal and one.crash == other.crash != ()
    places = [(error.type, [(frame.file, frame.line) for frame in error.frames]) for error in (one.error, other.error)]
    return places[0] == places[1]

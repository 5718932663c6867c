"""Finds the cause of a failure among the ends of all ranks, and tells it from its victims: pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx import messages
from phalanx.events import DeviceError, Ending, ErrorRecord, Frame
from phalanx.failure import device_errors
from phalanx.failure.signal_meaning import gloo_mismatch

# Errors of a rank that has lost another one. Such an error is never the cause if any other is known.
_CONSEQUENCES = re.compile(
    r"connection (was )?(likely )?closed|closed by peer|connection reset|connection refused|broken pipe"
    r"|socket (timeout|closed|is closed)|failed to recv|remote process exited|remote server shutdown"
    r"|timed out waiting|timed out after|wait timeout|watchdog caught collective operation timeout"
    r"|application timeout caused pair closure"
    r"|has ended without taking part in collective|has left the group and never comes|aborted the group",
    re.IGNORECASE,
)
_CONSEQUENCE_TYPES = (
    *("DistNetworkError", "DistStoreError", "PeerFailed"),
    *("PeerLost", "CollectiveTimeout", "CollectiveAborted"),
)
_PERHAPS_CONSEQUENCES = ("RuntimeError", "OSError", "ConnectionError", "torch.distributed.DistBackendError")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Warning)(: |$)")
_SAME_MOMENT = 1.0  # for a signal to reach all nodes, and for clocks to differ


@dataclass(frozen=True)
class Verdict:
    """The cause of a failed attempt."""

    cause: Ending
    victims: tuple[int, ...]
    """Ranks that ended because of it, by an error of their own or because they were stopped."""
    alike: tuple[int, ...]
    """Ranks that failed by themselves in the same way, and are no victims."""
    left_early: tuple[int, ...]
    """Ranks that ended normally, if the cause is only a lost connection: perhaps to one of them."""
    elsewhere: tuple[tuple[Frame, tuple[int, ...]], ...] = ()
    """If ranks have called different collectives, the lines of those that called another one than the cause."""


def is_consequence(error: ErrorRecord) -> bool:
    """True if this error only means that another rank was lost."""
    if error.type.rpartition(".")[2] in _CONSEQUENCE_TYPES:
        return True
    if error.message.startswith("Caught "):  # by a DataLoader's worker, which is not connected to other ranks
        return False
    return error.type in _PERHAPS_CONSEQUENCES and _blames_another(error.message, device_errors.find(error.message))


def _blames_another(text: str, found: DeviceError | None) -> bool:
    return (found is not None and found.is_consequence) or bool(_CONSEQUENCES.search(text))


def final_report(ending: Ending) -> str:
    """Returns the exception that Python printed, of a rank that could not report it; empty if it printed none."""
    last = ending.tail[-1] if ending.tail else ""
    return last if ending.error is None and _EXCEPTION.match(last) else ""


def is_victim(ending: Ending) -> bool:
    """True if a rank ended only because another one was lost."""
    if ending.error is not None:
        return is_consequence(ending.error)
    found = ending.device_error
    return found is not None and _blames_another(found.headline, found)


def failed_before(signal: float, endings: Sequence[Ending]) -> bool:
    """True if the run had failed before a signal stopped it, at that moment (of time.time).

    The signal does not reach all nodes at once: a rank that has just lost another one to it has not failed.
    """
    return any(
        ending.failed and not ending.asked and not (is_victim(ending) and ending.time > signal - _SAME_MOMENT)
        for ending in endings
    )


def find_cause(endings: Sequence[Ending]) -> Verdict:
    """Returns the first failure in time that is not the consequence of another. At least one end must be a failure."""
    failures = sorted((ending for ending in endings if ending.failed), key=lambda ending: ending.time)
    # A process that the kernel kills may take a while to end: the other ranks may have been stopped before that.
    by_themselves = [ending for ending in failures if not ending.asked or ending.out_of_memory] or failures
    causes = [ending for ending in by_themselves if not is_victim(ending)]
    killed = [ending for ending in causes if ending.out_of_memory]
    missing = [] if causes else _missing(by_themselves, endings)
    cause = (killed or causes or missing or by_themselves)[0]
    sides = _sides(cause, failures)
    own_side = sides.pop(cause.called, [])
    # A rank that is stopped at the moment in which it fails by itself is no victim either.
    same = (ending.rank for ending in failures if not is_victim(ending) and _is_alike(ending, cause))
    alike = tuple(sorted({*own_side, *same, *(ending.rank for ending in missing)} - {cause.rank}))
    not_victims = {cause.rank, *alike, *itertools.chain(*sides.values())}
    victims = tuple(sorted(ending.rank for ending in failures if ending.rank not in not_victims))
    left_early = tuple(one.rank for one in endings if not (causes or one.failed or one.asked))
    elsewhere = tuple((frame, tuple(sorted(ranks))) for frame, ranks in sides.items() if frame is not None)
    return Verdict(cause, victims, alike, left_early, elsewhere)


def _missing(timed_out: Sequence[Ending], endings: Sequence[Ending]) -> list[Ending]:
    """Returns the ranks that others waited for until they timed out: their pages prove it, and they wait for nobody."""
    idle = [one for one in endings if one.error is None and all(last == done for _, last, done in one.groups)]
    for waiter in timed_out:
        error = waiter.device_error or DeviceError("")
        op, number = error.awaited
        groups = {name for name, last, done in waiter.groups if done < number <= last}
        if missing := [one for one in idle if any(name in groups and last < number for name, last, _ in one.groups)]:
            late = f"it has not come to {op} #{number}, for which rank {waiter.rank} waited {error.waited:g} s"
            return [messages.replace(one, device_error=DeviceError(late)) for one in missing]
    return []


def _sides(cause: Ending, failures: Sequence[Ending]) -> dict[Frame | None, list[int]]:
    """Returns ranks that have called different collectives, by the calling lines. None of them is a victim.

    All get the error at once; a rank that is stopped before it has reported its own was in the same collective.
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
    """True for the same device error, exception or crash from one line, and ranks of a host that ran out of memory."""
    if one.out_of_memory or other.out_of_memory:
        return one.out_of_memory is not None and other.out_of_memory is not None and one.host == other.host
    if one.device_error is not None and one.device_error == other.device_error:  # noticed at any line
        return True
    if one.error is None and other.error is None and one.signal is None and other.signal is None:
        return one.exit_code == other.exit_code and final_report(one) == final_report(other) != ""
    if one.error is None or other.error is None:
        return one.signal == other.signal and one.crash == other.crash != ()
    places = [(error.type, [(frame.file, frame.line) for frame in error.frames]) for error in (one.error, other.error)]
    return places[0] == places[1]

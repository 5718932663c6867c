"""The watchdogs of the agent: the memory of its ranks, their pace, and whether they make progress at all."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import messages
from phalanx.events import Ending, HangRecord
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.agent.run_record import RunRecord
from phalanx.launch.output.agent_lines import AgentLines
from phalanx.launch.spec.launch_spec import LaunchSpec
from phalanx.watchdog.memory import MemoryWatchdog
from phalanx.watchdog.oom import Counters

if TYPE_CHECKING:
    from phalanx.watchdog.exchange import Exchange
    from phalanx.watchdog.stall.stall_detector import StallDetector
    from phalanx.watchdog.straggler.across_nodes import PaceExchange
    from phalanx.watchdog.straggler.pace import PaceMonitor

_SOON = 1.0
"""Seconds that ranks run before their progress is watched. A job that ends earlier is spared these imports."""


class Watchdogs:
    """The watchdogs of a run on this node."""

    def __init__(
        self, spec: LaunchSpec, directory: Path, record: RunRecord, agent_lines: AgentLines, wake: Callable[[], None]
    ) -> None:
        self._spec, self._directory, self._record = spec, directory, record
        self._agent_lines, self._wake = agent_lines, wake
        self._counters = Counters()
        self._pace: PaceMonitor | None = None
        self._watch: AttemptRun | None = None
        self._failed: set[str] = set()
        """The watchdogs that have failed at some time."""
        self.standing: HangRecord | None = None
        """The verdict on ranks that stand still, as long as they do."""
        self.hang: HangRecord | None = None
        """The verdict for which this attempt has to end."""

    def begin(self, place: str, exchange: Exchange | None) -> None:
        """Begins a new attempt.

        ``place``: the run directory as it is printed; ``exchange``: with the other nodes, if there are any.
        """
        self.hang = self.standing = None
        self._place, self._exchange = place, exchange
        self._memory = MemoryWatchdog(self._counters)
        self._progress: tuple[PaceMonitor, PaceExchange, StallDetector] | None = None
        self._has_started = False
        self._progress_due = time.monotonic() + (self._spec.stall_after / 4 or math.inf)
        if exchange is not None:  # the other nodes may send something at once
            self._watch_progress()

    def _watch_progress(self) -> None:
        from phalanx.watchdog.exchange import Exchange
        from phalanx.watchdog.stall.across_nodes import StallExchange
        from phalanx.watchdog.stall.stall_detector import StallDetector, Terms
        from phalanx.watchdog.straggler.across_nodes import PaceExchange
        from phalanx.watchdog.straggler.pace import PaceMonitor

        exchange = self._exchange or Exchange()
        terms = Terms(self._spec.stall_after, self._spec.on_stall == "kill")
        stall = StallDetector(terms, self._directory, self._place, StallExchange(exchange), self._wake)
        self._pace = self._pace or PaceMonitor(self._directory)
        paces = PaceExchange(exchange)
        self._pace.begin(paces)
        self._progress = self._pace, paces, stall

    def turn(self, watch: AttemptRun) -> None:
        """Does what is due. To be called in every turn of the agent's loop."""
        self._watch, members, now = watch, watch.members, time.monotonic()
        self._guarded("memory", lambda: self._memory.turn(members.values(), now))
        if not self._has_started and watch.any_started:
            self._has_started = True
            self._progress_due = min(self._progress_due, now + _SOON)
        if self._progress is None and now >= self._progress_due:
            self._guarded("progress", self._watch_progress)
        if self._progress is None:
            return
        pace, paces, stall = self._progress
        self._guarded("pace", lambda: pace.look(members))
        if watch.stopping is None and not any(member.error for member in members.values()):
            self._guarded("progress", lambda: stall.look(members))
        while paces.announced:
            slow = paces.announced.popleft()
            if slow.lines:
                self._agent_lines.say(slow.lines)
            self._record.keep_straggler(messages.asdict(slow.straggler))
        for stalled in stall.announced():
            self._agent_lines.say(stalled.lines)
            self._record.note("stall", verdict=stalled.verdict)
            self.standing = stalled.verdict
            if stalled.kills:
                self.hang = stalled.verdict

    def _guarded(self, what: str, look: Callable[[], None]) -> None:
        """A watchdog error never stops a run: there may be no thread to be had, or no file."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 (whatever it is, the ranks are not affected)
            if what not in self._failed:
                self._failed.add(what)
                self._record.note("trouble", what=what, traceback=traceback.format_exc())
                reason = f"{type(error).__name__}: {error}"
                self._agent_lines.say([f"the ranks' {what} cannot be watched just now ({reason}); the run continues"])

    def close(self) -> None:
        """Ends the watch: all ranks have ended."""
        if self._progress is not None:
            self._progress[2].close()

    def last_words(self) -> list[str]:
        """What is known of the ends of ranks that the launcher has lost."""
        if self._watch is None:
            return []
        return self._memory.last_words({member.pid: rank for rank, member in self._watch.members.items() if member.pid})

    def explain(self, endings: Sequence[Ending]) -> list[Ending]:
        """The same, with what is known of their memory, their progress, and the collectives they were in."""
        return [self._with_call(one) if one.failed else one for one in self._memory.explain(endings)]

    def _with_call(self, ending: Ending) -> Ending:
        # Only a failure needs these.
        from phalanx import status
        from phalanx.events import Frame
        from phalanx.failure.root_cause import is_victim
        from phalanx.source_lines import source_of, users_line
        from phalanx.status.rank_record import MESSAGES

        page = status.read(status.status_path(self._directory, ending.rank))
        if page is not None and page.pid != ending.pid:
            page = None  # of an earlier attempt
        known = page.collectives if page is not None else ()
        place = next((one.place for one in known if one.state != "done" and one.op not in MESSAGES), None)
        if place is not None:
            called = Frame(place.file, place.line, place.function, source_of(place.file, place.line))
        else:  # gloo's, of which the page may not know yet: where it lost its connection, or crashed
            called = users_line(ending) if is_victim(ending) or ending.crash else None
        if page is None:
            return messages.replace(ending, called=called)
        progress = page.checkpoint, page.epoch, page.step
        return messages.replace(ending, called=called, updates=page.updates, progress=progress)

    def blame_standing(self, endings: Sequence[Ending]) -> str | None:
        """The stall for which ranks have given up waiting, in a sentence; None if none is known."""
        if self.standing is None:
            return None
        self.hang = self.standing
        first = min((one for one in endings if one.failed and not one.asked), key=lambda one: one.time, default=None)
        given_up = f"; rank {first.rank} has given up waiting" if first is not None else ""
        return f"{self.hang.headline}{given_up}"

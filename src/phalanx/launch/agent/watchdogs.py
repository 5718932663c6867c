"""What the agent watches beside the ends of its ranks: their memory, their pace, and whether they get on at all."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx import messages, status
from phalanx.events import Ending, Frame
from phalanx.failure.oom import Counters
from phalanx.failure.root_cause import is_victim
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.agent.run_record import RunRecord
from phalanx.launch.output.agent_lines import AgentLines
from phalanx.launch.spec.launch_spec import LaunchSpec
from phalanx.run_records import HangRecord
from phalanx.source_lines import source_of, users_line
from phalanx.status.rank_record import MESSAGES
from phalanx.watchdog.exchange import Exchange
from phalanx.watchdog.memory import MemoryWatchdog
from phalanx.watchdog.stall.across_nodes import StallExchange
from phalanx.watchdog.stall.stall_detector import StallDetector, Terms
from phalanx.watchdog.straggler.across_nodes import PaceExchange
from phalanx.watchdog.straggler.pace import PaceMonitor


class Watchdogs:
    """Of a run on this node."""

    def __init__(
        self, spec: LaunchSpec, directory: Path, record: RunRecord, agent_lines: AgentLines, wake: Callable[[], None]
    ) -> None:
        self._terms = Terms(spec.stall_after, spec.on_stall == "kill")
        self._directory, self._record, self._agent_lines, self._wake = directory, record, agent_lines, wake
        self._counters = Counters()
        self._pace = PaceMonitor(directory)
        self._watch: AttemptRun | None = None
        self._troubled: set[str] = set()
        """What could not be watched at some time."""
        self.standing: HangRecord | None = None
        """The verdict on ranks that stand still, as long as they do."""
        self.hang: HangRecord | None = None
        """The one that this attempt has to end for."""

    def begin(self, place: str, exchange: Exchange) -> None:
        """A new attempt. ``place``: the run directory as it is printed; ``exchange``: with the other nodes."""
        self.hang = self.standing = None
        self._paces = PaceExchange(exchange)
        self._pace.begin(self._paces)
        self._memory = MemoryWatchdog(self._counters)
        self._stall = StallDetector(self._terms, self._directory, place, StallExchange(exchange), self._wake)

    def turn(self, watch: AttemptRun) -> None:
        """To be called in every turn of the loop."""
        self._watch, members = watch, watch.members
        self._guarded("memory", lambda: self._memory.turn(members.values(), time.monotonic()))
        self._guarded("pace", lambda: self._pace.look(members))
        if watch.stopping is None and not any(member.error for member in members.values()):
            self._guarded("progress", lambda: self._stall.look(members))
        while self._paces.announced:
            slow = self._paces.announced.popleft()
            if slow.lines:
                self._agent_lines.say(slow.lines)
            self._record.keep_straggler(messages.asdict(slow.straggler))
        for stalled in self._stall.announced():
            self._agent_lines.say(stalled.lines)
            self._record.note("stall", verdict=stalled.verdict)
            self.standing = stalled.verdict
            if stalled.kills:
                self.hang = stalled.verdict

    def _guarded(self, what: str, look: Callable[[], None]) -> None:
        """Who watches must not end what it watches: there may be no thread to be had, or no file."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 (whatever it is, the ranks do not care)
            if what not in self._troubled:
                self._troubled.add(what)
                self._record.note("trouble", what=what, traceback=traceback.format_exc())
                reason = f"{type(error).__name__}: {error}"
                self._agent_lines.say([f"the ranks' {what} cannot be watched just now ({reason}); the run continues"])

    def close(self) -> None:
        """All ranks have ended."""
        self._stall.close()

    def last_words(self) -> list[str]:
        """The launcher has lost its ranks, or never had any: what can be said of their ends all the same."""
        if self._watch is None:
            return []
        return self._memory.last_words({member.pid: rank for rank, member in self._watch.members.items() if member.pid})

    def explain(self, endings: Sequence[Ending]) -> list[Ending]:
        """The same, with what is known of their memory, their progress, and the collectives they were in."""
        return [self._with_call(ending) for ending in self._memory.explain(endings)]

    def _with_call(self, ending: Ending) -> Ending:
        page = status.read(status.status_path(self._directory, ending.rank)) if ending.failed else None
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
        """The ranks have failed by waiting for too long. What they have stood still for, if that is known."""
        if self.standing is None:
            return None
        self.hang = self.standing
        first = min((one for one in endings if one.failed and not one.asked), key=lambda one: one.time, default=None)
        given_up = f"; rank {first.rank} has given up waiting" if first is not None else ""
        return f"{self.hang.headline}{given_up}"

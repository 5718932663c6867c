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
    from phalanx.devices.gpu_state import GpuState
    from phalanx.watchdog.exchange import Exchange
    from phalanx.watchdog.stall.stall_detector import StallDetector
    from phalanx.watchdog.straggler.across_nodes import PaceExchange
    from phalanx.watchdog.straggler.pace import PaceMonitor

_SOON = 1.0
"""Seconds that ranks run before their progress is watched. A job that ends earlier is spared these imports."""
_TO_REPORT = 5.0
"""Seconds from a collective's timeout to the report of its error, at most, on a busy machine."""


class Watchdogs:
    """The watchdogs of a run on this node."""

    def __init__(
        self, spec: LaunchSpec, directory: Path, record: RunRecord, agent_lines: AgentLines, wake: Callable[[], None]
    ) -> None:
        self._spec, self._directory, self._record = spec, directory, record
        self._agent_lines, self._wake = agent_lines, wake
        self._counters = Counters()
        self._pace: PaceMonitor | None = None
        self._attempt: AttemptRun | None = None
        self._failed: set[str] = set()
        """The watchdogs that have failed at some time."""
        self.gpus: list[GpuState] | None = None
        """The GPUs when the first rank had failed, and the others still used them."""
        self._stall: HangRecord | None = None
        """The last verdict on ranks that stand still."""
        self._stall_ended = math.inf
        self.hang: HangRecord | None = None
        """The verdict for which this attempt has to end."""

    def begin(self, place: str, exchange: Exchange | None) -> None:
        """Begins a new attempt.

        ``place``: the run directory as it is printed; ``exchange``: with the other nodes, if there are any.
        """
        self.hang = self._stall = self.gpus = None
        self._place, self._exchange, self.began = place, exchange, time.time()
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

    def turn(self, attempt: AttemptRun) -> None:
        """Does what is due. To be called in every turn of the agent's loop."""
        self._attempt, ranks, now = attempt, attempt.ranks, time.monotonic()
        self._guarded("memory", lambda: self._memory.turn(ranks.values(), now))
        if self.gpus is None and any(rank.has_failed for rank in ranks.values()):
            self.gpus = []
            self._guarded("GPUs", self._read_gpus)
        if not self._has_started and attempt.any_started:
            self._has_started = True
            self._progress_due = min(self._progress_due, now + _SOON)
        if self._progress is None and now >= self._progress_due:
            self._guarded("progress", self._watch_progress)
        if self._progress is None:
            return
        pace, paces, stall = self._progress
        self._guarded("pace", lambda: pace.look(ranks))
        if not (attempt.is_stopping or attempt.is_ending) and not any(rank.error for rank in ranks.values()):
            self._guarded("progress", lambda: stall.look(ranks))
        while paces.announced:
            slow = paces.announced.popleft()
            if slow.lines:
                self._agent_lines.say(slow.lines)
            self._record.keep_straggler(messages.asdict(slow.straggler))
        for stalled in stall.announced():
            self._agent_lines.say(stalled.lines)
            self._record.note("stall", verdict=stalled.verdict)
            self._stall, self._stall_ended = stalled.verdict or self._stall, math.inf if stalled.verdict else now
            if stalled.kills:
                self.hang = stalled.verdict

    def _read_gpus(self) -> None:
        from phalanx.devices import gpu_state  # only after a failure

        self.gpus = gpu_state.read()

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
        """Waits for what still asks ranks for their stacks."""
        if self._progress is not None:
            self._progress[2].close()

    def last_words(self) -> list[str]:
        """What is known of the ends of ranks that the launcher has lost."""
        if self._attempt is None:
            return []
        return self._memory.last_words({rank.pid: rank.rank for rank in self._attempt.ranks.values() if rank.pid})

    def add_memory(self, endings: Sequence[Ending]) -> list[Ending]:
        """The same, with what is known of their memory."""
        return self._memory.explain(endings)

    @property
    def standing(self) -> HangRecord | None:
        """The verdict on ranks that stand still, and for a while after: who gives up moves before it reports that."""
        return self._stall if time.monotonic() < self._stall_ended + _TO_REPORT else None

    def blame_stall(self, endings: Sequence[Ending]) -> str | None:
        """The stall for which ranks have given up waiting, in a sentence; None if none is known."""
        if (standing := self.standing) is None:
            return None
        self.hang = standing
        first = min((one for one in endings if one.failed and not one.asked), key=lambda one: one.time, default=None)
        given_up = f"; rank {first.rank} has given up waiting" if first is not None else ""
        return f"{self.hang.headline}{given_up}"

"""The judgement on failed attempts: which rank is the cause, and whether another attempt can help.

It is imported when an attempt has failed, and the package `failure` with it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import events, messages
from phalanx.events import Ending, Frame
from phalanx.failure import gpu_evidence
from phalanx.failure.crash_loop import CrashLoop, identity
from phalanx.failure.failure_text import failure_block, one_line
from phalanx.failure.root_cause import Verdict, failed_before, find_cause, is_victim
from phalanx.launch.agent.run_record import RunRecord
from phalanx.launch.agent.watchdogs import Watchdogs
from phalanx.launch.multinode import SingleNode
from phalanx.launch.spec.launch_spec import LaunchSpec
from phalanx.source_lines import shorten_path, source_of, users_line
from phalanx.status import layout, reading
from phalanx.status.rank_record import MESSAGES

if TYPE_CHECKING:
    from phalanx.launch.multinode.peers import Peers


class FailureJudge:
    """Judges the failed attempts of one run, as far as this node knows them."""

    def __init__(
        self, directory: Path, spec: LaunchSpec, record: RunRecord, watchdogs: Watchdogs, peers: SingleNode | Peers
    ) -> None:
        self._directory, self._spec, self._record = directory, spec, record
        self._failures = self._preemptions = 0
        self._watchdogs, self._peers = watchdogs, peers
        self._crash_loop = CrashLoop()

    def add_evidence(self, endings: Sequence[Ending]) -> list[Ending]:
        """The same, with the progress of the ranks, their collectives, and what is known of their GPUs."""
        endings = [self._with_call(ending) for ending in endings]
        states = self._watchdogs.gpus or ()
        xids = gpu_evidence.recent_xids(self._watchdogs.began, states)
        return gpu_evidence.add(endings, states, xids, self._directory)

    def _with_call(self, ending: Ending) -> Ending:
        page = reading.read(layout.status_path(self._directory, ending.rank))
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
        groups = tuple((one.name, one.enqueued, one.completed or 0) for one in page.groups if one.enqueued is not None)
        return messages.replace(ending, called=called, updates=page.updates, progress=progress, groups=groups)

    def why_stop(self, helper_loss: Sequence[str], signalled: int | None) -> str:
        """Why the ranks of this node are stopped, for the other nodes."""
        if self._watchdogs.hang is not None:
            return self._watchdogs.hang.headline
        if helper_loss:
            return f"{self._peers.name}: {helper_loss[0]}"
        if signalled is not None:
            return f"{self._peers.name} was stopped by {signal.Signals(signalled).name}, and so are all others"
        return f"a rank of {self._peers.name} failed"

    def cause_before(self, signal_at: float, endings: Sequence[Ending]) -> Verdict | None:
        """The failure that came before the signal that has stopped the run, if there was one."""
        return find_cause(endings) if failed_before(signal_at, endings) else None

    def judge(self, endings: Sequence[Ending], helper_loss: Sequence[str]) -> tuple[Verdict | None, str]:
        """The rank that is the cause, or None when a helper, a node or a hang is; and the cause in a sentence."""
        by_itself = any(ending.failed and not ending.asked and not is_victim(ending) for ending in endings)
        if self._watchdogs.hang is not None:  # first: a rank that hangs may not even be killed, and the zygote waits
            return None, self._watchdogs.hang.headline
        if helper_loss and not by_itself:
            return None, helper_loss[0]
        if not by_itself:
            reason = self._peers.loss() or self._peers.stop_reason or self._watchdogs.blame_stall(endings)
            if reason:
                return None, reason
        verdict = find_cause(endings)
        return verdict, one_line(verdict.cause)

    def restarts_left(self) -> int:
        """How many attempts there may be after the next one, now that one more has failed; negative: not even that.

        The loss of a node is a preemption, not a failure of the script, and has a limit of its own.
        """
        is_preempted = bool(self._peers.lost)
        self._failures, self._preemptions = self._failures + (not is_preempted), self._preemptions + is_preempted
        limit = self._spec.max_preemptions
        if limit is not None and self._preemptions > limit:
            return -1
        return self._spec.max_restarts - self._failures

    def restart_text(self, reason: str, attempt: int, left: int) -> str:
        """Says that attempt number ``attempt`` begins; once, that the loss of a node is counted apart."""
        text = f"{reason}; starting again, attempt {attempt + 1} of {attempt + 1 + left}"
        if not self._peers.lost or self._preemptions > 1:
            return text
        limit = self._spec.max_preemptions
        return f"{text} (lost nodes count for --max-preemptions, {'no limit' if limit is None else limit})"

    def crash_loop(self, verdict: Verdict | None, endings: Sequence[Ending], is_helper_lost: bool) -> str | None:
        """Why another attempt would fail in the same way, in a sentence; None when it may not."""
        if verdict is not None:
            found = self._crash_loop.add(identity(verdict.cause), verdict.cause.time, endings)
        else:
            updates = max((ending.updates for ending in endings), default=0)
            lost = "a helper" if is_helper_lost else "a node" if self._peers.lost else None
            found = lost is not None and self._crash_loop.add((lost, updates), time.time(), endings)
        return str(self._crash_loop) if found else None

    def failure_block(self, verdict: Verdict, world_size: int, attempts: int, elsewhere: str | None) -> list[str]:
        """The lines for the console. ``elsewhere``: the run directory of the cause's node, if it is another one."""
        if elsewhere is None and self._spec.node_name is not None:  # the reader may sit at another machine
            elsewhere = f"{self._spec.node_name}:{self._directory.absolute()}"
        log = events.log_path(Path(elsewhere) if elsewhere else self._directory, verdict.cause.rank)
        return failure_block(
            verdict,
            world_size=world_size,
            host=verdict.cause.host or self._record.host,
            started=self._record.started,
            log=str(log) if elsewhere else shorten_path(str(log)),
            attempts=attempts,
        )

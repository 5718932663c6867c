"""What an attempt can lose beside its ranks: the zygote, the keeper, and processes that even SIGKILL does not end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from phalanx.events import Ending
from phalanx.launch.agent.rank_process import RankProcess
from phalanx.launch.process.helper_processes import HelperLost, describe_left
from phalanx.launch.process.zygote_client import ZygoteClient

if TYPE_CHECKING:
    from phalanx.failure.crash_loop import CrashLoop
    from phalanx.failure.root_cause import Verdict


class LossTracker:
    """Those of the running attempt; failures that repeat are counted over all attempts."""

    def __init__(self, zygote: ZygoteClient, say: Callable[[list[str]], None]) -> None:
        self._zygote, self._say = zygote, say
        self._repetition: CrashLoop | None = None
        self.lines: list[str] = []
        """How the zygote or the keeper was lost; empty when neither was."""

    def lose(self, lost: HelperLost, last_words: Iterable[str]) -> None:
        """The zygote or the keeper is gone, or does not answer: all that it has started is ended without it."""
        self.lines = [str(lost), *(f"  {line}" for line in last_words)]
        self._zygote.abort()

    def take_keeper(self) -> None:
        """The ranks have ended; if the keeper had before them, that was the reason."""
        self.lines = [self._zygote.keeper_lost] if self._zygote.keeper_lost else []

    @property
    def has_to_stop(self) -> bool:
        """The ranks have no store any more."""
        return self._zygote.keeper_lost is not None

    @property
    def are_final(self) -> bool:
        """Something of this run still holds its memory, ports and devices, so there can be no other attempt."""
        return bool(self._zygote.left)

    @property
    def may_hold_pipes(self) -> bool:
        """A process that was not found, or not ended, may keep the output of its rank open."""
        return bool(self._zygote.left or (self.lines and self._zygote.has_ended))

    def check(self, *, at_once: bool) -> None:
        for sentence in self._zygote.check_helpers(at_once=at_once):
            self._say([sentence])

    def name_left(self, members: Iterable[RankProcess]) -> None:
        ranks = {member.pid: member.rank for member in members if member.pid is not None}
        for sentence in describe_left(self._zygote.left, ranks):
            self._say([sentence])

    def is_crash_loop(self, verdict: Verdict | None, endings: Sequence[Ending], attempts_left: int) -> bool:
        """Whether it is one more of a kind that another attempt will not heal; if so, that is said."""
        from phalanx.failure.crash_loop import CrashLoop, identity

        self._repetition = self._repetition or CrashLoop()
        if verdict is not None:
            found = self._repetition.add(identity(verdict.cause), verdict.cause.time, endings)
        else:
            updates = max((ending.updates for ending in endings), default=0)
            found = bool(self.lines) and self._repetition.add(("helper", updates), time.time(), endings)
        if found:
            self._say([f"{self._repetition}; the {attempts_left} attempts left are not made"])
        return found

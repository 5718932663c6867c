"""The records in the files of a run directory: run.json, report.json and the agent's events, as `events` names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.events import Ending, Frame
from phalanx.messages import Count, ExitCode, Message, Rank, Record, Seconds, Signal, Text


class RunFile(Record, frozen=True):
    """run.json: what was started, and where."""

    host: str
    started: Seconds
    run_id: str = ""
    command: tuple[str, ...] = ()
    directory: str = ""
    executable: str = ""
    prefix: str = ""
    spec: Any = None
    """The LaunchSpec, for people."""


class HangRecord(Record, frozen=True):
    """The verdict on ranks that stood still."""

    headline: Text
    kind: str = ""
    ranks: tuple[Rank, ...] = ()
    lines: tuple[Text, ...] = ()
    """As it was on the console."""


class Elsewhere(Record, frozen=True):
    """Ranks that called another collective than the cause."""

    called: Frame
    ranks: tuple[Rank, ...]


class Failure(Record, frozen=True):
    """Why an attempt failed."""

    cause: Ending | None = None
    """The rank that is the cause, if it is one."""
    hang: HangRecord | None = None
    """The verdict, if ranks stood still and were ended for it."""
    alike: tuple[Rank, ...] = ()
    victims: tuple[Rank, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


class Restart(Failure, frozen=True, kw_only=True):
    """Why another attempt was begun."""

    attempt: Count
    """The number of the next one."""
    time: Seconds
    reason: Text


class NodeRanks(Record, frozen=True):
    directory: str
    ranks: tuple[Rank, ...]


class ReportFile(Failure, frozen=True, kw_only=True):
    """report.json: how the run ended."""

    exit_code: ExitCode
    seconds: Seconds
    attempts: Count = 1
    started: Seconds = 0.0
    said: tuple[Text, ...] = ()
    """The last lines on the console."""
    restarts: tuple[Restart, ...] = ()
    nodes: Mapping[str, NodeRanks] = {}
    """By host."""
    stragglers: tuple[Mapping[str, Any], ...] = ()
    """Each has ``said``, the line on the console, and what was measured."""
    ranks: tuple[Ending, ...] = ()


class AgentEvent(Message, frozen=True, tag_field="event", forbid_unknown_fields=False):
    """A line of the agent's event file. Those that others read have a record of their own."""

    time: Seconds


class OtherEvent(Record, frozen=True, forbid_unknown_fields=False):
    event: str
    time: Seconds


class RankStarted(AgentEvent, frozen=True, tag="started"):
    rank: Rank
    pid: Count


class RankExited(AgentEvent, frozen=True, tag="exited"):
    rank: Rank
    pid: Count
    exit_code: ExitCode | None
    signal: Signal | None


class Restarting(AgentEvent, frozen=True, tag="restarting"):
    attempt: Count
    cause: Text


class Stalled(AgentEvent, frozen=True, tag="stall"):
    verdict: HangRecord | None
    """None: the ranks make progress again."""


KnownEvent = RankStarted | RankExited | Restarting | Stalled

"""The words for a straggler."""

from __future__ import annotations

from phalanx.watchdog.straggler.conditions import Conditions
from phalanx.watchdog.straggler.straggler_detector import Lag, Straggler


def one_line(straggler: Straggler, host: str, conditions: Conditions | None) -> str:
    """For the console."""
    rank, lag = straggler.rank, straggler.lag
    if straggler.is_over:
        return f"rank {rank} keeps up again: {work(lag)}, for {straggler.steps} steps"
    text = f"rank {rank} is {percent(lag.slower)} slower than the median ({work(lag)}) for {straggler.steps} steps"
    text += f", in {phases(lag)}"
    return f"{text}; on host {host}: {conditions}" if conditions is not None else text


def work(lag: Lag) -> str:
    return f"own work {milliseconds(lag.own)} a step against {milliseconds(lag.usual)}"


def phases(lag: Lag) -> str:
    """``data``, or ``forward and backward``"""
    *most, last = lag.phases or ("no phase more than in others",)
    return f"{', '.join(most)} and {last}" if most else last


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def milliseconds(seconds: float) -> str:
    amount = seconds * 1e3
    return f"{amount:.0f} ms" if amount >= 9.95 else f"{amount:.1f} ms"

"""What a check has to say, and how it is told to people and to programs: `phalanx doctor` speaks so."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "error", "info"]

_COLOURS: dict[str, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "info": "dim"}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what is there, and what to do about it."""

    name: str
    value: str
    verdict: Verdict = "ok"
    """``info`` is for what is neither good nor bad."""
    advice: str = ""
    """The command or setting that helps. A warning and an error have one."""


def show(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """Prints them: JSON, a line each in a file or a pipe, or folded and coloured on a terminal."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _show_on_terminal(findings)
    else:
        print("\n".join(lines(findings)))


def exit_code(findings: Sequence[Finding]) -> int:
    return 1 if any(finding.verdict == "error" for finding in findings) else 0


def lines(findings: Sequence[Finding]) -> list[str]:
    """One for each, never folded, so that a search finds the advice beside the verdict; the counts at the end."""
    width = max(len(finding.name) for finding in findings)
    told = []
    for finding in findings:
        advice = f"; {finding.advice}" if finding.advice else ""
        told.append(f"{_word(finding):<7}  {finding.name:<{width}}  {finding.value}{advice}")
    return [*told, summary(findings)]


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _COLOURS}
    ending = "" if counts["error"] else "; nothing here keeps a run from working"
    return (
        f"{counts['ok']} ok, {_counted(counts['warning'], 'warning')}, {_counted(counts['error'], 'error')}"
        f"{ending if counts['warning'] else ''}"
    )


def in_bytes(count: float) -> str:
    """``512 MiB``, ``23.5 GiB``."""
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB"


def having(there: Sequence[str], missing: Sequence[str]) -> str:
    """``ssh, mpirun; not srun``."""
    return (", ".join(there) or "none") + ("; not " if missing else "") + ", ".join(missing)


def _show_on_terminal(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        value = Text(finding.value)
        if finding.advice:
            value.append(f"\n→ {finding.advice}", style=colour)
        table.add_row(Text(_word(finding), style=colour), finding.name, value)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(summary(findings))


def _word(finding: Finding) -> str:
    return "–" if finding.verdict == "info" else finding.verdict


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"

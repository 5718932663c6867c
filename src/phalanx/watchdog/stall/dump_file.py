"""The text of a stall file: all that is known of the ranks, with every thread of every process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from phalanx.source_lines import LAUNCHER
from phalanx.status.rank_record import RankRecord, Vitals
from phalanx.status.stack_parser import Thread


def dump_lines(records: Sequence[RankRecord], verdict: Sequence[str]) -> str:
    """Returns the content of a stall file."""
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), *verdict, ""]
    for record in records:
        lines += [f"=== rank {record.rank} on {record.host}", *_facts(record), *_stacks(record.threads)]
        for child in record.children:
            lines += [
                f"--- its process {child.vitals.pid}: {child.command}",
                _words(child.vitals),
                *_stacks(child.threads),
            ]
        lines.append("")
    return "\n".join(lines)


def _facts(record: RankRecord) -> Iterator[str]:
    if record.exit_code is not None:
        yield f"ended with exit code {record.exit_code}"
    if record.vitals is not None:
        yield f"pid {record.vitals.pid}, {_words(record.vitals)}"
    page = record.status
    if page is None:
        return
    yield f"last progress {record.quiet:.1f} s ago, phase {page.phase}, epoch {page.epoch}, step {page.step}"
    for group in page.groups:
        yield f"group {group.name}: ranks {', '.join(map(str, group.ranks))}"
    for one in page.collectives:
        peer = f", peer {one.peer}" if one.peer is not None else ""
        place = f", {one.place.file}:{one.place.line} in {one.place.function}" if one.place else ""
        group = f" #{one.number} of group {one.group}" if one.group else ""
        size = f" ({one.size:,} {one.dtype}{peer})" if one.dtype or peer else ""
        yield f"{one.state:>7} {one.op}{group}{size}{place}"


def _words(vitals: Vitals) -> str:
    return (
        f"state {vitals.state}, CPU {vitals.cpu * 100:.0f} %, {vitals.bytes_moved:,.0f} B/s moved, "
        f"{vitals.faults:.0f} faults/s, {vitals.resident >> 20:,} MiB in memory, {vitals.swapped >> 20:,} MiB in swap"
        + (f", in {vitals.waits_in}" if vitals.waits_in not in ("", "0") else "")
    )


def _stacks(threads: Sequence[Thread]) -> Iterator[str]:
    if not threads:
        yield "its stacks are not known"
    for thread in threads:
        yield f"{'main thread' if thread.is_main else 'thread'} {thread.name}".rstrip() + ", innermost first"
        yield from stack_lines(thread)


def stack_lines(thread: Thread) -> Iterator[str]:
    """Yields a stack, innermost first, without the launcher's lines at its outer end."""
    script = max(
        (at for at, line in enumerate(thread.lines, 1) if not line.file.startswith((LAUNCHER, "<string>"))),
        default=None,
    )
    for line in thread.lines[:script]:
        yield f"  {line.file}:{line.line} in {line.function}" + f": {line.source}" * bool(line.source)

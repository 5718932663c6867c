"""The text at the end of a failed run: never more than 15 lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from phalanx.events import Ending, Frame, NativeFrame
from phalanx.failure.root_cause import Verdict, final_report
from phalanx.failure.signal_meaning import explanation, meaning
from phalanx.source_lines import IN_ANOTHER_PROCESS, WIDTH, clip, relevant_frames, shorten_path

_HEIGHT = 15
_SIDES = 3  # lines that are shown when ranks have called different collectives
_PLUMBING = ("libc.", "libc-", "libm.", "ld-linux", "libpthread", "libffi", "libpython", "python", "_ctypes.")


def failure_block(
    verdict: Verdict, *, world_size: int, host: str, started: float, log: str, attempts: int = 1
) -> list[str]:
    """Returns the lines that are printed at the end of a failed run."""
    cause = verdict.cause
    told = [line for sentence in explanation(cause) for line in _folded(f"  {sentence}", 3)][:3]
    # Our own errors end with the next step, so they are shown in full.
    is_ours = cause.error is not None and cause.error.type.startswith("phalanx.") and not told
    lines = _folded(f"rank {cause.rank} failed: {headline(cause)}", 3 if is_ours else 1)
    where = [f"rank {cause.rank} of {world_size}", f"host {host}", f"pid {cause.pid}"]
    is_crash = cause.signal is not None and cause.error is None
    how = f"signal {cause.signal}" if is_crash else f"exit code {cause.status}"
    where.append("stopped by the launcher" if cause.asked and is_crash else how)
    where.append(f"{max(0.0, cause.time - started):.1f} s after the start")
    if attempts > 1:
        where.append(f"attempt {attempts}")
    lines += ["  " + ", ".join(where), *told]
    lines += [clip(f"  at {_place(frame)}") for frame in relevant_frames(cause)]
    lines += [clip(f"  in native code: {frame.symbol} of {frame.library}") for frame in _telling_native(cause)]
    lines += [clip(f"  {_ranks(ranks)} at {_place(frame)}") for frame, ranks in verdict.elsewhere[:_SIDES]]
    ending = []
    if verdict.left_early:
        ending.append(f"  {_ranks(verdict.left_early)} ended normally meanwhile: did the ranks run different steps?")
    if verdict.alike:
        ending.append(f"  {_ranks(verdict.alike)} failed in the same way")
    if verdict.victims:
        ending.append(f"  {_ranks(verdict.victims)} fell with it")
    ending.append(f"  {'traceback and ' if cause.error else ''}output: {log}")
    known = [line for sentence in cause.evidence for line in _folded(f"  {sentence}", 2)]
    lines += known[: max(0, _HEIGHT - len(lines) - len(ending))]
    room = _HEIGHT - len(lines) - len(ending) - 1
    printed = [line for line in cause.tail if not line.startswith("phalanx: ")]  # which says nothing of the failure
    if printed and room > 0:
        lines.append("  the last it printed:")
        lines += [clip(f"    {line}") for line in printed[-room:]]
    lines += ending
    assert len(lines) <= _HEIGHT, "the block must fit on a small screen"
    return lines


def headline(ending: Ending) -> str:
    """Returns the reason in one line: the error of a device, the exception, the signal's meaning, or the exit code."""
    error = ending.error
    if ending.device_error is not None:
        return ending.device_error.headline
    if error is not None:
        if error.type == "SystemExit":
            return f"sys.exit({error.message})"
        message = error.message.strip().splitlines()
        elsewhere = IN_ANOTHER_PROCESS.match(error.message)
        if elsewhere is not None and len(message) > 1:  # torch has put a whole traceback into the message
            return f"{message[-1]} (in {elsewhere['where']})"
        return f"{error.type}: {message[0]}" if message else error.type
    if ending.signal is not None:
        return meaning(ending)
    return final_report(ending) or f"exit code {ending.exit_code}, without an exception"


def one_line(ending: Ending) -> str:
    """Describes a failure on the line that announces a restart."""
    frames = relevant_frames(ending)
    where = f" at {shorten_path(frames[-1].file)}:{frames[-1].line}" if frames else ""
    return clip(f"rank {ending.rank} failed: {headline(ending)}{where}")


def _telling_native(ending: Ending) -> list[NativeFrame]:
    """Returns the innermost native calls that are neither the C library's nor the interpreter's."""
    return [frame for frame in ending.native if not Path(frame.library).name.startswith(_PLUMBING)][:3]


def _place(frame: Frame) -> str:
    source = f": {frame.source}" if frame.source else ""
    function = f" in {frame.function}" if frame.function != "<module>" else ""
    return f"{shorten_path(frame.file)}:{frame.line}{function}{source}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} other ranks"
    return f"ranks {', '.join(map(str, ranks))}"


def _folded(text: str, most: int) -> list[str]:
    """Wraps a text to at most so many lines; the last one is cut off if it is too long."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    if len(lines) > most:
        lines[most - 1 :] = [" ".join([lines[most - 1], *map(str.lstrip, lines[most:])])]
    return [*map(clip, lines)]

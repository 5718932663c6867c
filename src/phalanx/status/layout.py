"""The layout of a status page: fixed and versioned, so that every process can read it at any time.

A page is 2,560 words of eight bytes, written without locks and without system calls, and it may be read during a write.
So a record that changes begins and ends with the same number, written first and last, and a reader takes only a record
where both are equal and that is the same in a second read.

| word | content                                                                           |
| ---- | --------------------------------------------------------------------------------- |
| 0    | magic, version, pid, rank, world size, start, the start in the kernel's ticks     |
| 8    | the loop: phase and its start, epoch, step, samples, optimizer steps, heartbeat   |
| 17   | the step of the last checkpoint that px.Checkpointer has saved or loaded          |
| 18   | the store that it is connecting to, as host:port; empty otherwise                 |
| 24   | seconds in each phase so far, and in collectives that we record ourselves         |
| 40   | asked, answered: a reader raises the first, and the rank then sets the second     |
| 44   | asked, answered: the same for the stacks of all threads                           |
| 46   | seconds of each phase in which the loop waited for ranks; start of the wait now   |
| 58   | its device: timed steps, seconds of own work, of waiting, for data; its state     |
| 64   | groups: name, ranks, last enqueued and completed collective (flight recorder)     |
| 384  | ring of the collectives that we record ourselves                                  |
| 768  | places: lines of the user's code, to which collectives refer by number            |
| 1792 | the latest collectives of torch's flight recorder                                 |
| 1984 | windows of ten steps: own work in each phase                                      |
| 2064 | the agreement on the step at which all ranks stop (preemption/words.py), saves    |
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

MAGIC = b"phx-stat"
VERSION = 6
WORD = 8
PAGE_WORDS = 2560
PAGE_BYTES = PAGE_WORDS * WORD

LOOP, LOOP_RECORD = 8, Struct("@QQQQQQQdQ")
"""A number, the phase, the number of writes, epoch, step, samples, optimizer steps, start of the phase, the number."""
CHECKPOINT_STEP = 17
STOP, LONGEST_SAVE = 2064, 2088
"""The second is in milliseconds."""
CONNECTING, CONNECTING_BYTES = 18, 48
SECONDS = 24
ASKED, STACKS_ASKED = 40, 44
"""The answer is the next word."""
GROUP, GROUPS, GROUP_WORDS = 64, 16, 20
NAME_BYTES, RANKS_BYTES = 24, 96
GROUP_RECORD = Struct(f"@QQ{NAME_BYTES}s{RANKS_BYTES}sQQQ")
"""A number, the group's number in this page, its name, the ranks, last enqueued, last completed, the number. The first
group, which has all ranks, keeps its slot; the others share the rest, and the latest are kept."""
RING, RING_ENTRIES = 384, 32
ENTRY_WORDS, ENTRY_RECORD = 12, Struct("@QQQQQQdddQ")
"""A collective: a number, kind, number in its group, size, peer, place, time queued, started, ended, the number."""
PLACE, PLACES, PLACE_WORDS = 768, 32, 32
"""A place is the length of a text, and the text: line, function, file, with a zero between them."""
FLIGHT, FLIGHT_ENTRIES = 1792, 16
WINDOW, WINDOWS, WINDOW_STEPS = 1984, 7, 10
WINDOW_WORDS, WINDOW_RECORD = 11, Struct("@QQddddddddQ")
"""A number, the optimizer step at its end, seconds of own work in each phase of OWN, the number."""
DEVICE_STEPS, DEVICE_SECONDS, DEVICE_TIMES, DEVICE_STATE = 58, 59, Struct("@ddd"), 62
DEVICE_STATES = ("", "unknown", "idle", "busy", "waits")
"""None; not known; it has finished everything; it has not come to the end of its own work; it waits for others."""
NO_DEVICE, UNKNOWN, IDLE, BUSY, WAITS = range(len(DEVICE_STATES))

PHASES = (
    *("started", "joining", "data", "forward", "backward", "optimizer", "checkpoint", "other", "done", "compile"),
    "device work",
)
STARTED, JOINING, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, OTHER, DONE, COMPILE, DEVICE = range(len(PHASES))
OWN = DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, OTHER, COMPILE, DEVICE
"""The phases of a loop. On a device, its own clock counts for the first and the last, and the others are zero."""
BLOCKED = 46
BLOCKED_SINCE = BLOCKED + len(PHASES)
WAITED = SECONDS + len(PHASES)
"""Seconds in collectives that we record ourselves."""

OPERATIONS = (
    *("collective", "all_reduce", "broadcast", "reduce", "barrier", "monitored_barrier", "all_gather", "gather"),
    *("scatter", "reduce_scatter", "all_to_all", "send", "recv", "init_process_group", "rank_zero_first"),
    "TCPStore",
)
"""The first stands for every operation that has no name here."""
COLLECTIVE, ALL_REDUCE, BROADCAST, REDUCE, BARRIER, MONITORED_BARRIER, ALL_GATHER, GATHER = range(8)
SCATTER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECV, INIT_PROCESS_GROUP, RANK_ZERO_FIRST, STORE = range(8, len(OPERATIONS))
DTYPES = (
    *("", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "other"),
)
NO_PLACE = NO_PEER = 0xFFFF
NO_GROUP = 0xFFFFFF
STACK_SIGNAL = int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else 0  # there is none without real-time signals
"""Makes a rank write the Python stack of its main thread to `stacks_path`, whatever it is blocked in."""


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (0, 3), (6, 6) for 0, 1, 2, 3, 6."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def those(ranks: Sequence[int]) -> str:
    """Returns ``rank 1``, ``ranks 0, 2-7``; of very many only some."""
    parts = []
    for first, last in runs_of(ranks):
        parts += (
            [str(first)] if first == last else [str(first), str(last)] if last == first + 1 else [f"{first}-{last}"]
        )
    if len(parts) > 8:
        return f"{len(ranks)} ranks ({', '.join(parts[:7])}, …)"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def kind_of(group: int, op: int, dtype: int) -> int:
    """Returns the second word of a collective. The lowest byte is 1 when it has failed."""
    return group << 24 | op << 16 | dtype << 8


def status_path(run_directory: Path, rank: int) -> Path:
    return run_directory / f"rank-{rank}.status"


def stacks_path(run_directory: Path, rank: int) -> Path:
    """The file to which a rank writes its Python stacks."""
    return run_directory / f"rank-{rank}.stacks"

"""Reads torch's flight recorder on a thread of each rank, while the rank trains or hangs.

The progress of each group is cheap to read, and is read ten times a second. The collectives, with the lines that called
them, take milliseconds; they are written on request, when the rank has been in one for a second, and when it fails.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from phalanx import torch_compat
from phalanx.recorder.around import around
from phalanx.status import layout, own_page
from phalanx.status.page import StatusPage
from phalanx.torch_compat import c10d, flight_recorder

_LOOK_EVERY = 0.1
"""Seconds. A look takes a quarter of a millisecond of the process."""
_STUCK_SECONDS = 1.0
_TRIES = 100
_DTYPES = (
    *("", "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("ComplexFloat", "ComplexDouble"),
)
"""torch's names, in the order of layout.DTYPES."""
_reader: FlightReader | None = None

Entry: TypeAlias = dict[str, Any]
"""A collective, as torch's flight recorder gives it."""
Progress: TypeAlias = dict[str, tuple[int, int]]
"""The last enqueued and the last completed collective of each group, by torch's number of the group."""


def install() -> None:
    """Starts the thread with the first process group: before that, a script may want to fork."""
    if not is_recording():
        return
    c10d.NEW_GROUP.wrap(around(lambda page, *_, **__: begin()))
    os.register_at_fork(after_in_child=_forget)
    own_page.before_failing(lambda: _reader.write_collectives() if _reader is not None else None)


def is_recording() -> bool:
    """True if torch records collectives: older versions do so only when asked to, and it can be turned off."""
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    default = "" if torch_compat.release() >= torch_compat.FLIGHT_RECORDER_IS_ON else "0"
    return bool(flight_recorder.dumps()) and next((size for size in sizes if size is not None), default) != "0"


def begin() -> None:
    global _reader
    page = own_page.current()
    if page is not None and _reader is None:
        _reader = FlightReader(page)
        threading.Thread(target=_reader.run, name="phalanx-recorder", daemon=True).start()


def _forget() -> None:
    global _reader
    _reader = None


@dataclass
class FlightReader:
    """Copies torch's records into the status page."""

    page: StatusPage
    names: dict[str, str | None] = field(default_factory=dict)
    """The names of the groups, by torch's number; None for a group that is not the script's."""
    seen: Progress = field(default_factory=dict)
    changed_at: float = 0.0
    is_written: bool = False
    """True if the collectives in the page are up to date."""

    def run(self) -> None:
        has_complained = False
        while True:
            time.sleep(_LOOK_EVERY)
            if own_page.current() is not self.page:
                continue
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 (without this thread, a rank that makes progress would seem to hang)
                if not has_complained:
                    has_complained = True
                    what = f"{type(error).__name__}: {error}"
                    print(f"phalanx: what this rank does could not be recorded ({what}); trying again", file=sys.stderr)

    def look(self) -> None:
        """Writes the progress of each group, and answers requests."""
        now = group_progress()
        if now != self.seen:
            self._write_progress(now)
        is_running = any(
            enqueued > completed for number, (enqueued, completed) in now.items() if self.names.get(number)
        )
        if self.page.is_asked(layout.STACKS_ASKED):
            own_page.write_stacks()
            self.page.answer(layout.STACKS_ASKED)
        is_stuck = is_running and not self.is_written and time.monotonic() - self.changed_at > _STUCK_SECONDS
        if is_stuck or self.page.is_asked(layout.ASKED):
            self.write_collectives()
            self.page.answer(layout.ASKED)

    def _write_progress(self, now: Progress) -> None:
        self.seen, self.changed_at = now, time.monotonic()
        if not now.keys() <= self.names.keys():
            self._read_names()
        for number, (enqueued, completed) in now.items():
            name = self.names.get(number)
            if name:
                self.page.group(name, ranks_of(name), enqueued, completed)
        if self.is_written:
            self.is_written = False
            self.page.clear_flights()

    def _read_names(self) -> None:
        """Finds the names of new groups, which torch gives only with their collectives."""
        script = {name for group, name in _groups() if not records_itself(group)}
        for entry in entries():
            name = entry["process_group"][0]
            self.names[str(entry["pg_id"])] = name if name in script else None

    def write_collectives(self) -> None:
        known = [entry for entry in entries(stacks=True) if self.names.get(str(entry["pg_id"]))]
        latest = known[-layout.FLIGHT_ENTRIES :]
        for index, entry in enumerate(latest):
            self._write(index, entry)
        self.page.clear_flights(len(latest))
        self.is_written = True

    def _write(self, index: int, entry: Entry) -> None:
        name = entry["process_group"][0]
        group = self.page.group(name, ranks_of(name), *self.seen.get(str(entry["pg_id"]), (0, 0)))
        created = entry["time_created_ns"] / 1e9
        ended = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) / 1e9 if entry["retired"] else 0.0
        sizes = entry["input_sizes"] or entry["output_sizes"]
        dtypes = entry["input_dtypes"] or entry["output_dtypes"]
        dtype = dtypes[0] if dtypes and sizes else ""
        dtype_number = _DTYPES.index(dtype) if dtype in _DTYPES else layout.DTYPES.index("other")
        kind = layout.kind_of(group, operation(entry["profiling_name"]), dtype_number)
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        line = self._line(entry.get("frames") or ())
        self.page.write_flight(index, kind, number, sum(map(math.prod, sizes)), created, ended, line)

    def _line(self, frames: Iterable[Entry]) -> tuple[str, int, str] | None:
        """Returns the innermost line of the user's; without one, the innermost line of a library."""
        found = None
        for frame in frames:
            side = self.page.places.side(frame["filename"])
            if side == 2 or (side == 1 and found is None):
                found = frame["filename"], frame["line"], frame["name"]
            if side == 2:
                break
        return found


def group_progress() -> Progress:
    """Reads the progress of each group. A group with two backends counts both."""
    found: Progress = {}
    for dump in flight_recorder.dumps():
        groups = json.loads(dump.progress(False, False)).get("pg_status", {})
        for number, of in groups.items():
            enqueued, completed = found.get(number, (0, 0))
            enqueued += max(int(of["last_enqueued_collective"]), 0)
            found[number] = enqueued, completed + max(int(of["last_completed_collective"]), 0)
    return found


def entries(stacks: bool = False) -> list[Entry]:
    """Reads the flight recorder's collectives, oldest first."""
    with flight_recorder.without_compiler():
        dumps = [dump.trace(True, stacks, False) for dump in flight_recorder.dumps()]
    found = [entry for dump in dumps for entry in pickle.loads(dump).get("entries", [])]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def records_itself(group: object) -> bool:
    """True for a group of shm, which writes its collectives itself; the script has not called those of its gloo."""
    return hasattr(group, "seconds_in_collectives")


def ranks_of(name: str) -> list[int]:
    for group, known in _groups():
        if known == name:
            return sorted(c10d.WORLD.get().pg_group_ranks.get(group, {}))
    return []


def _groups() -> list[tuple[dist.ProcessGroup, str]]:
    """Returns all groups with their names. The script may be creating one at this moment."""
    world = c10d.WORLD.get()
    if world is None:
        return []
    for _ in range(_TRIES):
        try:
            return list(world.pg_names.items())
        except RuntimeError:  # the dictionary has changed meanwhile
            continue
    return []


def operation(profiling_name: str) -> int:
    """Returns the number of ``gloo:all_reduce``, ``nccl:_all_gather_base`` and the like."""
    name = profiling_name.rpartition(":")[2].strip("_").removesuffix("_base").removesuffix("_coalesced")
    name = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)
    first = name.split(" ")[0]  # nccl adds the peer to send and recv
    return layout.OPERATIONS.index(first) if first in layout.OPERATIONS else layout.COLLECTIVE

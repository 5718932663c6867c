"""Torch's flight recorder, read by a thread of each rank while it trains or hangs.

A look at how far each group has come costs little, and is made ten times a second. The collectives themselves, with
the lines that asked for them, take milliseconds; they are written when somebody asks for them, when the rank has been
in one for a second, and when it fails.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx import status, torch_compat
from phalanx.status import layout
from phalanx.status.page import Flight, StatusPage
from phalanx.torch_compat import c10d, flight_recorder

_LOOK_EVERY = 0.1
"""Seconds. A look takes a quarter of a millisecond of a process that is busy with other things."""
_STUCK_SECONDS = 1.0
_TRIES = 100
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_reader: Reader | None = None


def install() -> None:
    """The thread begins with the first process group: before, a script may want to fork."""
    if not is_there():
        return
    c10d.NEW_GROUP.wrap(_beginning)
    os.register_at_fork(after_in_child=_forget)
    status.when_failing(write_now)


def _beginning(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        begin()
        return plain(*args, **kwargs)

    return new_process_group_helper


def is_there() -> bool:
    """Whether it records anything: in older versions of torch it has to be turned on, and it can be turned off."""
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    default = "" if torch_compat.release() >= torch_compat.FLIGHT_RECORDER_IS_ON else "0"
    return bool(flight_recorder.dumps()) and next((size for size in sizes if size is not None), default) != "0"


def begin() -> None:
    global _reader
    page = status.own()
    if page is not None and _reader is None:
        _reader = Reader(page)
        threading.Thread(target=_reader.live, name="phalanx-recorder", daemon=True).start()


def write_now() -> None:
    """This rank is about to end: its last collectives, for those who read the page afterwards."""
    if _reader is not None:
        _reader.write_collectives()


def _forget() -> None:
    global _reader
    _reader = None


@dataclass
class Reader:
    """From torch's records to the page's."""

    page: StatusPage
    names: dict[str, str | None] = field(default_factory=dict)
    """Of the groups, by torch's number; None for those that are not the script's."""
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Last enqueued and completed, by the same number."""
    changed_at: float = 0.0
    is_written: bool = False
    """The collectives in the page are those of now."""

    def live(self) -> None:
        has_complained = False
        while True:
            time.sleep(_LOOK_EVERY)
            if status.own() is not self.page:
                continue
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 (without this thread, a rank that gets on would look as if it hung)
                if not has_complained:
                    has_complained = True
                    what = f"{type(error).__name__}: {error}"
                    print(f"phalanx: what this rank does could not be recorded ({what}); trying again", file=sys.stderr)

    def look(self) -> None:
        """Notices how far each group has come."""
        now = how_far()
        if now != self.seen:
            self._note(now)
        is_running = any(
            enqueued > completed for number, (enqueued, completed) in now.items() if self.names.get(number)
        )
        if self.page.are_stacks_asked():
            status.write_stacks()
            self.page.answer_stacks()
        is_stuck = is_running and not self.is_written and time.monotonic() - self.changed_at > _STUCK_SECONDS
        if is_stuck or self.page.is_asked():
            self.write_collectives()
            self.page.answer()

    def _note(self, now: dict[str, tuple[int, int]]) -> None:
        self.seen, self.changed_at = now, time.monotonic()
        if not now.keys() <= self.names.keys():
            self._learn_names()
        for number, (enqueued, completed) in now.items():
            name = self.names.get(number)
            if name:
                self.page.group(name, ranks_of(name), enqueued, completed)
        if self.is_written:
            self.is_written = False
            for index in range(layout.FLIGHT_ENTRIES):
                self.page.fly(index, None)

    def _learn_names(self) -> None:
        """Of new groups; torch tells them only with their collectives."""
        script = {name for group, name in _names() if not is_noted_elsewhere(group)}
        for entry in entries():
            name = entry["process_group"][0]
            self.names[str(entry["pg_id"])] = name if name in script else None

    def write_collectives(self) -> None:
        latest = [entry for entry in entries(stacks=True) if self.names.get(str(entry["pg_id"]))]
        latest = latest[-layout.FLIGHT_ENTRIES :]
        for index in range(layout.FLIGHT_ENTRIES):
            self.page.fly(index, self._flight(latest[index]) if index < len(latest) else None)
        self.is_written = True

    def _flight(self, entry: dict[str, Any]) -> Flight:
        name = entry["process_group"][0]
        enqueued, completed = self.seen.get(str(entry["pg_id"]), (0, 0))
        group = self.page.group(name, ranks_of(name), enqueued, completed)
        created = entry["time_created_ns"] / 1e9
        ended = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) / 1e9 if entry["retired"] else 0.0
        sizes = entry["input_sizes"] or entry["output_sizes"]
        dtypes = entry["input_dtypes"] or entry["output_dtypes"]
        size = sum(_product(shape) for shape in sizes)
        dtype = _DTYPES.get(dtypes[0], "other") if dtypes and sizes else ""
        kind = layout.kind_of(group, operation(entry["profiling_name"]), layout.DTYPES.index(dtype))
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        return Flight(kind, number, size, created, created, ended, self._place(entry.get("frames") or ()))

    def _place(self, frames: Any) -> tuple[str, int, str] | None:
        found = None
        for frame in frames:
            side = self.page.places.side(frame["filename"])
            if side == 2 or (side == 1 and found is None):
                found = frame["filename"], frame["line"], frame["name"]
            if side == 2:
                break
        return found


def how_far() -> dict[str, tuple[int, int]]:
    """Each group's last enqueued and last completed collective, by torch's number. One of two backends has both."""
    found: dict[str, tuple[int, int]] = {}
    for dump in flight_recorder.dumps():
        groups = json.loads(dump.progress(False, False)).get("pg_status", {})
        for number, of in groups.items():
            enqueued, completed = found.get(number, (0, 0))
            enqueued += max(int(of["last_enqueued_collective"]), 0)
            found[number] = enqueued, completed + max(int(of["last_completed_collective"]), 0)
    return found


def entries(stacks: bool = False) -> list[dict[str, Any]]:
    """The flight recorder's, oldest first."""
    with flight_recorder.without_compiler():
        dumps = [dump.trace(True, stacks, False) for dump in flight_recorder.dumps()]
    found = [entry for dump in dumps for entry in pickle.loads(dump).get("entries", [])]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def is_noted_elsewhere(group: Any) -> bool:
    """Whether its own backend does it; gloo inside of that one is not what the script has asked for."""
    return hasattr(group, "seconds_in_collectives")


def ranks_of(name: str) -> list[int]:
    for group, known in _names():
        if known == name:
            return sorted(c10d.WORLD.get().pg_group_ranks.get(group, {}))
    return []


def _names() -> list[tuple[Any, str]]:
    """Of all groups. The script may be making one just now."""
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
    """``gloo:all_reduce``, ``nccl:_all_gather_base`` and the like."""
    name = profiling_name.rpartition(":")[2].strip("_").removesuffix("_base").removesuffix("_coalesced")
    name = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)
    first = name.split(" ")[0]  # nccl's send and recv say to whom
    return layout.OPERATIONS.index(first) if first in layout.OPERATIONS else layout.COLLECTIVE


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size

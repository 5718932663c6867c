"""Reads torch's flight recorder on a thread of each rank, while the rank trains or hangs.

The progress of each group is cheap to read, and is read ten times a second. The collectives, with the lines that called
them, take milliseconds; they are written on request, when the rank has been in one for a second, and when it fails.
Those of nccl only on request and when it fails: reading them asks the device for its events.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from phalanx import torch_compat
from phalanx.devices import accelerator
from phalanx.recorder import device_clock, phases
from phalanx.recorder.around import around, never_raises
from phalanx.status import layout, own_page
from phalanx.status.page import StatusPage
from phalanx.torch_compat import c10d, dynamo, flight_recorder

_LOOK_EVERY = 0.1
"""Seconds. A look takes a quarter of a millisecond of the process."""
_STUCK_SECONDS = 1.0
_SECOND = f":{flight_recorder.NCCL}"  # behind the name of a group that uses gloo too
_BUFFER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_DTYPES = (
    *("", "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("ComplexFloat", "ComplexDouble"),
)
"""torch's names, in the order of layout.DTYPES."""
_reader: FlightReader | None = None

Entry: TypeAlias = dict[str, Any]
"""A collective, as torch's flight recorder gives it."""
Key: TypeAlias = tuple[str, int]
"""The backend and torch's number of a group: every backend counts its groups from 0."""
Progress: TypeAlias = dict[Key, tuple[int, int]]
"""The last enqueued and the last completed collective of each group."""


def install() -> None:
    """Starts the thread with the first process group: before that, a script may want to fork."""
    has_nccl = any(dump.backend == flight_recorder.NCCL for dump in flight_recorder.dumps())
    if has_nccl and torch_compat.release() < torch_compat.FLIGHT_RECORDER_IS_ON:  # these record only if asked to
        own_page.when_begun(lambda page: os.environ.setdefault(_BUFFER_SIZE, "2000"))
    if not is_recording():
        return
    c10d.NEW_GROUP.wrap(around(lambda page, *_, **__: begin()))
    os.register_at_fork(after_in_child=_forget)
    own_page.before_failing(lambda: _reader.write_collectives() if _reader is not None else None)


def is_recording() -> bool:
    """True if torch records collectives: it can be turned off."""
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", _BUFFER_SIZE)]
    return bool(flight_recorder.dumps()) and next((size for size in sizes if size is not None), "") != "0"


def begin() -> None:
    global _reader
    page = own_page.current()
    if page is not None and _reader is None:
        _reader = FlightReader(page)
        threading.Thread(target=_reader.run, name="phalanx-recorder", daemon=True).start()
    device_clock.device = accelerator.current(None)


def _forget() -> None:
    global _reader
    _reader = None


@dataclass
class FlightReader:
    """Copies torch's records into the status page."""

    page: StatusPage
    names: dict[Key, str | None] = field(default_factory=dict)
    """The names of the groups; None for a group that is not the script's."""
    hears_compiler: bool = False
    seen: Progress = field(default_factory=dict)
    changed_at: float = 0.0
    is_written: bool = False
    """True if the collectives in the page are up to date."""

    def run(self) -> None:
        look = never_raises(self.look)  # without this thread, a rank that makes progress would seem to hang
        while True:
            if own_page.current() is self.page:
                look()
            time.sleep(_LOOK_EVERY)

    def look(self) -> None:
        """Writes the progress of each group, and answers requests."""
        now = group_progress()
        if now != self.seen:
            self._write_progress(now)
        is_running = any(enqueued > completed for key, (enqueued, completed) in now.items() if self.names.get(key))
        if self.page.is_asked(layout.STACKS_ASKED):
            own_page.write_stacks()
            self.page.answer(layout.STACKS_ASKED)
        self.hears_compiler = self.hears_compiler or dynamo.when_compiling(phases.compiling, phases.compiled)
        if is_running and not self.is_written and time.monotonic() - self.changed_at > _STUCK_SECONDS:
            self.write_collectives(with_nccl=False)
        if self.page.is_asked(layout.ASKED):
            can_ask = self._set_device()
            self.write_collectives(with_nccl=can_ask)
            if can_ask:
                self._write_device()
            self.page.answer(layout.ASKED)

    def _set_device(self) -> bool:
        """Makes the loop's device current in this thread: events would else use the first GPU. False: use no events."""
        clock = device_clock.clock
        device = device_clock.device if clock is None else clock.device
        if accelerator.serves(device) and not (clock is not None and clock.is_capturing):
            with contextlib.suppress(RuntimeError):  # of a device that has failed: the script will meet it too
                accelerator.module(device).set_device(device)
                return True
        return False

    def _write_device(self) -> None:
        if device_clock.clock is not None:
            device_clock.clock.answer()
        if os.environ.get("TORCH_NCCL_ENABLE_TIMING", "0") in ("1", "true"):  # only then a started one waits for others
            states = [entry["state"] for entry in entries() if entry["key"][0] == "nccl" and not entry["retired"]]
            if states:
                self.page.device_is(layout.WAITS if states[0] == "started" else layout.BUSY)

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
        """Finds the names of new groups, which torch gives only with their collectives, and for nccl with a number."""
        script = {name: group for group, name in _groups() if not records_itself(group)}
        for name, group in script.items():
            number = c10d.nccl_number(group)
            if number is not None:
                self.names[flight_recorder.NCCL, number] = name + _SECOND * c10d.uses_gloo(group)
        for entry in entries(with_nccl=False):
            name = entry["process_group"][0]
            self.names[entry["key"]] = name if name in script else None

    def write_collectives(self, with_nccl: bool = True) -> None:
        known = [entry for entry in entries(stacks=True, with_nccl=with_nccl) if self.names.get(entry["key"])]
        latest = known[-layout.FLIGHT_ENTRIES :]
        for index, entry in enumerate(latest):
            self._write(index, entry)
        self.page.clear_flights(len(latest))
        self.is_written = True

    def _write(self, index: int, entry: Entry) -> None:
        name = self.names[entry["key"]] or ""
        group = self.page.group(name, ranks_of(name), *self.seen.get(entry["key"], (0, 0)))
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
        sides = [(self.page.places.side(frame["filename"]), frame) for frame in frames]
        side, frame = max(sides, key=lambda pair: pair[0], default=(0, {}))
        return (frame["filename"], frame["line"], frame["name"]) if side else None


def group_progress() -> Progress:
    """Reads the progress of each group. A group with two backends is two."""
    found: Progress = {}
    for dump in flight_recorder.dumps():
        groups = json.loads(dump.progress(False, False)).get("pg_status", {})
        for number, of in groups.items():
            enqueued, completed = (max(int(of[f"last_{what}_collective"]), 0) for what in ("enqueued", "completed"))
            found[dump.backend, int(number)] = enqueued, completed
    return found


def entries(stacks: bool = False, with_nccl: bool = True) -> list[Entry]:
    """Reads the flight recorder's collectives, oldest first. Those of nccl only on a thread with the right device."""
    dumps = [dump for dump in flight_recorder.dumps() if with_nccl or dump.backend != flight_recorder.NCCL]
    with flight_recorder.without_compiler():
        traces = [(dump.backend, dump.trace(True, stacks, False)) for dump in dumps]
    found = [
        {**entry, "key": (backend, entry["pg_id"])}
        for backend, trace in traces
        for entry in pickle.loads(trace).get("entries", [])
    ]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def records_itself(group: object) -> bool:
    """True for a group of shm, which writes its collectives itself; the script has not called those of its gloo."""
    return hasattr(group, "seconds_in_collectives")


def ranks_of(name: str) -> list[int]:
    found = [group for group, known in _groups() if known == name.removesuffix(_SECOND)]
    return sorted(c10d.WORLD.get().pg_group_ranks.get(found[0], {})) if found else []


def _groups() -> list[tuple[dist.ProcessGroup, str]]:
    """Returns all groups with their names. A script may be creating one just now, so they are copied in one step."""
    world = c10d.WORLD.get()
    return [] if world is None else list(world.pg_names.copy().items())


def operation(profiling_name: str) -> int:
    """Returns the number of ``gloo:all_reduce``, ``nccl:_all_gather_base`` and the like."""
    name = profiling_name.rpartition(":")[2].strip("_").removesuffix("_base").removesuffix("_coalesced")
    name = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)
    first = name.split(" ")[0]  # nccl adds the peer to send and recv
    return layout.OPERATIONS.index(first) if first in layout.OPERATIONS else layout.COLLECTIVE

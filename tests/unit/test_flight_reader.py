"""Torch's flight recorder as we read it: nccl's beside gloo's, groups that are being made, and looks that fail."""

from __future__ import annotations

import functools
import gc
import json
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx import torch_compat
from phalanx.devices import accelerator
from phalanx.recorder import device_clock, flight_reader, phases, waits
from phalanx.recorder.around import around
from phalanx.status import layout, own_page, reading
from phalanx.status.page import StatusPage
from phalanx.torch_compat import c10d as compat_c10d
from phalanx.torch_compat import flight_recorder


def recorders(*found: dict[str, tuple[int, int]], traces: Sequence[Sequence[dict[str, Any]]] = ()) -> Any:
    """What torch has: a dump of gloo's and one of nccl's, with how far each group has come, and their collectives."""

    def dump_json(found: dict[str, tuple[int, int]]) -> str:
        fields = {
            number: {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
            for number, (enqueued, completed) in found.items()
        }
        return json.dumps({"pg_status": fields})

    dumps = []
    for order, groups in enumerate(found):
        few = [{"pg_id": 0, "time_created_ns": 10 * number - order} for number in (1, 2)]
        entries = traces[order] if traces else few
        trace = functools.partial(lambda entries, *_: pickle.dumps({"entries": entries}), entries)
        progress = functools.partial(lambda groups, *_: dump_json(groups), groups)
        dumps.append(flight_recorder.Dump(("gloo", "nccl")[order], progress, trace))
    return lambda: dumps


@pytest.fixture
def _with_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has one. Pytest would keep what a fixture gives for too long, so it is had from `current_page`."""
    monkeypatch.setattr(own_page, "_own", StatusPage(tmp_path / "rank-0.status"))
    yield
    monkeypatch.undo()
    gc.collect()  # the traceback of what was raised on purpose holds it


def current_page() -> StatusPage:
    found = own_page.current()
    assert found is not None
    return found


def test_nccl_has_a_recorder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    both = recorders({"0": (5, 4), "1": (-1, -1)}, {"0": (7, 7), "2": (3, 1)})
    monkeypatch.setattr(flight_recorder, "dumps", both)
    gloo, nccl = {("gloo", 0): (5, 4), ("gloo", 1): (0, 0)}, {("nccl", 0): (7, 7), ("nccl", 2): (3, 1)}
    assert flight_reader.group_progress() == {**gloo, **nccl}
    assert [entry["time_created_ns"] for entry in flight_reader.entries()] == [9, 10, 19, 20]
    monkeypatch.setattr(flight_recorder, "dumps", recorders({"0": (7, 7)}))
    assert flight_reader.is_recording()
    assert flight_reader.group_progress() == {("gloo", 0): (7, 7)}


def collective(op: str, number: int, created: int, group: str = "0", **more: Any) -> dict[str, Any]:
    """An entry of torch's flight recorder."""
    known = {"pg_id": 0, "process_group": (group, "default_pg"), "collective_seq_id": number, "profiling_name": op}
    known |= {"is_p2p": False, "retired": True, "state": "scheduled", "time_created_ns": created * 10**9}
    known |= {"time_discovered_completed_ns": None, "input_sizes": [[4]], "input_dtypes": ["Float"], "frames": []}
    return {**known, "output_sizes": [[4]], "output_dtypes": ["Float"], **more}


class Group:
    """A process group with gloo for the CPU, and nccl."""

    _device_types = ("cpu", "cuda")

    def _get_backend(self, device: str) -> object:
        return SimpleNamespace(uid=0) if device == "cuda" else object()


@pytest.fixture
def _with_two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with gloo and nccl: both count their groups from 0, and both have come to a collective 44."""
    group = Group()
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_names={group: "0"}, pg_group_ranks={group: {0: 0, 1: 1}}))
    monkeypatch.setattr(compat_c10d, "uses_gloo", lambda group: True)
    gathers = [collective("gloo:all_gather", number, number) for number in (43, 44)]
    reduces = [collective("nccl:all_reduce", number, 50 + number, retired=number < 44) for number in (43, 44)]
    both = recorders({"0": (44, 44)}, {"0": (44, 43)}, traces=(gathers, reduces))
    monkeypatch.setattr(flight_recorder, "dumps", both)


@pytest.mark.usefixtures("_with_page", "_with_two_backends")
def test_groups_of_two_recorders_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevices(monkeypatch, torch.device("cuda", 0))
    reader = flight_reader.FlightReader(current_page())
    current_page()._words[layout.ASKED] += 1
    reader.look()
    page = reading.read(tmp_path / "rank-0.status")
    assert page is not None
    assert {(group.name, group.ranks, group.enqueued, group.completed) for group in page.groups} == {
        ("0", (0, 1), 44, 44),
        ("0:nccl", (0, 1), 44, 43),
    }
    assert [(one.group, one.op, one.number, one.is_open) for one in page.collectives] == [
        ("0", "all_gather", 43, False),
        ("0", "all_gather", 44, False),
        ("0:nccl", "all_reduce", 43, False),
        ("0:nccl", "all_reduce", 44, True),
    ]


class FakeDevices:
    """Counts what is asked of torch.cuda and of nccl's recorder, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(device_clock, "device", device)
        monkeypatch.setattr(accelerator, "module", lambda device: self)
        dumps = flight_recorder.dumps()
        traced = [dump._replace(trace=functools.partial(self._trace, dump)) for dump in dumps]
        monkeypatch.setattr(flight_recorder, "dumps", lambda: traced)

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set_device {device}")

    def _trace(self, dump: flight_recorder.Dump, *arguments: bool) -> bytes:
        if dump.backend == "nccl":
            self.calls.append("trace")
        return dump.trace(*arguments)


@pytest.mark.usefixtures("_with_page", "_with_two_backends")
def test_nccl_is_read_on_request_and_with_the_device_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a thread on another device, its events would create a context on the first GPU."""
    devices = FakeDevices(monkeypatch, torch.device("cpu"))
    reader = flight_reader.FlightReader(current_page())
    current_page()._words[layout.ASKED] += 1
    reader.look()
    assert devices.calls == []  # as long as the device is not known
    assert not current_page().is_asked(layout.ASKED)
    loss: Any = SimpleNamespace(device=torch.device("cuda", 3))
    around(phases._backward)(lambda _: None)(loss)  # the script has set it after its groups were made
    monkeypatch.setattr(flight_reader, "_STUCK_SECONDS", -1.0)
    reader.look()
    assert devices.calls == []  # neither for names nor because it has been in one for long
    current_page()._words[layout.ASKED] += 1
    reader.look()
    assert devices.calls == ["set_device cuda:3", "trace"]
    monkeypatch.setattr(device_clock, "clock", SimpleNamespace(device=torch.device("cuda", 3), is_capturing=True))
    current_page()._words[layout.ASKED] += 1
    reader.look()
    assert devices.calls[2:] == []  # its events would break the capture of a graph


@pytest.mark.usefixtures("_with_page", "_with_two_backends")
@pytest.mark.parametrize(
    ("timing", "state", "known"),
    [("", "scheduled", ""), ("1", "scheduled", "busy"), ("1", "started", "waits")],
)
def test_own_kernels_or_peers_where_nccl_notes_its_starts(
    timing: str, state: str, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TORCH_NCCL_ENABLE_TIMING every collective of nccl is "scheduled" until it has ended."""
    if timing:
        monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", timing)
    entries = [collective("nccl:all_reduce", 44, 99, retired=False, state=state)]
    monkeypatch.setattr(flight_recorder, "dumps", recorders({"0": (0, 0)}, {"0": (44, 43)}, traces=([], entries)))
    FakeDevices(monkeypatch, torch.device("cuda", 0))
    current_page()._words[layout.ASKED] += 1
    flight_reader.FlightReader(current_page()).look()
    page = reading.read(tmp_path / "rank-0.status")
    assert page is not None
    assert page.device == known
    assert not current_page().is_asked(layout.ASKED)


@pytest.mark.usefixtures("_with_page")
def test_an_older_torch_is_asked_to_record_what_nccl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It records nothing of gloo, so gloo's waits are noted without a name there."""
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "")  # to be removed again at the end
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE")
    monkeypatch.setattr(torch_compat, "release", lambda: (2, 10))
    monkeypatch.setattr(compat_c10d.NEW_GROUP, "wrap", lambda make: None)
    monkeypatch.setattr(own_page, "_when_begun", [])
    monkeypatch.setattr(own_page, "_before_failing", [])
    only_nccl = [dump._replace(backend="nccl") for dump in recorders({"0": (1, 1)})()]
    monkeypatch.setattr(flight_recorder, "dumps", lambda: only_nccl)
    flight_reader.install()
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert flight_reader.is_recording()
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    flight_reader.install()
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"


def test_an_old_torch_or_one_that_is_told_not_to_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight_reader.is_recording()
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert not flight_reader.is_recording()
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setattr(flight_recorder, "dumps", list)
    assert not flight_reader.is_recording()


@pytest.mark.usefixtures("_with_page")
def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its thread, a rank that gets on would look as if it hung."""
    monkeypatch.setattr(flight_reader, "_LOOK_EVERY", 0.001)
    looks = iter([OSError("no space"), OSError("no space"), SystemExit()])  # the last one ends it

    def look(_: flight_reader.FlightReader) -> None:
        raise next(looks)

    monkeypatch.setattr(flight_reader.FlightReader, "look", look)
    with pytest.raises(SystemExit):
        flight_reader.FlightReader(current_page()).run()
    assert (
        capsys.readouterr().err
        == "phalanx: what this rank does could not be recorded (OSError: no space); trying again\n"
    )


def test_the_ranks_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(pg_names={"a": "7"}, pg_group_ranks={"a": {3: 0, 1: 1}})
    monkeypatch.setattr(c10d, "_world", world)
    assert flight_reader.ranks_of("7") == flight_reader.ranks_of("7:nccl") == [1, 3]
    assert flight_reader.ranks_of("8") == []


def test_the_other_side_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: {"pair": {0: 4, 1: 6}}[group][rank])
    pair: Any = "pair"
    assert waits.peer_of({"src": 3}, pair) == 3
    assert waits.peer_of({"src": None, "group_src": 1}, pair) == 6
    assert waits.peer_of({"group_dst": 0}, pair) == 4
    assert waits.peer_of({"dst": 0}, pair) == 0
    assert waits.peer_of({}, pair) is None


@pytest.mark.usefixtures("_with_page")
def test_a_thread_beside_the_loop_says_nothing_of_its_phase(tmp_path: Path) -> None:
    page = current_page()
    seen: list[str] = []

    def save() -> None:
        found = reading.read(tmp_path / "rank-0.status")
        assert found is not None
        seen.append(found.phase)

    page.enter(layout.FORWARD)
    noted = around(phases._save)(save)
    noted()
    thread = threading.Thread(target=noted)
    thread.start()
    thread.join()
    assert seen == ["checkpoint", "forward"]
    backward = around(phases._backward)(save)
    thread = threading.Thread(target=lambda: (backward(), noted()))  # a loop that is not in the main thread
    thread.start()
    thread.join()
    assert seen[2:] == ["backward", "checkpoint"]


@pytest.mark.usefixtures("_with_page")
def test_the_end_of_a_wait_is_progress_whatever_the_backend(tmp_path: Path) -> None:
    """One that torch's flight recorder does not see, for example."""
    path = tmp_path / "rank-0.status"

    def give_up() -> None:
        raise TimeoutError

    before = reading.pulse(path)
    with pytest.raises(TimeoutError):
        around(waits._wait)(give_up)()
    assert reading.pulse(path) == before
    around(waits._wait)(lambda: None)()
    assert reading.pulse(path) != before

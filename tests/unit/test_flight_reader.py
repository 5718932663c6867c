"""Torch's flight recorder as we read it: nccl's beside gloo's, groups that are being made, and looks that fail."""

from __future__ import annotations

import functools
import gc
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.recorder import flight_reader, phases, waits
from phalanx.recorder.around import around
from phalanx.status import layout, own_page, reading
from phalanx.status.page import StatusPage
from phalanx.torch_compat import flight_recorder


def recorders(*found: dict[str, tuple[int, int]]) -> Any:
    """What torch has: a dump for each of these, with how far each group has come."""

    def dump_json(found: dict[str, tuple[int, int]]) -> str:
        fields = {
            number: {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
            for number, (enqueued, completed) in found.items()
        }
        return json.dumps({"pg_status": fields})

    dumps = []
    for order, groups in enumerate(found):
        entries = [{"time_created_ns": 10 * number - order} for number in (1, 2)]
        trace = functools.partial(lambda entries, *_: pickle.dumps({"entries": entries}), entries)
        dumps.append(flight_recorder.Dump(functools.partial(lambda groups, *_: dump_json(groups), groups), trace))
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
    assert flight_reader.group_progress() == {"0": (12, 11), "1": (0, 0), "2": (3, 1)}
    assert [entry["time_created_ns"] for entry in flight_reader.entries()] == [9, 10, 19, 20]
    monkeypatch.setattr(flight_recorder, "dumps", recorders({"0": (7, 7)}))
    assert flight_reader.is_recording()
    assert flight_reader.group_progress() == {"0": (7, 7)}


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


def test_groups_that_are_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(dict[Any, str]):
        tries = 0

        def items(self) -> Any:
            Changing.tries += 1
            if Changing.tries < 3:
                raise RuntimeError("dictionary changed size during iteration")
            return super().items()

    world = SimpleNamespace(pg_names=Changing({"a": "7"}), pg_group_ranks={"a": {3: 0, 1: 1}})
    monkeypatch.setattr(c10d, "_world", world)
    assert flight_reader.ranks_of("7") == [1, 3]


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

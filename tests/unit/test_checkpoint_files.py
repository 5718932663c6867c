"""Checkpoints where others can write: links, pipes and files that are not what they seem."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.checkpoint import command
from phalanx.checkpoint.storage import manifest
from phalanx.checkpoint.storage.local import LocalStorage
from phalanx.errors import CheckpointError, UsageError
from phalanx.store.coordinator import Coordinator
from tests.unit.test_checkpoint_format import rewrite


def test_nothing_is_written_through_a_link_or_into_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, victim, make = tmp_path / "run", tmp_path / "victim", LocalStorage.make_directory
    victim.mkdir()
    (victim / "rank-0.safetensors").write_text("precious")
    (victim / "manifest.json").write_text("precious")
    kinds = ["link", "directory"] if os.geteuid() == 0 else ["link"]  # only root can give one away

    def plant(storage: LocalStorage, directory: str) -> None:
        if kinds.pop() == "link":
            (path / directory).symlink_to(victim)
        else:
            (path / directory).mkdir()
            os.chown(path / directory, 65534, 65534)
        make(storage, directory)

    monkeypatch.setattr(LocalStorage, "make_directory", plant)
    with px.Checkpointer(path, mode=0o640) as checkpointer:
        while kinds:
            checkpointer.save(2, model=nn.Linear(2, 2))
            with pytest.raises(CheckpointError, match=r"step-2\.tmp-\w+ is no directory of this user \(.+\); see who"):
                checkpointer.wait()
            for each in path.glob("*.tmp-*"):
                each.unlink()
        monkeypatch.undo()
        checkpointer.save(2, model=nn.Linear(2, 2))
    assert {each.name: each.read_text() for each in victim.iterdir()} == dict.fromkeys(
        ("rank-0.safetensors", "manifest.json"), "precious"
    )
    assert victim.stat().st_mode & 0o777 != 0o750
    assert px.Checkpointer(path).steps() == [2]


def test_a_file_that_is_there_already_is_replaced_not_written_to(tmp_path: Path) -> None:
    """It may be another name of a file elsewhere."""
    place, other = LocalStorage(os.fspath(tmp_path)), tmp_path / "other"
    place.make_directory("step-1.tmp-ab")
    other.write_text("precious")
    (tmp_path / "step-1.tmp-ab" / "manifest.json").hardlink_to(other)
    place.write("step-1.tmp-ab", "manifest.json", b"new")
    assert other.read_text() == "precious"
    assert place.read("step-1.tmp-ab", "manifest.json", 10) == b"new"


def test_an_error_without_a_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise ConnectionAbortedError

    monkeypatch.setattr(Coordinator, "hand_in", fail)
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, extra={"a": torch.ones(1)})
        with pytest.raises(CheckpointError, match=r"could not be agreed on: ConnectionAbortedError$"):
            checkpointer.wait()


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, extra={"a": torch.ones(4)})
    return tmp_path / "step-5"


@pytest.fixture
def limit() -> Iterator[None]:
    """A read that never ends is a failure."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it is still being read"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_has_no_end_is_not_read(
    step: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of a size that the manifest could have told are as long as their target's name."""
    size = 0 if kind == "pipe" else len("/dev/zero")
    rewrite(step, lambda fields: fields.update(tensors={}, files={"rank-0.safetensors": {"bytes": size, "crc32": 0}}))
    monkeypatch.setattr(manifest, "_MOST_BYTES", 1 << 16)
    (step / name).unlink()
    os.mkfifo(step / name) if kind == "pipe" else (step / name).symlink_to("/dev/zero")
    assert px.Checkpointer(step.parent).load_latest() is None
    assert command.main(["verify", str(step.parent)]) == 1
    words = "it is no plain file" if kind == "pipe" else "it is a link, and none is followed here"
    assert capsys.readouterr().err.count(f"cannot be read: {words}") == 1


def test_a_file_that_grows_is_read_as_far_as_it_was_said_to_go(step: Path) -> None:
    place = LocalStorage(os.fspath(step.parent))
    with (step / "rank-0.safetensors").open("r+b") as file:
        file.truncate(1 << 26)
    assert place.checksum(step.name, "rank-0.safetensors", 100).bytes == 1 << 22


def test_a_link_to_nothing_is_no_damage_and_keeps_nobody_from_saving(step: Path) -> None:
    (step / "notes").symlink_to("nowhere")
    (step.parent / "step-3").mkdir()
    (step.parent / "step-3" / "notes").symlink_to("nowhere")
    with px.Checkpointer(step.parent) as checkpointer:
        assert checkpointer.steps() == [5]
        checkpointer.save(6)
    assert sorted(each.name for each in step.parent.iterdir()) == ["step-5", "step-6"]


def test_two_checkpointers_of_one_process_do_not_write_to_one_place(step: Path, tmp_path: Path) -> None:
    """By whatever name; and the refusal does not end the lock of the first."""
    alias = tmp_path / "alias"
    alias.symlink_to(step.parent)
    first, second = px.Checkpointer(step.parent), px.Checkpointer(alias)
    first.save(6)
    with pytest.raises(UsageError, match=r"by another px\.Checkpointer of this process; close\(\) that one first"):
        second.save(6)
    code = "import sys\nfrom phalanx.checkpoint.storage.local import LocalStorage\nLocalStorage(sys.argv[1]).lock()"
    other = subprocess.run([sys.executable, "-c", code, str(alias)], capture_output=True, text=True, check=False)
    assert f"are being written by pid {os.getpid()} on host" in other.stderr
    first.close()
    with second:
        second.save(7)
    assert px.Checkpointer(alias).steps() == [5, 6, 7]

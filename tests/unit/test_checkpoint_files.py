"""Checkpoints where others can write: links, pipes and files that are not what they seem."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.checkpoint.council import Council
from phalanx.checkpoint.local import Local
from phalanx.errors import CheckpointError


def test_nothing_is_written_through_a_link_or_into_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, victim, make = tmp_path / "run", tmp_path / "victim", Local.make
    victim.mkdir()
    (victim / "rank-0.safetensors").write_text("precious")
    (victim / "manifest.json").write_text("precious")
    kinds = ["link", "directory"] if os.geteuid() == 0 else ["link"]  # only root can give one away

    def plant(place: Local, directory: str) -> None:
        if kinds.pop() == "link":
            (path / directory).symlink_to(victim)
        else:
            (path / directory).mkdir()
            os.chown(path / directory, 65534, 65534)
        make(place, directory)

    monkeypatch.setattr(Local, "make", plant)
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
    place, other = Local(os.fspath(tmp_path)), tmp_path / "other"
    place.make("step-1.tmp-ab")
    other.write_text("precious")
    (tmp_path / "step-1.tmp-ab" / "manifest.json").hardlink_to(other)
    place.write("step-1.tmp-ab", "manifest.json", b"new")
    assert other.read_text() == "precious"
    assert place.read("step-1.tmp-ab", "manifest.json", 10) == b"new"


def test_an_error_without_a_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise ConnectionAbortedError

    monkeypatch.setattr(Council, "hand_in", fail)
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, extra={"a": torch.ones(1)})
        with pytest.raises(CheckpointError, match=r"could not be agreed on: ConnectionAbortedError$"):
            checkpointer.wait()

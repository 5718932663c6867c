"""Which backend a script gets: pure decisions, with the environment given."""

from __future__ import annotations

import pytest

from phalanx import backends, env, shm
from phalanx.errors import UsageError


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_told", set())
    monkeypatch.setattr(backends, "_has_cards", lambda: False)
    for name, value in {"PHALANX_BACKEND": "auto", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_gloo_or_nothing_becomes_shm_and_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert [backends.choose(asked) for asked in (None, "gloo", "cpu:gloo")] == ["shm"] * 3
    assert capsys.readouterr().err == (
        "phalanx: the backend is shm, not gloo: all 4 ranks are on this machine (--backend as-written keeps gloo)\n"
    )


@pytest.mark.parametrize("asked", ["nccl", "mpi", "cpu:gloo,cuda:nccl", "shm"])
def test_other_backends_stay(asked: str) -> None:
    assert backends.choose(asked) == asked


def test_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "as-written")
    assert backends.choose("gloo") == "gloo"
    monkeypatch.delenv("PHALANX_BACKEND")
    assert backends.choose(None) is None


def test_a_wrong_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "fast")
    with pytest.raises(UsageError, match="PHALANX_BACKEND='fast' is unknown; set it to auto or as-written"):
        backends.choose("gloo")
    assert env.BACKEND_CHOICES == ("auto", "as-written")


def test_with_a_card_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_has_cards", lambda: True)
    assert backends.choose("gloo") == "gloo"


def test_several_nodes_stay_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert backends.choose("gloo") == "gloo"
    with pytest.raises(UsageError, match="backend 'shm' is for one node, but this job has 2"):
        backends.require_shm(2)


def test_without_the_library_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shm, "why_not_here", lambda: "the shm library is not there: no compiler")
    assert backends.choose("gloo") == "gloo"
    assert capsys.readouterr().err == "phalanx: the backend is gloo: the shm library is not there: no compiler\n"
    with pytest.raises(UsageError, match="backend 'shm' cannot be used: the shm library is not there: no compiler"):
        backends.require_shm(1)


def test_only_the_first_rank_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert backends.choose("gloo") == "shm"
    assert capsys.readouterr().err == ""


def test_what_doctor_will_ask() -> None:
    assert shm.describe()["shm"].startswith("version 1, ")

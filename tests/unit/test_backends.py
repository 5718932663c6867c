"""Which backend a script gets: pure decisions, with the environment given."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from phalanx import backends, env, shm
from phalanx.errors import JoinError, UsageError
from phalanx.launch.agent.attempt_run import AttemptRun
from phalanx.launch.agent.rank_process import RankProcess
from phalanx.launch.spec.launch_spec import placements
from phalanx.native import library
from phalanx.status import notices
from phalanx.store import vote


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_given", set())
    monkeypatch.setattr(backends, "_has_gpus", lambda: False)
    for name, value in {"PHALANX_BACKEND": "auto", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_gloo_or_nothing_becomes_shm_and_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert [backends.choose(asked) for asked in (None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo")] == ["shm"] * 4
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


def test_with_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_has_gpus", lambda: True)
    assert backends.choose("gloo") == "gloo"


class Election:
    """What the others say, and what this rank was heard to say."""

    def __init__(self, others: str | None) -> None:
        self.others, self.heard = others, []

    def objection(self, topic: str, against: str | None, timeout: float) -> str | None:
        assert topic == "shm"
        self.heard.append((against, timeout))
        return against or self.others


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Election]:
    """``two_nodes(what the other node has against it)``."""
    for name, value in {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "PHALANX_STORE": "10.0.0.1:29500"}.items():
        monkeypatch.setenv(name, value)

    def hold(others: str | None) -> Election:
        election = Election(others)
        monkeypatch.setattr(backends.vote, "objection", election.objection)
        return election

    backends._objection.cache_clear()
    return hold


def test_several_nodes_vote_once(two_nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    election = two_nodes(None)
    assert backends.choose("gloo", timeout=7.0) == backends.choose(None, 8, timeout=7.0) == "shm"
    assert election.heard == [(None, 7.0)]
    assert capsys.readouterr().err == (
        "phalanx: the backend is shm, not gloo: shared memory within each of 2 nodes, gloo between them "
        "(--backend as-written keeps gloo)\n"
    )


def test_one_node_that_cannot_is_enough(two_nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    two_nodes("rank 5 (host b): the shm library is not there: no compiler")
    assert backends.choose("gloo") == "gloo"
    assert backends.choose(None) is None
    assert capsys.readouterr().err == (
        "phalanx: the backend is gloo on all nodes: rank 5 (host b): the shm library is not there: no compiler\n"
    )


@pytest.mark.parametrize("why", ["as-written", "GPU", "library"])
def test_who_keeps_gloo_tells_the_other_nodes(
    why: str, two_nodes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    election = two_nodes(None)
    if why == "as-written":
        monkeypatch.setenv("PHALANX_BACKEND", "as-written")
    elif why == "GPU":
        monkeypatch.setattr(backends, "_has_gpus", lambda: True)
    else:
        monkeypatch.setattr(shm, "why_not_here", lambda: "no compiler")
    assert backends.choose("gloo") == "gloo"
    ((against, _),) = election.heard
    assert against == ("no compiler" if why == "library" else "it keeps gloo, by --backend or for its GPU")
    assert capsys.readouterr().err == ("phalanx: the backend is gloo on all nodes: no compiler\n" * (why == "library"))


def test_several_nodes_of_another_launcher_and_smaller_worlds(two_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    election = two_nodes(None)
    assert backends.choose("gloo", world_size=4) == "gloo"
    monkeypatch.delenv("PHALANX_STORE")
    assert backends.choose("gloo") == "gloo"
    assert election.heard == []
    backends.require_shm()  # by name it can be had, whoever started the ranks


# ---- the vote itself


def cast(reasons: Sequence[str | None], timeout: float = 10.0, size: int = 0) -> list[Any]:
    """Ranks as threads; what each of them was told."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        try:
            return vote.vote(store, rank, size or len(reasons), reasons[rank], timeout)
        except JoinError as error:
            return str(error)

    with ThreadPoolExecutor(len(reasons)) as pool:
        return list(pool.map(one, range(len(reasons))))


def test_all_ranks_get_one_verdict() -> None:
    assert cast([None] * 4) == [None] * 4
    assert cast([None, "no compiler", None, None]) == ["no compiler"] * 4
    two = cast([None, "no compiler", None, "a GPU"])
    assert two in (["no compiler"] * 4, ["a GPU"] * 4)


def test_a_vote_names_who_does_not_come() -> None:
    found = cast([None, None], timeout=0.1, size=4)
    for rank, text in enumerate(found):
        assert text == f"rank {rank} waited 0 s for 2 of 4 ranks to join: 2, 3; they have not called init, or died."
    assert cast([None, None, "no compiler"], size=4) == ["no compiler"] * 3, "nobody need wait for the fourth"


def test_a_rank_that_votes_twice_counts_once() -> None:
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(JoinError):
            vote.vote(store, 0, 2, None, 0.01)
    assert vote.vote(store, 1, 2, "no compiler", 5.0) == "no compiler"


def test_without_the_library_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shm, "why_not_here", lambda: "the shm library is not there: no compiler")
    assert backends.choose("gloo") == "gloo"
    assert capsys.readouterr().err == "phalanx: the backend is gloo: the shm library is not there: no compiler\n"
    with pytest.raises(UsageError, match="backend 'shm' cannot be used: the shm library is not there: no compiler"):
        backends.require_shm()


def test_only_the_first_rank_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert backends.choose("gloo") == "shm"
    assert capsys.readouterr().err == ""


def test_with_a_gpu_the_backend_of_torchs_own_choice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_has_gpus", lambda: True)
    group: Any = dist.ProcessGroup(0, 4)  # pyright: ignore[reportCallIssue]
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)

    def make(group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: str, store: Any) -> Any:
        return group, store

    assert backends._choosing(make)(4, 0, [], "undefined", None) == (group, None)
    assert group._get_backend_name() == "nccl"


def test_a_rank_can_report_one_printable_line_only() -> None:
    member = RankProcess(placements([1])[0])
    os.write(member.report_writer, json.dumps({"notice": "a\x1b[2J\nb" + "c" * 1000}).encode() + b"\n")
    member.read_report()
    member.close()
    assert member.notices == [("a[2Jb" + "c" * 1000)[:400]]


def test_all_notices_of_one_read_are_passed_on() -> None:
    said: list[str] = []
    zygote: Any = socket.socket()
    with selectors.DefaultSelector() as selector, zygote:
        attempt = AttemptRun(zygote, selector, 1.0, said.append)
        rank = RankProcess(placements([1])[0])
        for text in ("a", "b", "a"):
            os.write(rank.report_writer, json.dumps({"notice": text}).encode() + b"\n")
        attempt._read_report(rank)
        os.write(rank.report_writer, json.dumps({"notice": "c"}).encode() + b"\n")
        attempt._read_report(rank)
        rank.close()
    assert said == ["a", "b", "c"]


def test_what_doctor_will_ask() -> None:
    assert shm.describe()["shm"].startswith(f"version {library.VERSION}, ")

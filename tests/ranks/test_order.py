"""Who goes first, who speaks, where all wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import phalanx as px
from phalanx.errors import UsageError
from tests.losing import die, survivors


def test_rank_zero_goes_first(run_ranks, tmp_path: Path) -> None:
    def prepare(world: px.World, directory: Path) -> list[str]:
        with px.rank_zero_first():
            if world.is_main:
                time.sleep(0.3)
                (directory / "prepared").touch()
            return sorted(path.name for path in directory.iterdir())

    assert run_ranks(prepare, 3, tmp_path) == [["prepared"]] * 3


def test_it_can_be_used_many_times_and_locally(run_ranks) -> None:
    def turns(world: px.World) -> list[bool]:
        order = []
        for local in (False, True, False):
            with px.rank_zero_first(local=local):
                order.append(world.is_main)
        px.barrier()
        return order

    assert run_ranks(turns, 3) == [[True] * 3, [False] * 3, [False] * 3]


def test_a_body_that_raises_is_an_error_on_all(run_ranks) -> None:
    def prepare(world: px.World) -> str:
        try:
            with px.rank_zero_first():
                if world.is_main:
                    raise OSError("the disk is full")
                return "ran"
        except (px.PhalanxError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    assert run_ranks(prepare, 3) == [
        "OSError: the disk is full",
        *["PeerFailed: rank 0 went first and failed with OSError: the disk is full."] * 2,
    ]


def test_a_long_body_does_not_run_into_the_groups_timeout(run_ranks) -> None:
    def prepare(rank: int) -> str:
        import torch
        import torch.distributed as dist

        with px.init(timeout=1.0):
            with px.rank_zero_first():
                if rank == 0:
                    time.sleep(2.5)
            total = torch.ones(1)
            dist.all_reduce(total)
            return f"{int(total)} after the long body"

    assert run_ranks(prepare, 2, join_group=False) == ["2 after the long body"] * 2


def test_the_first_is_killed_and_nobody_hangs() -> None:
    def go_first(world: px.World) -> str:
        try:
            with px.rank_zero_first():
                if world.is_main:
                    die()
        except px.PhalanxError as error:
            return f"{type(error).__name__} {error}"
        return "nothing"

    began = time.monotonic()
    assert survivors(go_first, 2) == {1: "PeerFailed rank 0, which goes first here, has died; see its log."}
    assert time.monotonic() - began < 20


def test_main_only_and_print(run_ranks) -> None:
    def speak(world: px.World) -> tuple[object, str]:
        import contextlib
        import io

        @px.main_only
        def save(name: str) -> str:
            """Saves."""
            return f"saved {name}"

        assert save.__doc__ == "Saves."
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            px.print("one", "line", sep="-")
        return save("x"), heard.getvalue()

    assert run_ranks(speak, 2) == [("saved x", "one-line\n"), (None, "")]


def test_a_world_of_one_needs_no_group() -> None:
    with px.rank_zero_first():
        px.barrier()
    assert px.main_only(lambda: 5)() == 5


def test_plain_torch_groups_serve_as_well(run_ranks) -> None:
    """px.barrier and px.rank_zero_first beside the script's own init_process_group."""

    def own_group(rank: int) -> int:
        import os

        import torch.distributed as dist

        host, port = os.environ["PHALANX_STORE"].split(":")
        store = dist.TCPStore(host, int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        with px.rank_zero_first():
            pass
        px.barrier()
        dist.destroy_process_group()
        return rank

    assert run_ranks(own_group, 2, join_group=False) == [0, 1]


def test_before_joining_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"rank 1 of 2, but it has not joined yet; call px.init\(\) first"):
        px.barrier()
    assert px.main_only(lambda: 5)() is None

"""Checkpoints on real ranks when one of them fails alone, and what the ranks leave in the store they agree through."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.checkpoint.checkpointer import new_coordinator
from phalanx.errors import CheckpointError, UsageError
from phalanx.world import World

RunRanks = Callable[..., list[Any]]


class Odd(nn.Linear):
    """Its state can be had only if it is told so."""

    broken = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise ValueError("no state today")
        return super().state_dict(*args, **kwargs)


def test_what_one_rank_cannot_save_is_an_error_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    def check(world: World, path: str) -> list[str]:
        told: list[str] = []

        def fails(call: Callable[[], object]) -> None:
            with pytest.raises((CheckpointError, UsageError)) as caught:
                call()
            told.append(f"{type(caught.value).__name__} {caught.value}")

        checkpointer = px.Checkpointer(path)
        model = Odd(4, 4)
        checkpointer.save(1, model=model)
        for step, failing, extra in ((2, 1, None), (3, 0, {"f": lambda: None})):  # nobody can save a lambda
            checkpointer.wait()
            model.broken = extra is None and world.rank == failing
            if world.rank == failing:
                fails(lambda step=step, extra=extra: checkpointer.save(step, model=model, extra=extra))
            else:
                checkpointer.save(step, model=model, extra={})
            model.broken = False
            fails(checkpointer.wait)  # on the rank that has raised it already too: all ranks are at the same call
        checkpointer.save(4, model=model)
        checkpointer.save(5, model=model, extra={"n": 10**5000})  # which JSON cannot have
        fails(checkpointer.wait)
        checkpointer.close()
        with px.Checkpointer(f"{path}-waited", asynchronous=False) as waiting:
            model.broken = world.rank == 1
            fails(lambda: waiting.save(1, model=model))
            model.broken = False
            waiting.save(2, model=model)
            assert waiting.steps() == [2]
        # What does not fit the model of one rank is loaded by none.
        fails(lambda: px.Checkpointer(path).load_latest(model=nn.Linear(4, 4 + world.rank)))
        model.broken = world.rank == 1
        fails(lambda: px.Checkpointer(path).load_latest(model=model))
        return told

    first, second = run_ranks(check, 2, str(tmp_path / "run"))
    kinds = [told.partition(" ")[0] for told in first]
    assert kinds == ["CheckpointError", "UsageError", *["CheckpointError"] * 5]
    no_state = "CheckpointError rank 1 could not take the state of step {}: ValueError: no state today"
    assert {first[0], second[0], second[1]} == {no_state.format(2)}
    assert first[1].startswith(
        "UsageError extra['f'] is an object of class function, and px.Checkpointer saves tensors"
    )
    assert first[2] == second[2] == f"CheckpointError {first[1].removeprefix('UsageError ')}"
    assert first[3:] == second[3:]
    assert "4300 digits" in first[3]
    assert first[4] == no_state.format(1)
    assert "weight has shape (4, 4) in the checkpoint and (5, 4) in the model" in first[5]
    assert "rank 1 could not load step-4" in first[6]
    assert "ValueError: no state today" in first[6]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-1", "step-4"]


def test_the_store_does_not_grow_with_every_save(run_ranks: RunRanks, tmp_path: Path) -> None:
    def count(world: World, path: str) -> list[int]:
        counts = []
        with px.Checkpointer(path) as checkpointer:
            for step in range(12):
                checkpointer.save(step, model=nn.Linear(2, 2), extra={"long": "x" * (9 << 20)} if step == 3 else None)
                checkpointer.wait()
                checkpointer.steps()
                px.barrier()
                counts.append(world.store.num_keys())
                px.barrier()
            state = checkpointer.load_latest()
        assert state is not None
        return counts

    (counts, _) = run_ranks(count, 2, str(tmp_path), backend="gloo")
    assert max(counts[2:]) - counts[2] <= 4  # the barriers have keys of their own


def test_nothing_from_the_store_is_executed(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Another user of the machine may write to a store on a port; what is there is data."""

    def be_attacked(world: World, path: str) -> list[str]:
        class Payload:
            def __reduce__(self) -> Any:
                return os.mkdir, (f"{path}/owned",)

        evil = pickle.dumps(Payload())
        coordinator = new_coordinator(world)
        store: Any = coordinator._store
        told = []
        for content in (evil, b"[[" * 100_000, b'"a str"', json.dumps({"step": 1}).encode()):
            store.set("there", content)
            with pytest.raises(CheckpointError, match="the run's store does not hold"):
                coordinator.await_value("there", list)
        checkpointer = px.Checkpointer(path)
        finished = threading.Event()
        store = checkpointer._coordinator._store

        class Late:
            """The last one finds something else where the first share was."""

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def add(self, key: str, amount: int) -> int:
                count = store.add(key, amount)
                if count == 2:
                    store.set(key.replace("count", attack[0]), attack[1])
                finished.set()
                return count

        setattr(checkpointer._coordinator, "_store", Late())  # noqa: B010
        shares = (evil, b"[]", b'{"step": 1}', b'{"step": "x", "digest": "", "tensors": {}}')
        attack = ("", b"")
        for step, attack in enumerate([*(("0/0", share) for share in shares), ("0", b"999999")]):  # noqa: B007
            checkpointer.save(step, model=nn.Linear(2, 2))
            with pytest.raises(CheckpointError) as caught:
                checkpointer.wait()
            told.append(str(caught.value))
        checkpointer.close()
        assert finished.is_set()
        directories: tuple[Any, ...] = ("../elsewhere", "step-1/../..", 5)
        for directory in directories:
            reader = px.Checkpointer(path)
            setattr(reader._coordinator, "lead", lambda *_, name=directory: name)  # noqa: B010
            with pytest.raises(CheckpointError, match="is no name of a checkpoint"):
                reader.load_latest(px.State())
        torch.distributed.barrier()
        return told

    first, second = run_ranks(be_attacked, 2, str(tmp_path))
    assert first == second == ["what rank 0 has reported for the checkpoint is damaged; save again."] * 5
    assert not (tmp_path / "owned").exists()

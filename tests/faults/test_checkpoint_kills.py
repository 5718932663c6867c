"""Ranks that save checkpoints are killed at every write and at any moment: what was whole stays whole, and loads.

One process has torch; it forks the ranks for each attempt, kills them, and looks at what they have left. A rank needs
nothing but a store, so there is no process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx import world as worlds
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.storage.base import open_storage
from phalanx.errors import CheckpointError, PeerFailed
from phalanx.store.join import Claim, Meeting
from phalanx.world import World

RunRanks = Callable[..., list[Any]]
_MOMENTS = int(os.environ.get("MOMENTS", "24"))
"""At which the ranks are killed, one after the other; `make stress` takes 200."""


class Attempt:
    """Ranks that go on from the latest checkpoint and save one step after the other, until they are killed."""

    def __init__(self, path: Path, size: int, number: int, body: Callable[[World, Path, Any], None]) -> None:
        self.path, self.size = path, size
        self._store_file = path.parent / f"store-{number}"
        self._reader, self._writer = os.pipe()
        self.pids = [self._fork(rank, body) for rank in range(size)]
        os.close(self._writer)

    def _fork(self, rank: int, body: Callable[[World, Path, Any], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.close(self._reader)
            store = torch.distributed.FileStore(str(self._store_file), self.size)
            body(_join(rank, self.size, store), self.path, self._tell)
            code = 0
        except BaseException as error:  # noqa: BLE001  (this process must not go on as a copy of the test)
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _tell(self, step: int) -> None:
        os.write(self._writer, step.to_bytes(4, "little"))

    def await_word(self) -> None:
        """Until a rank tells something: `_save_on` tells a 0 when it begins."""
        select.select([self._reader], [], [], 30)

    def told(self) -> int:
        """The last step that some rank knew to be whole; 0 if none. For when the ranks have ended."""
        with os.fdopen(self._reader, "rb") as pipe:
            content = pipe.read()
        return max((int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)), default=0)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self) -> list[int]:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        self._store_file.unlink(missing_ok=True)
        return codes


def _join(rank: int, size: int, store: Any) -> World:
    """A world that has a store and the ranks' claims, as px.init() has them."""
    claim = Claim.of_this_process(rank, size)
    store.set(f"claim {rank}", "\n".join([str(claim.pid), str(claim.born)]))
    claims = []
    for other in range(size):
        pid, born = store.get(f"claim {other}").decode().split()
        claims.append(Claim(other, size, claim.host, int(pid), int(born), claim.machine))
    meeting = Meeting(store, tuple(claims), hosted_here=False)
    device = torch.device("cpu")
    worlds._current = World(rank, size, rank, size, 0, 1, device, "none", "", "test", meeting)
    return worlds._current


def _model(value: float) -> nn.Module:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _save_on(world: World, path: Path, tell: Callable[[int], None], steps: int = 1_000_000, keep: int = 2) -> None:
    """Every weight of step n is n, and so is what belongs to it."""
    checkpointer = px.Checkpointer(path, keep=keep)
    state = px.State(model=_model(0), extra={"of": 0})
    checkpointer.load_latest(state)
    tell(0)
    for step in range(state.step + 1, state.step + 1 + steps):
        checkpointer.save(px.State(model=_model(step), step=step, extra={"of": step}))
        checkpointer.wait()
        tell(step)
    checkpointer.close()


def _check(path: Path, at_least: int) -> int:
    """The latest loads and is what was saved, and of no other is only half there."""
    model = _model(-1)
    checkpointer = px.Checkpointer(path)
    state = checkpointer.load_latest(px.State(model=model, extra={"of": -1}))
    assert not [entry.problem for entry in Catalog(open_storage(path)).entries() if entry.problem]
    if state is None:
        assert at_least == 0
        return 0
    assert state.step >= at_least
    assert state.extra == {"of": state.step}
    assert all((parameter == state.step).all() for parameter in model.parameters())
    return state.step


def _check_tidy(path: Path, steps: list[int]) -> None:
    """After a run that was not killed nothing is left of those that were."""
    assert sorted(each.name for each in path.iterdir()) == sorted(f"step-{step}" for step in steps)


# ---- at every write


_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
_EACH_WRITE = 3
"""torch.save makes some hundred small writes; of each file the first ones, and all large ones, will do."""


class Fuse:
    """Counts what a process does to the files below a directory, and kills it at one of these moments."""

    def __init__(self, path: Path, left: int) -> None:
        self._path, self._left = str(path), left
        self._sync = os.fsync
        self._writes: dict[Any, int] = {}
        sys.addaudithook(self._hear)
        os.fsync = self._before_sync  # it has no audit event, and neither has a write

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            # The event does not say in which directory a relative name is opened; only checkpoints are, here.
            if isinstance(arguments[0], str) and arguments[0].startswith((self._path, "rank-", "manifest")):
                self.burn()
        elif event in _CHANGES:
            place = arguments[0]
            if isinstance(place, str) and not place.startswith("/") and arguments[-1] >= 0:  # by a descriptor
                place = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), place)
            if isinstance(place, str | os.PathLike) and os.fspath(place).startswith(self._path):
                self.burn()

    def _before_sync(self, fd: int) -> None:
        self.burn()
        self._sync(fd)

    def tear(self, write: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
        """A write that may end in its middle."""

        def torn(stream: Any, data: Any) -> int:
            self._writes[stream] = self._writes.get(stream, 0) + 1
            if self._writes[stream] > _EACH_WRITE and len(data) < 1024:
                return write(stream, data)
            if self._left <= 0:
                write(stream, memoryview(data).cast("B")[: len(data) // 2])
            self.burn()
            return write(stream, data)

        return torn

    def burn(self) -> None:
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def test_killed_at_every_write(run_ranks: RunRanks, tmp_path: Path) -> None:
    def burn(_: int, directory: Path) -> list[int]:
        torch.set_num_threads(1)
        path = directory / "kept"

        def body(left: int) -> Callable[..., None]:
            def save_one(world: World, path: Path, tell: Callable[[int], None]) -> None:
                from phalanx.checkpoint.storage.local import _DirectWriter

                fuse = Fuse(path, left)
                setattr(_DirectWriter, "write", fuse.tear(_DirectWriter.write))  # noqa: B010
                _save_on(world, path, tell, steps=1, keep=1)

            return save_one

        template = directory / "template"
        assert Attempt(template, 1, 0, lambda *given: _save_on(*given, steps=1)).wait() == [0]
        (template / "step-2.tmp-0123456789ab").mkdir()
        (template / "step-2.tmp-0123456789ab" / "rank-0.safetensors").write_bytes(b"half")
        found = []
        for left in range(10_000):
            shutil.copytree(template, path)
            attempt = Attempt(path, 1, left, body(left))
            (code,) = attempt.wait()
            assert code in (0, -signal.SIGKILL)
            found.append(_check(path, max(1, attempt.told())))
            _save_on(worlds.current(), path, lambda _: None, steps=1, keep=1)
            _check_tidy(path, [found[-1] + 1])
            shutil.rmtree(path)
            if code == 0:
                break
        return found

    (found,) = run_ranks(burn, 1, tmp_path, join_group=False, timeout=120)
    # Step 1 was there; up to the rename that stays so, and from then on it is step 2, while the old one is removed.
    assert found == sorted(found)
    assert found.count(1) > 15
    assert found.count(2) > 5


# ---- at any moment


def test_killed_at_random_moments(run_ranks: RunRanks, tmp_path: Path) -> None:
    def kill(_: int, directory: Path) -> tuple[int, int, int]:
        torch.set_num_threads(1)
        path = directory / "kept"
        rng = random.Random(7)
        attempt = Attempt(path, 2, _MOMENTS, lambda *given: _save_on(*given, steps=5))
        attempt.await_word()
        started = time.monotonic()
        attempt.wait()
        one_save = (time.monotonic() - started) / 5
        last, unfinished = attempt.told(), 0
        assert last == 5
        for moment in range(_MOMENTS):
            size = rng.choice((1, 2))
            attempt = Attempt(path, size, moment, _save_on)
            if rng.random() < 0.85:  # the others are killed while they begin
                attempt.await_word()
            time.sleep(rng.uniform(0.0, 2 * one_save))
            victims = rng.sample(range(size), rng.randint(1, size))
            attempt.kill(*victims)
            if len(victims) < size:  # the launcher ends the others, a little later
                time.sleep(rng.uniform(0.0, one_save))
                attempt.kill(*set(range(size)) - set(victims))
            attempt.wait()
            unfinished += any(".tmp-" in each.name for each in path.glob("step-*"))
            last = _check(path, max(last, attempt.told()))
        attempt = Attempt(path, 2, _MOMENTS, lambda *given: _save_on(*given, steps=2))
        assert attempt.wait() == [0, 0]
        _check_tidy(path, [last + 1, last + 2])
        return last, unfinished, _check(path, last + 2)

    ((last, unfinished, end),) = run_ranks(kill, 1, tmp_path, join_group=False, timeout=180)
    assert end == last + 2
    assert last > _MOMENTS / 10  # they did get to save
    assert unfinished > _MOMENTS / 20  # and were killed while they did


# ---- when it goes wrong without a kill


def test_the_others_say_who_died(run_ranks: RunRanks, tmp_path: Path) -> None:
    def outlive(_: int, path: Path) -> list[int]:
        torch.set_num_threads(1)

        def body(world: World, path: Path, tell: Callable[[int], None]) -> None:
            checkpointer = px.Checkpointer(path / "kept")
            checkpointer.save(1, model=_model(1))
            checkpointer.wait()
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.save(2, model=_model(2))
            with pytest.raises(PeerFailed, match=r"rank 1 .* has died while a checkpoint was being agreed on"):
                checkpointer.wait()
            state = px.State(model=_model(0))
            worlds._current = None  # what a process that starts again would see
            assert px.Checkpointer(path / "kept").load_latest(state) is state
            tell(state.step)

        attempt = Attempt(path, 2, 0, body)
        codes = attempt.wait()
        return [*codes, attempt.told()]

    assert run_ranks(outlive, 1, tmp_path, join_group=False) == [[0, -signal.SIGKILL, 1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_an_error_on_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    def fill(_: int, path: Path) -> list[int]:
        torch.set_num_threads(1)
        with _small_disk(path):
            attempt = Attempt(path / "kept", 2, 0, _fill_up)
            codes = attempt.wait()
            return [*codes, attempt.told()]

    def _fill_up(world: World, path: Path, tell: Callable[[int], None]) -> None:
        words = r"could not write .* of step 2 to .*: the disk is full. It needs 4\.21 MB, and 3\.\d\d MB are free"
        checkpointer = px.Checkpointer(path)
        checkpointer.save(1, model=nn.Linear(512, 512))
        checkpointer.save(2, model=nn.Linear(1024, 1024))
        with pytest.raises(CheckpointError, match=words):
            checkpointer.save(3)
        assert not list(path.glob("step-2*"))  # the other rank may have begun with step 3
        assert (path / "step-1").is_dir()
        checkpointer.save(3, model=nn.Linear(512, 512))
        checkpointer.close()
        tell(checkpointer.steps()[-1])

    assert run_ranks(fill, 1, tmp_path, join_group=False) == [[0, 0, 3]]


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    """Seen by this process and its children alone, and gone with them."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, everywhere = 0x20000, 1 << 18, 1 << 14
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private | everywhere, None):
        pytest.skip("this machine gives no mounts of one's own")
    assert libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=4m") == 0
    try:
        yield
    finally:
        libc.umount2(os.fsencode(path), 2)

"""One save: each rank writes its share beside training, and the rank that finishes last publishes the checkpoint.

    every rank     finishes its copies, writes rank-R.safetensors into step-N.tmp-TOKEN, syncs it, hands in a record
    the last rank  writes manifest.json, renames the directory to step-N, publishes the outcome, removes old checkpoints

No rank waits for another here, so there can be no deadlock.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
import torch

from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.copy_gate import CopyGate
from phalanx.checkpoint.reporting import log_event, print_line
from phalanx.checkpoint.sharding import ShardBuffer
from phalanx.checkpoint.storage.manifest import MANIFEST, Manifest, Share, check_agreement, merge_tensors, shard_name
from phalanx.errors import CheckpointError
from phalanx.store.coordinator import Coordinator
from phalanx.system import in_decimal_bytes

_DISK_FULL = "the disk is full."


class Writer:
    """The state that all saves of one checkpointer share: the copies in memory, and a thread that is kept.

    Starting a thread means waiting until it runs, which takes long where all cores are busy. It has no lower priority
    than training: whenever it holds the interpreter's lock, training would have to wait for it all the longer. An
    interpreter that ends waits for it.
    """

    def __init__(self, coordinator: Coordinator, catalog: Catalog, keep: int | None, token: str) -> None:
        self.coordinator, self.catalog, self.keep, self.token = coordinator, catalog, keep, token
        self.buffer, self.gate = ShardBuffer(), CopyGate()
        self.thread = ThreadPoolExecutor(1, "checkpoint")

    def close(self) -> None:
        """Waits for the save under way."""
        self.thread.shutdown()
        self.gate.remove()


@dataclass(eq=False)
class Saving:
    """A save under way on this rank."""

    writer: Writer
    share: Share
    """This rank's share, without its checksum. With an error, nothing is written."""
    number: int
    """The number of this save, counted by the checkpointer."""
    parts: tuple[str, ...]
    bytes: int
    """Bytes of all tensors, on all ranks."""
    unneeded_keys: list[str]
    """Keys of the store that no rank needs once all have handed in their shares."""

    def __post_init__(self) -> None:
        self.step, self.coordinator, self.catalog = self.share.step, self.writer.coordinator, self.writer.catalog
        self._directory, _ = self.catalog.storage.names_for(self.step, self.writer.token)
        self._started = time.monotonic()
        self._lost: BaseException | None = None
        self._done = threading.Event()

    def start(self) -> None:
        if not self.share.error:
            self.writer.gate.shut()
        try:
            self.writer.thread.submit(self._run)
        except BaseException:
            self.writer.gate.open()
            raise

    def finish_own(self, timeout: float | None = None) -> bool:
        """Waits for this rank's part, and returns whether it is done."""
        return self._done.wait(timeout)

    def finish(self, on_wait: Callable[[float], None]) -> None:
        """Waits for all ranks; raises CheckpointError on all of them if the save has failed.

        ``on_wait`` is called now and then with the seconds since the save began.
        """
        while not self.finish_own(timeout=10.0):
            on_wait(time.monotonic() - self._started)
        if self._lost is not None:
            reason = str(self._lost) or type(self._lost).__name__
            raise CheckpointError(f"the checkpoint of step {self.step} could not be agreed on: {reason}")
        error = self.coordinator.await_value(
            self._key("outcome"), str, lambda: on_wait(time.monotonic() - self._started)
        )
        if error:
            raise CheckpointError(error)

    def _key(self, name: str, before: int = 0) -> str:
        return f"save {self.number - before}/{name}"

    # ---- in the background

    def _run(self) -> None:
        try:
            if self._hand_in(self._write_share()):
                try:
                    problem = self._conclude()
                except Exception as error:  # noqa: BLE001  (all ranks report it, whatever it is)
                    problem = self._explain(error)
                if problem:
                    log_event(self.coordinator.rank, "save failed", step=self.step, problem=problem)
                self.coordinator.publish(self._key("outcome"), problem)
        except Exception as error:  # noqa: BLE001  (the store is gone; `finish` raises it in the training loop)
            self._lost = error
        finally:
            self._done.set()

    def _write_share(self) -> Share:
        if self.share.error:
            return self.share
        buffer, storage = self.writer.buffer, self.catalog.storage
        try:
            try:
                buffer.finish()
            finally:
                self.writer.gate.open()
                buffer.await_devices()
            storage.make_directory(self._directory)
            checksum = storage.write(self._directory, shard_name(self.coordinator.rank), buffer.content)
        except Exception as error:  # noqa: BLE001  (all ranks report it, whatever it is)
            return Share(self.step, "", error=self._explain(error))
        return msgspec.structs.replace(self.share, checksum=checksum)

    def _hand_in(self, share: Share) -> bool:
        try:
            return self.coordinator.hand_in(self._key("share"), msgspec.to_builtins(share))
        except ValueError as error:  # JSON has no numbers of thousands of digits
            failed = Share(self.step, "", error=self._explain(error))
            return self.coordinator.hand_in(self._key("share"), msgspec.to_builtins(failed))

    def _conclude(self) -> str:
        """Makes a checkpoint of the shares, on the last rank. Returns the error message, if it has failed."""
        handed_in = self.coordinator.collect(self._key("share"))
        self.coordinator.delete(self._key("outcome", before=1), *self.unneeded_keys)
        try:
            shares = [Share.decode(each, rank) for rank, each in enumerate(handed_in)]
            check_agreement(shares)
            manifest, final = self._publish(shares)
        except Exception as error:  # noqa: BLE001  (all ranks report it, whatever it is)
            problem = self._explain(error)
            left = self._remove_leftovers()
            return problem + (self._space_needed() if problem.endswith(_DISK_FULL) else "") + left
        seconds = time.monotonic() - self._started
        log_event(self.coordinator.rank, "saved", step=self.step, seconds=seconds, bytes=manifest.bytes)
        try:
            self.catalog.prune(self.writer.keep, final)
        except Exception as error:  # noqa: BLE001  (the checkpoint is there, so the save has succeeded)
            where = self.catalog.storage
            print_line(f"step {self.step} is saved, but an old checkpoint in {where} cannot be removed: {error}")
        return ""

    def _publish(self, shares: list[Share]) -> tuple[Manifest, str]:
        storage = self.catalog.storage
        sizes = storage.sizes(self._directory)
        for rank, share in enumerate(shares):
            # Two nodes may have a directory of the same name that is not the same directory.
            if sizes.get(shard_name(rank)) != share.checksum.bytes:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is not whole: rank {self.coordinator.rank} does not see "
                    f"{shard_name(rank)} in {storage}; give a path that is the same disk on all nodes."
                )
        try:
            manifest = Manifest(
                step=self.step,
                time=time.time(),
                world_size=len(shares),
                parts=self.parts,
                phalanx=version("phalanx"),
                torch=str(torch.__version__),
                files={shard_name(rank): share.checksum for rank, share in enumerate(shares)},
                tensors=merge_tensors(shares),
                values=shares[0].values,
                rng=[share.rng for share in shares],
            )
        except ValueError:
            raise CheckpointError("the shares of the ranks do not make whole tensors; save again.") from None
        storage.write(self._directory, MANIFEST, manifest.encode())
        _, final = storage.names_for(self.step, self.writer.token)
        storage.publish(self._directory, final)
        return manifest, final

    def _remove_leftovers(self) -> str:
        try:
            for name in list(self.catalog.leftovers(self.writer.token)):
                self.catalog.storage.remove(name)
        except OSError as error:
            return f" What was written of it cannot be removed: {error}"
        return ""

    def _space_needed(self) -> str:
        """The free space is only right once everything of this save has been removed."""
        free = self.catalog.storage.free_bytes()
        room = "" if free is None else f", and {in_decimal_bytes(free)} are free"
        return f" It needs {in_decimal_bytes(self.bytes)}{room}; make room there."

    def _explain(self, error: Exception) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        rank, storage = self.coordinator.rank, self.catalog.storage
        head = f"rank {rank} could not write the checkpoint of step {self.step} to {storage}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{head}: {_DISK_FULL}"
        if isinstance(error, OSError):
            return f"{head}: {error.strerror or error}."
        return f"{head}: {type(error).__name__}: {error}"

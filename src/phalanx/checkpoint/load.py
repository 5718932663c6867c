"""Loading: rank 0 selects a checkpoint, every rank checks that it is whole and fits, and all load it or none does.

Nothing of the state is changed before that. Then the tensors of the model and the optimizer are read one by one.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx import attempt
from phalanx import world as worlds
from phalanx.checkpoint import flatten, optimizers
from phalanx.checkpoint.catalog import Catalog, Entry, check_name
from phalanx.checkpoint.reporting import log_event, print_line
from phalanx.checkpoint.state import State, check_random, reseed_random, restore_random, unwrapped
from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import Broken, Manifest
from phalanx.checkpoint.storage.shard_file import ShardReader
from phalanx.checkpoint.storage.values import Decoder, StateDict
from phalanx.errors import CheckpointError, UsageError
from phalanx.store.coordinator import Coordinator
from phalanx.world import World

_MISMATCHES_SHOWN = 3


class _NotTrusted(CheckpointError):
    """Reading a value would run code."""


class _Content:
    """The content of one checkpoint."""

    def __init__(self, storage: Storage, entry: Entry, trust: bool) -> None:
        assert entry.manifest is not None
        self._storage, self._directory, self._manifest, self._trust = storage, entry.directory, entry.manifest, trust

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The entries of the model's state dict, with the shapes of those that are tensors."""
        shapes = {name: each.shape for name, each in self._manifest.tensors.items()}
        try:
            return flatten.model_shapes(self._manifest.values, shapes)
        except (TypeError, ValueError, LookupError, AttributeError):
            raise Broken("its values are damaged") from None

    def read(
        self, parts: set[str], rank: int, files: contextlib.ExitStack, deferred: Container[str] = ()
    ) -> tuple[StateDict, object]:
        """Returns these parts, as `State.load_state_dict` takes them, and the random generators of a rank.

        ``extra`` is read in any case, unless that would run code. Tensors in ``deferred`` are read when they are used,
        until ``files`` are closed.
        """
        manifest = self._manifest
        shards = files.enter_context(ShardReader(self._storage, self._directory, manifest, deferred))
        decoder = Decoder(shards.read, self._unpickle)
        nested = {part: decoder.decode(node) for part, node in manifest.values.items() if part in parts}
        if "extra" in manifest.values.keys() - parts:
            with contextlib.suppress(_NotTrusted):
                nested["extra"] = decoder.decode(manifest.values["extra"])
        return {**nested, "step": manifest.step}, decoder.decode(manifest.rng[rank])

    def _unpickle(self, content: Tensor) -> object:
        if not self._trust:
            raise _NotTrusted(
                f"{self._directory} in {self._storage} has objects that were pickled, and loading them runs code from "
                "it. Give trust=True, to px.Checkpointer or as --trust, if you trust whoever wrote it."
            )
        return flatten.unpickle(content)


def prepare(
    storage: Storage, entry: Entry, state: State, world: World, trust: bool, files: contextlib.ExitStack
) -> Callable[[], None]:
    """Checks a checkpoint, as far as ``state`` needs it, and returns a function that loads it into ``state``.

    That function reads the tensors of the model and the optimizer one by one: no rank holds all of them twice.
    """
    assert entry.manifest is not None
    has_same_size = entry.manifest.world_size == world.size
    content = _Content(storage, entry, trust)
    _check_fit(f"step {entry.step} in {storage}", entry.manifest, content, state)
    deferred = {f"model.{name}" for name in state.parameters()}
    # Another class than torch's may do anything with the tensors that it is given.
    if getattr(type(state.optimizer), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict:
        deferred |= {name for name in entry.manifest.tensors if name.startswith("optimizer.state.")}
    nested, generators = content.read({*state.parts}, world.rank if has_same_size else 0, files, deferred)
    rng = check_random(generators)
    if not isinstance(nested.get("extra", {}), dict):
        raise Broken("its values are damaged")
    if state.optimizer is not None:
        optimizers.check_form(nested.get("optimizer"))
        optimizers.check(state.optimizer, nested["optimizer"])

    def apply() -> None:
        state.load_state_dict(nested)
        if has_same_size:
            state.set_random(lambda: restore_random(rng, world.device))
        else:
            state.set_random(lambda: reseed_random(rng, world.rank, world.size))

    return apply


def _check_fit(where: str, manifest: Manifest, content: _Content, state: State) -> None:
    """Raises CheckpointError, with names and shapes."""
    missing = [part for part in state.parts if part not in manifest.parts and part != "extra"]
    if missing:
        raise CheckpointError(
            f"{where} has no {' and no '.join(missing)}; it was saved with {', '.join(manifest.parts) or 'nothing'}."
        )
    if state.model is None:
        return
    found = _mismatches(content.model_shapes, unwrapped(state.model).state_dict())
    if found:
        left = len(found) - _MISMATCHES_SHOWN
        more = f"; and {left} more" if left > 0 else ""
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(found[:_MISMATCHES_SHOWN])}{more}.")


def _mismatches(saved: Mapping[str, tuple[int, ...] | None], own: Mapping[str, object]) -> list[str]:
    found = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    found += [f"{name} is not in the model" for name in saved if name not in own]
    for name, value in own.items():
        shape = saved.get(name)
        if isinstance(value, Tensor) and shape is not None and shape != tuple(value.shape):
            found.append(f"{name} has shape {shape} in the checkpoint and {tuple(value.shape)} in the model")
    return found


class CheckpointSelector:
    """Loads a checkpoint from a catalog, on all ranks alike."""

    def __init__(self, catalog: Catalog, coordinator: Coordinator, trust: bool) -> None:
        self._catalog, self._coordinator, self._trust = catalog, coordinator, trust
        self.broken: set[str] = set()
        """Directories that were damaged; complete on rank 0 only."""

    def load_latest(self, state: State) -> bool:
        """Loads the newest whole checkpoint into ``state``; returns whether there is one."""
        skipped: set[str] = set()
        while True:
            directory = self._coordinator.lead(lambda: self._newest(skipped), str | None)
            if directory is None:
                return False
            check_name(directory)
            problem = self._try(directory, state)
            if not problem:
                return True
            if self._coordinator.rank == 0:
                self._skip(directory, problem, skipped)

    def load(self, step: int, state: State) -> None:
        directory = check_name(self._coordinator.lead(lambda: self._of_step(step), str))
        if problem := self._try(directory, state):
            raise CheckpointError(f"step {step} in {self._catalog.storage} is damaged: {problem}.")

    # ---- on rank 0

    def _newest(self, skipped: set[str]) -> str | None:
        for entry in self._catalog.entries():
            if entry.directory in skipped:
                continue
            if entry.manifest is not None:
                return entry.directory
            self._skip(entry.directory, entry.problem, skipped)
        return None

    def _skip(self, directory: str, problem: str, skipped: set[str]) -> None:
        skipped.add(directory)
        self.broken.add(directory)
        print_line(f"skipped the checkpoint {directory} in {self._catalog.storage}: {problem}")

    def _of_step(self, step: int) -> str:
        entries = self._catalog.entries()
        found = [entry for entry in entries if entry.step == step]
        for entry in found:
            if entry.manifest is not None:
                return entry.directory
        if found:
            raise CheckpointError(f"step {step} in {self._catalog.storage} is damaged: {found[0].problem}.")
        there = ", ".join(map(str, sorted({entry.step for entry in entries if entry.manifest}))) or "none"
        raise CheckpointError(f"{self._catalog.storage} has no checkpoint of step {step}; there are: {there}.")

    # ---- on all ranks

    def _try(self, directory: str, state: State) -> str:
        """Loads it on all ranks, or returns what is damaged.

        Each rank verifies its share of the files, and only if all of them are whole does any rank read the content. A
        checkpoint that does not fit one rank is a CheckpointError on all of them.
        """
        coordinator = self._coordinator
        started = time.perf_counter()
        entry = self._catalog.entry(directory)
        if problem := self._first_of_all(self._catalog.verify(entry, coordinator.rank, coordinator.size)):
            return problem
        apply, problem, refusal = None, "", ""
        with contextlib.ExitStack() as files:
            try:
                apply = prepare(self._catalog.storage, entry, state, worlds.current(), self._trust, files)
            except OSError as error:
                problem = f"it cannot be read: {error.strerror or error}"
            except Broken as error:
                problem = str(error)
            except (CheckpointError, UsageError) as error:
                refusal = str(error)
            except Exception as error:  # noqa: BLE001  (mostly of the user's own code; all ranks report it)
                where = f"rank {coordinator.rank} could not load {directory} in {self._catalog.storage}"
                refusal = f"{where}: {type(error).__name__}: {error}"
            if refusal := self._first_of_all(refusal):
                raise CheckpointError(refusal)
            if problem := self._first_of_all(problem):
                return problem
            assert apply is not None
            try:
                apply()
            except (OSError, Broken) as error:  # although all ranks had found it whole
                raise CheckpointError(f"{directory} in {self._catalog.storage} was loaded in part: {error}") from None
        attempt.resume_from(state.step)
        log_event(coordinator.rank, "loaded", step=state.step, seconds=time.perf_counter() - started)
        return ""

    def _first_of_all(self, problem: str) -> str:
        """Returns the problem of the lowest rank that has one."""
        problems = self._coordinator.gather(problem, str)
        return self._coordinator.lead(lambda: next(filter(None, problems or ()), ""), str)


def export(storage: Storage, entry: Entry, out: Path, trust: bool) -> int:
    """Writes the tensors of the model, under their own names, to one safetensors file; returns how many."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with contextlib.ExitStack() as files:
            nested, _ = _Content(storage, entry, trust).read({"model"}, 0, files)
    except Broken as error:
        raise CheckpointError(f"{entry.directory} in {storage} is damaged: {error}.") from None
    tensors = {name: value for name, value in nested.get("model", {}).items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{entry.directory} in {storage} has no model to export; it was saved without one.")
    temporary = out.with_name(f".{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", "step": str(entry.step)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(tensors)

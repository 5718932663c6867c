"""Which checkpoint is loaded: rank 0 proposes, every rank reads, and all take it or none does."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx import attempt
from phalanx import world as worlds
from phalanx.checkpoint.catalog import Catalog, check_name
from phalanx.checkpoint.checkpoint_text import say
from phalanx.checkpoint.load import Loaded
from phalanx.checkpoint.state import State
from phalanx.checkpoint.storage.manifest import Broken
from phalanx.errors import CheckpointError, UsageError
from phalanx.store.coordinator import Coordinator


class CheckpointSelector:
    """Loads a checkpoint from a catalog, on all ranks alike."""

    def __init__(self, catalog: Catalog, coordinator: Coordinator, note: Callable[..., None], trust: bool) -> None:
        self._catalog, self._coordinator, self._note, self._trust = catalog, coordinator, note, trust
        self.broken: set[str] = set()
        """Directories that were found to be damaged; complete on rank 0."""

    def load_latest(self, state: State) -> bool:
        """The newest that is whole, into ``state``; whether there is one."""
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
            raise CheckpointError(f"step {step} in {self._catalog.place} is damaged: {problem}.")

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
        say(f"skipped the checkpoint {directory} in {self._catalog.place}: {problem}")

    def _of_step(self, step: int) -> str:
        entries = self._catalog.entries()
        found = [entry for entry in entries if entry.step == step]
        for entry in found:
            if entry.manifest is not None:
                return entry.directory
        if found:
            raise CheckpointError(f"step {step} in {self._catalog.place} is damaged: {found[0].problem}.")
        there = ", ".join(map(str, sorted({entry.step for entry in entries if entry.manifest}))) or "none"
        raise CheckpointError(f"{self._catalog.place} has no checkpoint of step {step}; there are: {there}.")

    # ---- on all ranks

    def _try(self, directory: str, state: State) -> str:
        """What is wrong with it, for any rank; ``state`` is changed only if nothing is.

        Each rank sums up its share of the files. Only when all of them are right does any rank read on. A checkpoint
        that one rank cannot take is a CheckpointError on all of them.
        """
        coordinator = self._coordinator
        started = time.perf_counter()
        entry = self._catalog.entry(directory)
        if problem := self._of_all(self._catalog.verify(entry, coordinator.rank, coordinator.size)):
            return problem
        loaded, problem, refusal = None, "", ""
        try:
            loaded = Loaded(self._catalog.place, entry, state, worlds.current(), self._trust)
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
        except Broken as error:
            problem = str(error)
        except (CheckpointError, UsageError) as error:
            refusal = str(error)
        except Exception as error:  # noqa: BLE001  (of the user's own code, mostly; all ranks are told)
            where = f"rank {coordinator.rank} could not load {directory} in {self._catalog.place}"
            refusal = f"{where}: {type(error).__name__}: {error}"
        if refusal := self._of_all(refusal):
            raise CheckpointError(refusal)
        if problem := self._of_all(problem):
            return problem
        assert loaded is not None
        loaded.hand_over(state)
        attempt.resume_from(state.step)
        self._note("loaded", step=state.step, seconds=time.perf_counter() - started)
        return ""

    def _of_all(self, problem: str) -> str:
        """The first of what the ranks have found."""
        told = self._coordinator.gather(problem, str)
        return self._coordinator.lead(lambda: next((each for each in told or () if each), ""), str)

"""Selects the checkpoint to load: rank 0 proposes one, every rank reads it, and all load it or none does."""

from __future__ import annotations

import time

from phalanx import attempt
from phalanx import world as worlds
from phalanx.checkpoint import load
from phalanx.checkpoint.catalog import Catalog, check_name
from phalanx.checkpoint.reporting import log_event, print_line
from phalanx.checkpoint.state import State
from phalanx.checkpoint.storage.manifest import Broken
from phalanx.errors import CheckpointError, UsageError
from phalanx.store.coordinator import Coordinator


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
        try:
            apply = load.prepare(self._catalog.storage, entry, state, worlds.current(), self._trust)
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
        except Broken as error:
            problem = str(error)
        except (CheckpointError, UsageError) as error:
            refusal = str(error)
        except Exception as error:  # noqa: BLE001  (mostly of the user's own code; all ranks are told)
            where = f"rank {coordinator.rank} could not load {directory} in {self._catalog.storage}"
            refusal = f"{where}: {type(error).__name__}: {error}"
        if refusal := self._first_of_all(refusal):
            raise CheckpointError(refusal)
        if problem := self._first_of_all(problem):
            return problem
        assert apply is not None
        apply()
        attempt.resume_from(state.step)
        log_event(coordinator.rank, "loaded", step=state.step, seconds=time.perf_counter() - started)
        return ""

    def _first_of_all(self, problem: str) -> str:
        """Returns the problem of the lowest rank that has one."""
        problems = self._coordinator.gather(problem, str)
        return self._coordinator.lead(lambda: next(filter(None, problems or ()), ""), str)

"""torch's own distributed suite, bound to the backend that the environment names in BACKEND, as the suite has it.

The suite decides at its import what to skip: it compares the backend's name with those that its authors knew. So the
name it gets from us passes for "gloo", whose CPU tests are the yardstick, and for "mpi", which alone gets the CPU
tests of all_to_all; and the name in the environment afterwards is "mpi", which alone gets the tests of subgroups on
fewer than eight ranks. No file of torch is touched, and gloo itself is run under the same names.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from collections import ChainMap
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from tests.suite import pretend

_MODULE = "torch.testing._internal.distributed.distributed_test"
_ALIASES = ("gloo", "mpi")


class _Name(str):
    """A backend's name that is also equal to each of _ALIASES."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in _ALIASES

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # so that it is found in the suite's sets of names


def _provide_expecttest() -> None:
    """torch's test utilities derive from a class of this package, for a feature that the suite does not use."""
    try:
        importlib.import_module("expecttest")
    except ModuleNotFoundError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        stand_in.ACCEPT = False
        sys.modules["expecttest"] = stand_in


def _load(backend: str) -> tuple[Any, Any]:
    """The suite, and the module with its checks."""
    _provide_expecttest()
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.DistTestCases.backend_feature["plugin"].add(backend)
    # Only with a file does it run the tests that form the world a second time; setUp names the file.
    ours: dict[str, str] = {"BACKEND": _Name(backend), "INIT_METHOD": os.environ.get("INIT_METHOD", "file://")}
    # A real environment would turn the name into a plain str.
    with mock.patch.object(os, "environ", ChainMap(ours, os.environ)):
        module = importlib.import_module(_MODULE)
    # The suite's own limits; ours is one for all tests, and host.py is behind it.
    common.TIMEOUT_OVERRIDE.clear()
    return module, common


BACKEND = os.environ["BACKEND"]
START = os.environ.get("SUITE_START", "fork")

if BACKEND == "shm":
    importlib.import_module("phalanx.shm")

_suite, _common = _load(BACKEND)


class Suite(_suite.TestDistBackend, _suite.DistributedTest._DistTestBase):
    """Each test runs in its own processes, one a rank."""

    def setUp(self) -> None:
        super().setUp()
        _suite.INIT_METHOD = os.environ["INIT_METHOD"]
        # A fork takes a hundredth of the time of a fresh interpreter that imports torch and the suite. A spawned rank
        # also goes through the end of an interpreter, which a forked one leaves out.
        context: Any = torch.multiprocessing.get_context(START)
        self._start_processes(context.Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **options: Any) -> None:
        os.environ["BACKEND"] = "mpi"
        if "SUITE_PRETEND_GPUS" in os.environ:
            pretend.install(_common, int(os.environ["WORLD_SIZE"]))
        super()._run(rank, test_name, file_name, pipe, **options)


def names() -> Sequence[str]:
    """Every test of the suite."""
    return unittest.TestLoader().getTestCaseNames(Suite)


def skip_reason(name: str) -> str | None:
    """Why the suite skips this test, when that is known without starting it."""
    test = getattr(Suite, name)
    return getattr(test, "__unittest_skip_why__", "") if getattr(test, "__unittest_skip__", False) else None

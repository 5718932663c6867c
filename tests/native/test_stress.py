"""The C library under ThreadSanitizer and AddressSanitizer, for some seconds; `make stress` does it at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.stress import run


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stress")


@pytest.mark.parametrize("kind", ["threads", "processes", "kills"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_random_programs(kind: str, ranks: int, builds: Path) -> None:
    assert "programs" in run(kind, ranks, 0.5, ranks, builds)

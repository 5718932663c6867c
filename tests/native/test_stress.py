"""The C library under sanitizers and on an emulated aarch64, for some seconds; `make stress` does it at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.stress import AARCH64, SANITIZERS, run, why_no_aarch64


# One test for each build, which takes longer than what is run of it.
@pytest.mark.parametrize("kinds", [("threads",), ("processes", "kills")], ids=["threads", "processes"])
@pytest.mark.long
def test_random_programs(kinds: tuple[str, ...], tmp_path: Path) -> None:
    for kind in kinds:
        for ranks in (2, 3, 5, 7):
            assert "programs" in run(kind, ranks, 0.5, ranks, tmp_path), (kind, ranks)


@pytest.mark.skipif(bool(why_no_aarch64()), reason=why_no_aarch64() or "")
def test_random_programs_on_aarch64(tmp_path: Path) -> None:
    for kind in SANITIZERS:
        for ranks in (2, 5):
            assert "programs" in run(kind, ranks, 0.1, ranks, tmp_path, AARCH64), (kind, ranks)

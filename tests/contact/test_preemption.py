"""Frameworks that know nothing of phalanx save when a scheduler ends them, whichever processes it has signalled."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from tests.conftest import start

PROGRAMS = Path(__file__).parent / "programs"
TRIALS = int(os.environ.get("TRIALS", "20"))


@pytest.mark.parametrize("whom", ["the launcher", "every process"])
@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_it_saves(package: str, whom: str, tmp_path: Path, record_property) -> None:
    """Stopped by SIGTERM at random moments, loaders on: both ranks save the same step."""
    program = PROGRAMS / f"stop_{'hf' if package == 'transformers' else package}.py"
    record_property("version", f"{package} {metadata.version(package)}")
    record_property("result", f"{TRIALS} of {TRIALS}, SIGTERM to {whom}")
    for trial in range(TRIALS):
        place = tmp_path / str(trial)
        place.mkdir()
        process = start("-m", "phalanx", "run", "--nproc-per-node", "2", str(program), str(place), cwd=place)
        paths = [place / f"ready-{rank}" for rank in range(2)]
        limit = time.monotonic() + 120
        while not all(path.exists() for path in paths):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit, "the ranks did not begin"
            time.sleep(0.02)
        time.sleep(random.random())
        pids = [process.pid]
        if whom == "every process":
            pids += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            random.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        saved = [place / f"saved-{rank}" for rank in range(2)]
        assert process.returncode == 143, f"trial {trial}: {err}"
        assert all(path.exists() for path in saved), f"trial {trial}: {err}"
        (name,) = {path.read_text() for path in saved}
        assert (place / name).exists(), f"trial {trial}: {err}"
        print(trial, end=" ", file=sys.stderr, flush=True)

"""A sample of torch's own distributed suite on shm; `make suite` runs all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite.run import SAMPLE


@pytest.mark.timeout(400)
@pytest.mark.long
def test_sample(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SAMPLE.with_name("run.py")), "--backend", "shm", "--sample", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert out.exists(), done.stdout + done.stderr
    results = json.loads(out.read_text())["outcomes"]["shm"]
    assert sorted(results) == json.loads(SAMPLE.read_text())
    assert {test: result for test, result in results.items() if result["outcome"] != "passed"} == {}

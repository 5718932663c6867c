"""One node pays for one node: what the agent of a healthy, short job imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_MODULES = 45
RUN = """\
import json, pathlib, sys
from phalanx import cli
from phalanx.launch.agent import watchdogs
watchdogs._SOON = 3600.0  # on a busy machine, too, the job ends before its progress is watched
try:
    cli.main(["run", "--stall-after", "14400", "--start-method", "exec", "--nproc-per-node", "2", "script.py"])
finally:
    found = [name for name in sys.modules if name.partition(".")[0] == "phalanx"]
    pathlib.Path("modules.json").write_text(json.dumps(found))
"""
NOT_NEEDED = {"torch", "importlib.metadata", "phalanx.failure", "phalanx.status", "phalanx.watchdog.stall"}


def test_the_agent_of_one_node_imports_few_modules(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('hello')\n")
    finished = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (finished.returncode, finished.stdout.count("hello")) == (0, 2), finished.stderr
    found = json.loads((tmp_path / "modules.json").read_text())
    assert len(found) <= MOST_MODULES, sorted(found)
    assert not NOT_NEEDED & set(found)

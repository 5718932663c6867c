"""How many modules of phalanx the agent of one node imports, and the CPU time of these imports.

A run of one rank says which they are. Then fresh interpreters import them, and nothing else, in the same order. At most
45 modules and 70 ms are promised.
"""

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import main

from phalanx.bench.commands import Sample, Settings, Step, running
from phalanx.bench.common import MILLI, Benchmark, Row, show, table

_RUN = """\
import json, os, pathlib, sys
from phalanx import cli
try:
    cli.main(["run", "--start-method", "exec", "--nproc-per-node", "1", "script.py"])
finally:
    found = [name for name in sys.modules if name.partition(".")[0] == "phalanx"]
    pathlib.Path("modules.json").write_text(json.dumps(found))
"""
_IMPORT = """\
import importlib, json, pathlib, sys, time
names = json.loads(pathlib.Path("modules.json").read_text())
started = time.process_time()
for name in names:
    importlib.import_module(name)
pathlib.Path("seconds.json").write_text(json.dumps(time.process_time() - started))
"""


def plan(settings: Settings) -> Iterator[Step]:
    for repeat in range(settings.repeats):
        label = f"the agent of one node, repeat {repeat + 1} of {settings.repeats}"
        yield Step(label, functools.partial(_take, settings.timeout, repeat))


def _take(timeout: float, repeat: int, directory: Path) -> list[Sample]:
    (directory / "script.py").touch()
    for code in (_RUN, _IMPORT):
        with running([sys.executable, "-c", code], directory, timeout) as command:
            command.finish()
    modules, seconds = (json.loads((directory / f"{name}.json").read_text()) for name in ("modules", "seconds"))
    taken = {"modules": float(len(modules)), "imports": seconds}
    return [Sample(name, "agent", 1, repeat, (value,)) for name, value in taken.items()]


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    modules, seconds = (row.times("agent") for row in rows)
    body = [["modules of phalanx", show(modules)], ["CPU of their imports, ms", show(seconds, MILLI)]]
    return [table("The agent of one node", ["", "median (min–max)"], body)]


BENCHMARK = Benchmark("agent-imports", __doc__, plan, tables, (), repeats=20)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))

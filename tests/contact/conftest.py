"""Other people's code under `phalanx run`. `make contact` (CONTACT=full) runs all of it and writes docs/contact.md.

`make test` runs the small part: what takes minutes, or needs a package that developers do not have, is not collected
there. The first line of a test's docstring says in the table what was run; `record_property` with "version" or "result"
adds to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.bench.commands import describe
from tests.conftest import REPOSITORY, start

FULL = os.environ.get("CONTACT") == "full"
collect_ignore = [] if FULL else ["test_frameworks.py", "test_orders.py", "test_preemption.py", "test_slurm.py"]

_PAGE = REPOSITORY / "docs/contact.md"
_LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),
    "phalanx": ("-m", "phalanx", "run"),
}
_collected: set[str] = set()
_rows: dict[str, dict[str, Any]] = {}

Beside = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def beside_torchrun(tmp_path: Path) -> Beside:
    """Runs a program on two ranks, by torchrun and by phalanx, and compares what each rank has left.

    A rank leaves `rank-N.json` in the directory that is the program's last argument. Returns what they have left.
    With ``printed`` what each rank has printed is compared as well.
    """

    def run(*program: str, printed: bool = False, timeout: float = 300) -> list[dict[str, Any]]:
        (left, words), (theirs, their_words) = (
            _run(name, program, tmp_path, timeout) for name in ("phalanx", "torchrun")
        )
        assert left == theirs
        assert not printed or words == their_words
        return left

    return run


def _run(
    launcher: str, program: tuple[str, ...], directory: Path, timeout: float, tries: int = 3
) -> tuple[list[Any], list[str]]:
    place = directory / f"{launcher}-{tries}"
    place.mkdir()
    logs = place / "logs"
    # Standard output goes to a file for each rank: on one console, torchrun mixes the lines of the ranks.
    flags = ["--nproc-per-node", "2", "--redirects", "1", "--log-dir", str(logs)]
    command = [*_LAUNCHERS[launcher], *flags, *program, str(place)]
    with start(*command, cwd=place, env={"OMP_NUM_THREADS": "1"}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.terminate()  # either of them then ends its ranks
            raise
    # torchrun is only what we compare with: its gloo may fail to connect, and Accelerate's scripts have races.
    if process.returncode and launcher == "torchrun" and tries > 1:
        return _run(launcher, program, directory, timeout, tries - 1)
    assert process.returncode == 0, f"{launcher}: {out}{err}"
    left = [json.loads(path.read_text()) for path in sorted(place.glob("rank-*.json"))]
    printed = {path.parent.name: path.read_text() for path in logs.glob("*/attempt_0/*/stdout.log")}
    assert sorted(printed) == ["0", "1"]
    return left, [text for _, text in sorted(printed.items())]


# ---- the table


def pytest_itemcollected(item: pytest.Item) -> None:
    doc = (getattr(item, "function", None) and item.function.__doc__) or item.name  # type: ignore[attr-defined]
    case = f" ({item.callspec.id})" if hasattr(item, "callspec") else ""  # type: ignore[attr-defined]
    _collected.add(item.nodeid)
    item.user_properties.append(("what", doc.splitlines()[0].rstrip(".") + case))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    given = dict(report.user_properties)
    if not FULL or "what" not in given:
        return
    row = _rows.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    row.update(given)
    row["seconds"] += report.duration
    if report.outcome != "passed":
        row["outcome"] = report.outcome


def _is_whole() -> bool:
    """Whether every test of this directory has been run, in this process."""
    files = {name.partition("::")[0].rpartition("/")[2] for name in _rows}
    return _collected == set(_rows) and files == {path.name for path in Path(__file__).parent.glob("test_*.py")}


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _is_whole() or hasattr(session.config, "workerinput"):  # a worker of xdist sees a part of them only
        return
    machine = describe()
    lines = [
        "# Other people's code, and attackers",
        "",
        f"Written by `make contact`, {machine['date']}: Python {machine['python']}, torch {machine['torch']}, "
        f"{machine['cores']} cores. Frameworks run on two ranks under torchrun and under `phalanx run`, with gloo as "
        "the backend that the program asks for; passed means that both end with the same numbers on every rank.",
        "",
        "| what was run | version | result | seconds |",
        "| --- | --- | --- | --- |",
    ]
    for _, row in sorted(_rows.items()):
        result = ": ".join(filter(None, (row["outcome"], row.get("result"))))
        lines.append(f"| {row['what']} | {row.get('version', '')} | {result} | {row['seconds']:.0f} |")
    _PAGE.write_text("\n".join(lines) + "\n")

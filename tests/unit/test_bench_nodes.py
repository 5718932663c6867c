"""`phalanx bench nodes`: its arithmetic and its tables, and a small run of it for real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phalanx.bench import nodes
from phalanx.bench.collectives_goals import GLOO, KB, MB, SHM
from phalanx.bench.jobs import Series
from phalanx.bench.nodes_table import least, of_the_link, outcome, tables, verdicts
from phalanx.bench.rows import Row, rows
from phalanx.errors import UsageError
from tests.conftest import Runner


def row(milliseconds: dict[str, float], count: int, link: str, ranks: int = 8, what: str = "all_reduce") -> Row:
    """One turn of each contender in each of two repeats."""
    series = [
        Series(f"{what} over {link}", count, name, ranks, repeat, (time * 1e3,))
        for name, time in milliseconds.items()
        for repeat in range(2)
    ]
    return rows(series)[0]


def test_what_the_link_allows() -> None:
    """125 million bytes take a second over a gigabit."""
    found = row({"shm": 1250.0, "gloo": 2000.0}, 125_000_000, "1gbit")
    assert least(found) == pytest.approx(1e6)
    share = of_the_link(found)
    assert share is not None
    assert share.median == pytest.approx(0.8)
    unshaped = row({"shm": 10.0, "gloo": 20.0}, 125_000_000, "unshaped")
    assert least(unshaped) is None
    assert of_the_link(unshaped) is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"shm": 220.0, "gloo": 400.0}, ["gloo/shm ≥ 1.8: met", "of the link ≥ 80%: met"]),
        ({"shm": 240.0, "gloo": 400.0}, ["gloo/shm ≥ 1.8: missed", "of the link ≥ 80%: met"]),
        ({"shm": 300.0, "gloo": 600.0}, ["gloo/shm ≥ 1.8: met", "of the link ≥ 80%: missed"]),
    ],
)
def test_goals(times: dict[str, float], expected: list[str]) -> None:
    assert verdicts(row(times, 25 * MB, "1gbit")) == expected
    for other in (
        row(times, 25 * MB, "100mbit"),
        row(times, 25 * MB, "1gbit", 4),
        row(times, MB, "1gbit"),
        row(times, 25 * MB, "1gbit", what="DDP step"),
    ):
        assert verdicts(other) == []


def test_the_tables() -> None:
    found = [
        row({"shm": 1.5, "gloo": 3.0}, 4 * KB, "unshaped", 4),
        row({"shm": 240.0, "gloo": 372.0}, 25 * MB, "1gbit", 8),
        row({"alone": 50.0, "shm": 150.0, "gloo": 180.0}, 12 * MB, "1gbit", 8, "DDP step"),
    ]
    lines = [" ".join(line.split()) for line in tables(found).splitlines()]
    assert "| 2 × 2 | unshaped | 4 KB | 3.00 (3.00–3.00) | 1.50 (1.50–1.50) | 2.00 (2.00–2.00) | | |" in lines
    (goal,) = [line for line in lines if "| 25 MB |" in line]
    assert "| 372 (372–372) | 240 (240–240) | 1.55 (1.55–1.55) | 87% (87%–87%) |" in goal
    assert goal.endswith("| gloo/shm ≥ 1.8: missed; of the link ≥ 80%: met |")
    step = "| 2 × 4 | 1gbit | 12.0 | 50 (50–50) | 180 (180–180) | 150 (150–150) | 1.20 (1.20–1.20) |"
    assert step in lines
    assert outcome(found).startswith("Goals: 1 of 2 met.")
    assert outcome(found[:1]).startswith("Goals: none")


def test_flags() -> None:
    jobs = list(nodes.plan(nodes.parse(["--repeats", "2"])))
    assert len(jobs) == 2 * 2 * 3
    assert str(jobs[1]) == "2 nodes, 1gbit, 4 ranks, repeat 1 of 2"
    assert nodes.parse([]).sizes == (4 * KB, MB, 25 * MB)
    with pytest.raises(UsageError, match="'fast' is not a bandwidth"):
        nodes.parse(["--links", "fast"])
    with pytest.raises(UsageError, match="--per-node has 9"):
        nodes.parse(["--per-node", "2,9"])


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="virtual nodes need root, and this is user 1000"):
        nodes.measure(nodes.parse([]))


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")
def test_for_real(phalanx: Runner, tmp_path: Path) -> None:
    flags = ["--per-node", "1", "--links", "1gbit", "--sizes", "4K", "--width", "32", "--seconds", "0.05"]
    got = phalanx("bench", "nodes", *flags, "--repeats", "1", "--out", str(tmp_path))
    assert got.code == 0, got.err
    (page,) = tmp_path.glob("nodes-*.md")
    assert "| 2 × 1         | 1gbit | 4 KB |" in page.read_text()
    (data,) = tmp_path.glob("nodes-*.json")
    found = {(each["measure"], each["contender"]) for each in json.loads(data.read_text())["samples"]}
    reduces = {("all_reduce over 1gbit", name) for name in (SHM, GLOO)}
    assert found == reduces | {("DDP step over 1gbit", name) for name in ("alone", SHM, GLOO)}

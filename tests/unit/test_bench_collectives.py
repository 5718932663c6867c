"""The benchmarks of collectives and of DDP's steps: their arithmetic, and each of them once, with small numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy
import pytest

from phalanx.bench import collectives, ddp_step, ddp_step_table, numbers
from phalanx.bench.collectives_goals import GLOO, KB, LIMIT, MB, MPI, SHM, verdicts
from phalanx.bench.collectives_table import outcome, size, tables
from phalanx.bench.jobs import Job, Series, merge, mpi_version
from phalanx.bench.rows import Row, rows
from phalanx.bench.summary import Summary
from phalanx.bench.turns import Contender, Turns
from phalanx.errors import UsageError
from tests.conftest import Runner, start

needs_mpi = pytest.mark.skipif(mpi_version() is None, reason="needs mpirun and mpi4py")


def row(count: int, ranks: int = 2, measure: str = "all_reduce", **times: float) -> Row:
    """One turn of each contender in each of two repeats."""
    names = {"limit": LIMIT}
    series = [
        Series(measure, count, names.get(name, name), ranks, repeat, (time,))
        for name, time in times.items()
        for repeat in range(2)
    ]
    return rows(series)[0]


def test_quartiles() -> None:
    assert Summary.quartiles([5, 1, 2, 4, 3]) == Summary(3, 2, 4)
    assert Summary.quartiles([7]) == Summary(7, 7, 7)
    assert Summary.quartiles([]) is None


def test_a_turn_lasts_from_the_first_start_to_the_last_end() -> None:
    def note(*spans: tuple[float, float]) -> dict:
        return {"measure": "all_reduce", "size": 4, "contender": SHM, "calls": 2, "spans": spans}

    first, second = note((0.0, 1.0), (10.0, 11.0)), note((2.0, 3.0), (10.5, 10.6))
    assert merge([[first], [second]], 2, 7) == [Series("all_reduce", 4, SHM, 2, 7, (1.5e6, 0.5e6))]


def test_ratios_are_taken_within_a_repeat() -> None:
    """A repeat in which everything was slow changes nothing."""
    series = []
    for repeat, slow in enumerate((1, 100, 1)):
        series += [Series("all_reduce", 4, SHM, 2, repeat, (2.0 * slow, 1.0 * slow, 3.0 * slow))]
        series += [Series("all_reduce", 4, GLOO, 2, repeat, (10.0 * slow,) * 3)]
    (found,) = rows(series)
    assert found.ratio(GLOO, SHM) == Summary(5, 5, 5)
    assert found.ratio(MPI, SHM) is None
    assert found.times[SHM].median == 3.0


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (row(4, shm=10, gloo=200, MPI=2), ["gloo/shm ≥ 20: met", "shm − MPI, µs, ≤ 15: met", "shm, µs, ≤ 15: met"]),
        (row(4, 4, shm=20, gloo=399, MPI=2), ["gloo/shm ≥ 20: missed", "shm − MPI, µs, ≤ 15: missed"]),
        (row(16 * KB, shm=10, gloo=200, MPI=10), ["gloo/shm ≥ 20: met", "MPI/shm ≥ 1: met"]),
        (row(256 * KB, shm=10, gloo=200, MPI=9), ["MPI/shm ≥ 1: missed"]),
        (row(MB, shm=10, gloo=99), ["gloo/shm ≥ 10: missed", "MPI/shm ≥ 1: not measured"]),
        (row(16 * MB, shm=10, gloo=50, MPI=19), ["gloo/shm ≥ 5: met", "MPI/shm ≥ 2: missed"]),
        (
            row(256 * MB, shm=10, gloo=50, MPI=20, limit=8),
            ["gloo/shm ≥ 5: met", "MPI/shm ≥ 2: met", "shm/limit ≤ 1.35: met"],
        ),
        (row(256 * MB, 4, shm=10, gloo=50, MPI=20, limit=1), ["gloo/shm ≥ 5: met", "MPI/shm ≥ 2: met"]),
        (row(25 * MB, measure="broadcast", shm=10, gloo=39), ["gloo/shm ≥ 4: missed"]),
        (row(4, 1, shm=10, gloo=20), []),
    ],
)
def test_goals(found: Row, expected: list[str]) -> None:
    assert verdicts(found) == expected


def test_the_table() -> None:
    found = [row(4, shm=10, gloo=250), row(16 * KB, shm=20, gloo=300), row(4, 1, shm=3), row(4, 4, shm=10, gloo=500)]
    text = tables(found)
    assert "| 2     | 4 B   | 250 (250–250) | 10.0 (10.0–10.0) | 25.0 (25.0–25.0) | gloo/shm ≥ 20: met; " in text
    assert "|       | 16 KB | 300 (300–300) | 20.0 (20.0–20.0) | 15.0 (15.0–15.0) | gloo/shm ≥ 20: missed; " in text
    assert "MPI, µs |" not in text, "a column without figures is left out"
    assert "## The limit" not in text
    assert re.search(r"world of one\n\n.*\n.*\n\| 1     \| 4 B  \| 3\.0", text)
    assert outcome(found) == (
        "Goals: 3 of 4 met, 3 not measured.\n\n- all_reduce of 16 KB, 2 ranks: gloo/shm ≥ 20: missed"
    )


def test_sizes() -> None:
    assert [size(count) for count in (4, 1000, KB, 25 * MB, MB + 4)] == ["4 B", "1000 B", "1 KB", "25 MB", "1048580 B"]
    assert collectives.parse(["--sizes", "4M,16,2K"]).sizes == (16, 2 * KB, 4 * MB)
    for wrong in (["--sizes", "3"], ["--sizes", "K"], ["--other-size", "0"], ["--ranks", "17"], ["--seconds", "-1"]):
        with pytest.raises(UsageError):
            collectives.parse(wrong)
    with pytest.raises(UsageError):
        ddp_step.parse(["--width", "100"])


def test_wrong_numbers_are_an_error() -> None:
    expected = numbers.pattern(2, 300) * numbers.weight_of_all(3)
    found = sum((numbers.pattern(2, 300) * numbers.weight(rank) for rank in range(3)), numpy.zeros((2, 300)))
    numbers.check(found, expected, "all_reduce")
    found[1, 7] -= numbers.weight(1)
    with pytest.raises(ArithmeticError, match=r"wrong numbers: 1 of 600; element 307 is .*, not"):
        numbers.check(found, expected, "all_reduce")


def test_contenders_take_turns() -> None:
    seen: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(name, [lambda: seen.append(name)] * 2, lambda: seen.append("prepare"))

    turns = Turns(lambda: seen.append("barrier"), lambda _: 2, 1.0)
    turns.measure("work", 0, [contender("a"), contender("b")])
    a, b = (["prepare", "barrier", name, name, "barrier"] for name in "ab")
    assert seen == [*a, *b] * 2 + [*a, *b, *b, *a]
    assert [(note["contender"], note["calls"], len(note["spans"])) for note in turns.notes] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]


def test_what_shm_adds_as_a_part_of_what_gloo_adds() -> None:
    assert ddp_step_table.share(row(0, alone=100, shm=120, gloo=200)) == Summary(0.2, 0.2, 0.2)
    assert ddp_step_table.verdict(row(0, alone=100, shm=120, gloo=200)) == "≤ 1/3: met"
    assert ddp_step_table.verdict(row(0, alone=100, shm=150, gloo=200)) == "≤ 1/3: missed"
    assert ddp_step_table.verdict(row(0, alone=100, shm=90, gloo=95)) == "≤ 1/3: not measured"


def test_data_parallel_beside_ddp_is_measured_in_processes_of_its_own() -> None:
    jobs = list(ddp_step.plan(ddp_step.parse(["--ranks", "2", "--repeats", "1", "--wrappers"])))
    ways = ["shm, DDP", "shm, data_parallel", "gloo, DDP", "gloo, data_parallel"]
    assert [job.order.get("only") for job in jobs] == [None, *ways]
    times: dict[str, float] = {"alone": 100, "buckets": 110, "shm": 120, "gloo": 200, "all_reduce": 10}
    found = row(0, 2, "step", **times, **dict(zip(ways, (140.0, 70.0, 9.0, 8.0), strict=True)))
    text = ddp_step_table.tables([found])
    assert re.search(r"\| shm .*\| 0\.50 \(0\.50–0\.50\)", text)
    assert "data_parallel beside" not in ddp_step_table.tables(
        [row(0, alone=1, buckets=1, shm=1, gloo=2, all_reduce=1)]
    )


# ---- for real


def test_collectives_for_real(phalanx: Runner, tmp_path: Path) -> None:
    flags = ["--ranks", "2", "--sizes", "4,16K", "--other-size", "48K", "--seconds", "0.01", "--repeats", "1"]
    got = phalanx("bench", "collectives", *flags, "--out", str(tmp_path / "out"))
    assert got.code == 0, got.err
    assert "## all_reduce" in got.out
    (path,) = (tmp_path / "out").glob("collectives-*.json")
    samples = json.loads(path.read_text())["samples"]
    found = {(sample["measure"], sample["size"], sample["contender"], sample["ranks"]) for sample in samples}
    pairs = [("all_reduce", 4, 2), ("all_reduce", 16 * KB, 2), ("all_reduce", 4, 1)]
    pairs += [(name, 48 * KB, 2) for name in ("broadcast", "all_gather", "reduce_scatter", "all_to_all")]
    expected = {(name, count, contender, ranks) for name, count, ranks in pairs for contender in (SHM, GLOO)}
    expected.add(("all_reduce", 16 * KB, LIMIT, 2))
    if mpi_version() is not None:
        expected |= {("all_reduce", 4, MPI, 2), ("all_reduce", 16 * KB, MPI, 2)}
    assert found == expected
    assert all(time > 0 for sample in samples for time in sample["microseconds"])


def test_without_mpi_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Job] = []
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(collectives, "take", lambda jobs: asked.extend(jobs) or [])
    report = collectives.measure(collectives.parse(["--ranks", "2,4", "--repeats", "1"]))
    assert [(job.name, job.ranks) for job in asked] == [("shm and gloo", 2), ("shm and gloo", 4), ("shm and gloo", 1)]
    assert report.machine["MPI"] == "not installed"
    assert "bench: mpirun or mpi4py is not installed, so MPI is left out\n" in capsys.readouterr().err


def test_ddp_step_for_real(phalanx: Runner, tmp_path: Path) -> None:
    flags = ["--ranks", "2", "--width", "32", "--seconds", "0.01", "--repeats", "1"]
    got = phalanx("bench", "ddp-step", *flags, "--out", str(tmp_path / "out"))
    assert got.code == 0, got.err
    assert "## Where shm's part goes" in got.out
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_job_that_fails_is_explained(phalanx: Runner, tmp_path: Path) -> None:
    flags = ["--ranks", "2", "--sizes", "4", "--timeout", "0.2", "--out", str(tmp_path / "out")]
    got = phalanx("bench", "collectives", *flags)
    assert got.code == 2
    assert "collectives_rank.py" in got.complaint[0]
    assert "was still running after 0.2 s" in got.complaint[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("job", ["1/", pytest.param("2/", marks=needs_mpi)])
def test_ctrl_c_leaves_nothing(job: str, tmp_path: Path) -> None:
    """While torch's ranks run, without mpirun on PATH, and while MPI's do; the leak police looks for what is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("env", "sh"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    environment = {"TMPDIR": str(temporary), **({"PATH": str(tmp_path / "bin")} if job == "1/" else {})}
    flags = ["--ranks", "2", "--sizes", "64M", "--other-size", "8K", "--seconds", "0.5", "--repeats", "9"]
    command = ["-m", "phalanx", "bench", "collectives", *flags]
    with start(*command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        seen = ""
        while f"bench: {job}" not in seen:
            seen += os.read(process.stderr.fileno(), 4096).decode()
        deadline = time.monotonic() + 10
        while job == "2/" and not list(Path("/dev/shm").glob("phalanx-bench-*/*")):
            assert time.monotonic() < deadline, "MPI's ranks have no shared memory where it was to be"
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 130
    assert ("so MPI is left out" in seen) == (job == "1/")
    assert "interrupted; nothing was written, and nothing is left running" in rest
    assert not list(temporary.iterdir())
    assert not (tmp_path / "results").exists()

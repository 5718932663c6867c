"""`phalanx bench`: statistics, tables and flags, and each of its two benchmarks once, with small numbers."""

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

from phalanx.bench import collectives, launch
from phalanx.bench.collectives import GLOO, LIMIT, MPI, SHM
from phalanx.bench.commands import Sample, merge, mpi_version, take
from phalanx.bench.common import KB, MB, Row, Summary, by_contender, compare, rows, show, size_text
from phalanx.bench.ranks import Contender, Turns, calls_of, check, pattern
from phalanx.errors import UsageError
from tests.conftest import Runner, start

needs_mpi = pytest.mark.skipif(not mpi_version(), reason="needs mpirun and mpi4py")


def row(count: int, ranks: int = 2, measure: str = "all_reduce", **times: float) -> Row:
    """One turn of each contender, of so many µs, in each of two repeats."""
    names = {"limit": LIMIT}
    samples = [
        Sample(measure, names.get(name, name), ranks, repeat, (time / 1e6,), count)
        for name, time in times.items()
        for repeat in range(2)
    ]
    return rows(samples)[0]


def test_quartiles_and_extremes() -> None:
    assert Summary.quartiles([5, 1, 2, 4, 3]) == Summary(3, 2, 4)
    assert Summary.quartiles([7]) == Summary(7, 7, 7)
    assert Summary.quartiles([]) is None
    many, few = (rows([Sample("start", "x", 2, n, values) for n in range(5)])[0] for values in ((1.0, 9.0), (1.0,)))
    assert many.times("x") == Summary(5.0, 1.0, 9.0)
    assert few.times("x") == Summary(1.0, 1.0, 1.0)
    assert few.times("y") is None
    assert [show(Summary(value, 1, 2)) for value in (3.14159, 31.4159, 314.159)] == [
        "3.14 (1.00–2.00)",
        "31.4 (1.0–2.0)",
        "314 (1–2)",
    ]


def test_a_turn_lasts_from_the_first_start_to_the_last_end() -> None:
    def note(*spans: tuple[float, float]) -> dict:
        return {"measure": "all_reduce", "size": 4, "contender": SHM, "calls": 2, "spans": spans}

    first, second = note((0.0, 1.0), (10.0, 11.0)), note((2.0, 3.0), (10.5, 10.6))
    assert merge([[first], [second]], 7) == [Sample("all_reduce", SHM, 2, 7, (1.5, 0.5), 4)]


def test_ratios_are_taken_within_a_repeat() -> None:
    """A repeat in which everything was slow changes nothing."""
    samples = []
    for repeat, slow in enumerate((1, 100, 1)):
        samples += [Sample("all_reduce", SHM, 2, repeat, (2.0 * slow, 1.0 * slow, 3.0 * slow), 4)]
        samples += [Sample("all_reduce", GLOO, 2, repeat, (10.0 * slow,) * 3, 4)]
    (found,) = rows(samples)
    assert found.ratio(GLOO, SHM) == Summary(5, 5, 5)
    assert found.ratio(MPI, SHM) is None
    assert found.times(SHM) == Summary(3.0, 2.0, 100.0)


def test_costs_are_of_turns_beside_each_other() -> None:
    """While the machine becomes slower; the medians are equal."""
    turns = {"without": (10.0, 20.0, 30.0), "with": (11.0, 31.0, 20.0)}
    (found,) = rows([Sample("step", name, 2, 0, values) for name, values in turns.items()])
    assert found.cost("with", "without") == Summary(1, 1, 1)
    text = compare("Cost", [found], ("without",), costs=[("with", "without")])
    assert "| 1000 (1000–1000), 5.00% |" in text


def test_the_table() -> None:
    found = [row(4, shm=10, gloo=250), row(16 * KB, shm=20, gloo=300), row(4, 1, shm=3), row(4, 4, shm=10, gloo=500)]
    text = "\n\n".join(filter(None, collectives.tables(found, collectives.BENCHMARK.parse([]))))
    assert "| 2     | all_reduce | 4 B   | 250 (250–250) | 10.0 (10.0–10.0) | 25.0 (25.0–25.0) |" in text
    assert "|       | all_reduce | 16 KB | 300 (300–300) | 20.0 (20.0–20.0) | 15.0 (15.0–15.0) |" in text
    assert "MPI, µs |" not in text, "a column without figures is left out"
    assert "## The limit" not in text
    assert re.search(r"world of one\n\n.*\n.*\n\| 1     \| all_reduce \| 4 B  \| 3\.00", text)


def test_the_table_of_launchers() -> None:
    samples = [
        Sample("start", name, 2, n, (s,)) for n in range(2) for name, s in (("torchrun", 4.0), ("phalanx fork", 1.0))
    ]
    samples += [Sample("start", "accelerate launch", 2, n, (), note="starts one process") for n in range(2)]
    text = " ".join(by_contender("Start", rows(samples), "start", "torchrun").split())
    assert "| phalanx fork | 1.00 (1.00–1.00) | 0.25 (0.25–0.25) | |" in text
    assert "| accelerate launch | | | starts one process (2 of 2) |" in text


def test_sizes() -> None:
    sizes = [size_text(count) for count in (0, 4, 1000, KB, 25 * MB, MB + 4)]
    assert sizes == ["", "4 B", "1000 B", "1 KB", "25 MB", "1.0 MB"]
    assert [calls_of(size) for size in (4, 64 * KB, 256 * KB, MB)] == [100, 64, 16, 1]
    assert collectives.BENCHMARK.parse(["--sizes", "4M,16,2K"]).sizes == (16, 2 * KB, 4 * MB)
    for wrong in (["--sizes", "3"], ["--sizes", "K"], ["--other-size", "0"], ["--ranks", "17"], ["--seconds", "-1"]):
        with pytest.raises(UsageError):
            list(collectives.plan(collectives.BENCHMARK.parse(wrong)))
    for wrong in (["--restart-ranks", "1"], ["--memory-ranks", "-1"], ["--ranks", "0"]):
        with pytest.raises(UsageError):
            list(launch.plan(launch.BENCHMARK.parse(wrong)))


def test_wrong_numbers_are_an_error() -> None:
    expected = pattern(2, 300) * 7
    found = sum((pattern(2, 300) * 2**rank for rank in range(3)), numpy.zeros((2, 300)))
    check(found, expected, "all_reduce")
    found[1, 7] -= 2
    with pytest.raises(ArithmeticError, match=r"wrong numbers: 1 of 600; element 307 is .*, not"):
        check(found, expected, "all_reduce")


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
    if mpi_version():
        expected |= {("all_reduce", 4, MPI, 2), ("all_reduce", 16 * KB, MPI, 2)}
    assert found == expected
    assert all(time > 0 for sample in samples for time in sample["values"])


def test_launch_for_real() -> None:
    """A start with its memory, a restart, and the command without work, of phalanx."""
    flags = ["--ranks", "2", "--memory-ranks", "2", "--restart-ranks", "2", "--repeats", "1"]
    steps = list(launch.plan(launch.BENCHMARK.parse(flags)))
    assert [step.label for step in steps if launch.TORCHRUN in step.label] == [
        f"{measure}, torchrun, 2 ranks, repeat 1" for measure in ("warm-up", "start", "memory", "restart")
    ]
    wanted = ("memory, phalanx fork", "restart, phalanx fork", "help, phalanx --help, repeat 1")
    memory, restart, help_ = take([step for step in steps if step.label.startswith(wanted)][:3])
    assert 50 < memory.values[0] < 5000
    assert memory.note.endswith(" processes")
    assert 0 < restart.values[0] < 60
    assert 0 < help_.values[0] < 60


def test_without_mpi_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not mpi_version()
    steps = list(collectives.plan(collectives.BENCHMARK.parse(["--ranks", "2,4", "--repeats", "1"])))
    words = ["2 ranks", "4 ranks", "1 rank"]
    assert [step.label for step in steps] == [f"shm and gloo, {ranks}, repeat 1 of 1" for ranks in words]
    assert "bench: mpirun or mpi4py is not installed, so MPI is left out\n" in capsys.readouterr().err


def test_a_job_that_fails_is_explained(phalanx: Runner, tmp_path: Path) -> None:
    flags = ["--ranks", "2", "--sizes", "4", "--timeout", "0.2", "--out", str(tmp_path / "out")]
    got = phalanx("bench", "collectives", *flags)
    assert got.code == 2
    assert "phalanx.bench.ranks" in got.complaint[0]
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
    seconds = "0.5" if job == "1/" else "0.1"  # MPI's come when torch's have taken as long
    flags = ["--ranks", "2", "--sizes", "64M", "--other-size", "8K", "--seconds", seconds, "--repeats", "9"]
    command = ["-m", "phalanx", "bench", "collectives", *flags]
    with start(*command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        seen = ""
        while f"bench: {job}" not in seen:
            seen += os.read(process.stderr.fileno(), 4096).decode()
        deadline = time.monotonic() + 60
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

"""The programs in benchmarks/: their arithmetic and checks, and each of them once, with small numbers.

Those whose ranks need nothing but `phalanx run` share one run: importing torch is what costs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import checkpoint
import common
import ddp_step
import dp_vs_ddp
import nodes
import preemption
import pytest
import recorder
import recovery
import sampler
import stop_point
import track
from torch import nn

from phalanx.bench.commands import Sample, installed, merge
from phalanx.bench.common import MB, Row, rows
from phalanx.errors import UsageError
from tests.conftest import REPOSITORY

PROGRAMS = REPOSITORY / "benchmarks"
ALL = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "common")


def row(size: int, ranks: int = 2, measure: str = "all_reduce", *, times: dict[str, float]) -> Row:
    """One turn of each contender, of so many ms, in each of two repeats."""
    samples = [Sample(measure, name, ranks, n, (time / 1e3,), size) for name, time in times.items() for n in range(2)]
    return rows(samples)[0]


def run(program: ModuleType, *flags: str, out: Path) -> int:
    argv = [*flags, "--repeats", "1", "--out", str(out)]
    return common.main(program.BENCHMARK, getattr(program, "rank", None), argv)


def results(out: Path, name: str) -> tuple[list[dict[str, Any]], str]:
    (data,) = out.glob(f"{name}-*.json")
    return json.loads(data.read_text())["samples"], data.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", ALL)
def test_make_bench_runs_every_program(name: str) -> None:
    assert f"benchmarks/{name}.py" in (REPOSITORY / "Makefile").read_text()
    assert importlib.import_module(name).BENCHMARK.name == name.replace("_", "-")


# ---- those that share a run

ORDERS: dict[str, dict[str, Any]] = {
    "checkpoint": {"megabytes": 2, "rounds": 1, "steps": 2},
    "track": {"milliseconds": 1, "steps": 5, "seconds": 0.1},
    "stop_point": {"steps": 5, "seconds": 0.05},
    "recorder": {"calls": 5, "widths": [16], "seconds": 0.05},
    "ddp_step": {"width": 32, "seconds": 0.01},
    "dp_vs_ddp": {"models": ["MLP"], "replicas": 2, "batch": 4, "width": 16, "cores": 2, "seconds": 0.01},
}
TORCH_SAVE = {"saves": recovery.THEIRS, "ranks": 2, "width": 16}
DRIVER = """
import importlib, os, pathlib, sys
sys.path.insert(0, {programs!r})
from torch.distributed import distributed_c10d as c10d
def run(number, name):
    c10d._world.group_count = 100 * number  # or gloo would find the addresses of the program before
    importlib.import_module(name).rank(pathlib.Path({directory!r}, name))
if __name__ == "__main__":  # a contender of checkpoint.py starts a process that imports this
    for number, name in enumerate({names!r}):
        run(number, name)
    import recovery
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # nobody is killed
    for recovery.STEPS in (20, 30):
        run(recovery.STEPS, "recovery")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def measured(shared: Path) -> dict[str, list[Row]]:
    """What two ranks of each of these programs have measured."""
    directory = shared
    for name, order in {**ORDERS, "recovery": TORCH_SAVE}.items():
        (directory / name).mkdir()
        (directory / name / "order.json").write_text(json.dumps(order))
    driver = directory / "driver.py"
    driver.write_text(DRIVER.format(programs=str(PROGRAMS), names=list(ORDERS), directory=str(directory)))
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(driver)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    got = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=180)
    assert got.returncode == 0, got.stdout + got.stderr
    found = {}
    for name in ORDERS:
        notes = [json.loads((directory / name / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        found[name] = rows(merge(notes, 0))
    return found


def contenders(found: list[Row]) -> dict[str, set[str]]:
    assert all(value > 0 for each in found for samples in each.samples.values() for value in samples[0].values)
    return {each.measure: set(each.samples) for each in found}


def test_recorder(measured: dict[str, list[Row]]) -> None:
    work = [f"{what}, {by}" for what in ("all_reduce of 4 B", "DDP step, width 16") for by in ("shm", "gloo")]
    assert contenders(measured["recorder"]) == {each: {"without", "with"} for each in work}
    (text,) = recorder.tables(measured["recorder"], recorder.BENCHMARK.parse([]))
    assert all(f"| {what} " in text for what in work)
    assert "with − without, µs" in text


def test_track(measured: dict[str, list[Row]]) -> None:
    assert contenders(measured["track"]) == {each: {"bare", "tracked"} for each in ("work", "nothing")}
    samples = [Sample("work", name, 2, 0, (time,) * 3) for name, time in (("bare", 0.5), ("tracked", 0.507))]
    (text,) = track.tables(rows(samples), track.BENCHMARK.parse([]))
    assert "| 7.00 (7.00–7.00), 1.40% |" in text


def test_stop_point(measured: dict[str, list[Row]]) -> None:
    assert contenders(measured["stop_point"]) == {"steps": {"off", "on"}}
    (text,) = stop_point.tables(measured["stop_point"], stop_point.BENCHMARK.parse([]))
    assert "| on − off, " in text


def test_ddp_step(measured: dict[str, list[Row]]) -> None:
    everything = {"alone", "buckets", "shm", "gloo", "all_reduce"}
    assert contenders(measured["ddp_step"]) == dict.fromkeys(("MLP", "transformer"), everything)
    first, _ = ddp_step.tables(measured["ddp_step"], ddp_step.BENCHMARK.parse([]))
    assert "| MLP " in first
    assert "| transformer " in first
    share = ddp_step.share(row(0, times={"alone": 100, "shm": 120, "gloo": 200}))
    assert share is not None
    assert share.median == pytest.approx(0.2)
    assert ddp_step.share(row(0, times={"alone": 100, "shm": 90, "gloo": 95})) is None
    jobs = list(ddp_step.plan(ddp_step.BENCHMARK.parse(["--ranks", "2", "--repeats", "1"])))
    ways = ["shm, DDP", "shm, data_parallel", "gloo, DDP", "gloo, data_parallel"]
    assert [job.label for job in jobs] == [f"{name}, 2 ranks, repeat 1 of 1" for name in ("DDP", *ways)]
    found = row(0, times=dict(zip(ways, (140.0, 70.0, 9.0, 8.0), strict=True)))
    _, second = ddp_step.tables([found], ddp_step.BENCHMARK.parse([]))
    assert "| 0.50 (0.50–0.50) |" in " ".join(second.split())
    with pytest.raises(UsageError, match="--width is 100"):
        list(ddp_step.plan(ddp_step.BENCHMARK.parse(["--width", "100"])))


def test_dp_vs_ddp(measured: dict[str, list[Row]]) -> None:
    names = (dp_vs_ddp.ONE, dp_vs_ddp.ALL, dp_vs_ddp.DP, dp_vs_ddp.DP_SHARED, dp_vs_ddp.DDP, dp_vs_ddp.DDP_GLOO)
    assert contenders(measured["dp_vs_ddp"]) == {"MLP": set(names)}
    turns = dp_vs_ddp.Turns(lambda: None, int, 1.0)
    dp_vs_ddp._parts(turns, "MLP", ORDERS["dp_vs_ddp"])
    parts = rows(merge([turns.notes], 0))
    with_replicas = set(dp_vs_ddp.PARTS)
    alone = with_replicas - {"scatter", "replicate", "gather"}
    assert contenders(parts) == {"MLP: one thread": alone, "MLP: dp, cores shared": with_replicas}
    first, second = dp_vs_ddp.tables([*measured["dp_vs_ddp"], *parts], dp_vs_ddp.BENCHMARK.parse([]))
    assert "| dp / ddp shm " in first
    assert "| MLP: one thread " in second
    for wrong in (["--replicas", "3"], ["--replicas", "1"], ["--width", "0"], ["--models", "GPT"]):
        with pytest.raises(UsageError):
            list(dp_vs_ddp.plan(dp_vs_ddp.BENCHMARK.parse(wrong)))


def test_checkpoint(measured: dict[str, list[Row]]) -> None:
    everything = set(checkpoint.CONTENDERS)
    after = {*checkpoint.ASYNC, checkpoint.NOTHING}
    assert contenders(measured["checkpoint"]) == {"held up": everything, "after": after, "durable": everything}
    times: dict[str, float] = dict(zip(checkpoint.CONTENDERS, (10.0, 20.0, 50.0, 60.0, 90.0), strict=True))
    found = [row(100 * MB, 2, measure, times=times) for measure in ("held up", "durable")]
    found.append(row(100 * MB, 2, "after", times={"no save": 100, "px.Checkpointer": 105}))
    held, after_text, durable = checkpoint.tables(found, checkpoint.BENCHMARK.parse([]))
    assert "| 100 MB | 10.0 (10.0–10.0) " in held
    ratios = "| 2.00 (2.00–2.00) | 5.00 (5.00–5.00) | 6.00 (6.00–6.00) | 9.00 (9.00–9.00) |"
    assert all(ratios in " ".join(text.split()) for text in (held, durable))
    assert "| 5.00 (5.00–5.00), 5.00% |" in " ".join(after_text.split())


def test_models_that_took_other_steps_are_an_error() -> None:
    models: dict[str, nn.Module] = {name: common.mlp(4) for name in ("shm", "gloo")}
    models["gloo"].load_state_dict(models["shm"].state_dict())
    common.check_same(models, ("shm", "gloo"))
    next(models["gloo"].parameters()).data[0] += 0.01
    with pytest.raises(ArithmeticError, match=r"0\.weight of shm and gloo differ by 0\.01"):
        common.check_same(models, ("shm", "gloo"))


# ---- those that start processes of their own


def test_a_whole_program(tmp_path: Path) -> None:
    """As a command: its flags, its progress, its result files; and a mistake is one line."""
    program = [sys.executable, str(PROGRAMS / "agent_imports.py")]
    got = subprocess.run([*program, "--repeats", "2", "--out", "found"], cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode == 0, got.stderr
    samples, page = results(tmp_path / "found", "agent-imports")
    modules = [sample["values"][0] for sample in samples if sample["measure"] == "modules"]
    assert len(modules) == 2
    assert all(20 < count < 120 for count in modules)
    assert all(0 < sample["values"][0] < 20 for sample in samples if sample["measure"] == "imports")
    assert "| CPU of their imports, ms | " in page
    assert "bench: 2/2 the agent of one node, repeat 2 of 2: " in got.stderr
    assert page.partition("## ")[2] in got.stdout + "\n"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recorder, "--calls", "0", out=tmp_path) == 2
    expected = "benchmarks/recorder.py: argument --calls: '0' is not a positive number"
    assert capsys.readouterr().err.startswith(expected)


def test_what_the_link_allows() -> None:
    """125 million bytes take a second over a gigabit."""
    found = row(125_000_000, 8, "all_reduce over 1gbit", times={"shm": 1250, "gloo": 2000})
    assert nodes.of_the_link(found) == "0.80 (0.80–0.80)"
    assert nodes.of_the_link(row(125_000_000, 8, "all_reduce over unshaped", times={"shm": 10, "gloo": 20})) == ""
    (text,) = nodes.tables([found], nodes.BENCHMARK.parse([]))
    assert "| 1.60 (1.60–1.60) | 0.80 (0.80–0.80) |" in " ".join(text.split())


def test_flags_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    jobs = list(nodes.plan(nodes.BENCHMARK.parse(["--repeats", "2"])))
    assert len(jobs) == 2 * 2 * 3
    assert jobs[1].label == "2 nodes, 1gbit, 4 ranks, repeat 1 of 2"
    with pytest.raises(UsageError, match="'fast' is not a bandwidth"):
        list(nodes.plan(nodes.BENCHMARK.parse(["--links", "fast"])))
    with pytest.raises(UsageError, match="--per-node has 9"):
        list(nodes.plan(nodes.BENCHMARK.parse(["--per-node", "2,9"])))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="virtual nodes need root, and this is user 1000"):
        list(nodes.plan(nodes.BENCHMARK.parse([])))


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")
def test_nodes_for_real(tmp_path: Path) -> None:
    flags = ["--per-node", "1", "--links", "1gbit", "--sizes", "4K", "--width", "32", "--seconds", "0.05"]
    assert run(nodes, *flags, out=tmp_path) == 0
    samples, page = results(tmp_path, "nodes")
    assert "all_reduce over 1gbit | 4 KB" in " ".join(page.split())
    reduces = {("all_reduce over 1gbit", name) for name in ("shm", "gloo")}
    steps = {("DDP step over 1gbit", name) for name in ("alone", "shm", "gloo")}
    assert {(each["measure"], each["contender"]) for each in samples} == reduces | steps


# ---- samplers


def test_samplers(tmp_path: Path) -> None:
    """The others are left out: each would import torch once more. The next test measures them here."""
    flags = "--lengths 5000 --epoch-lengths 20000 --ranks 2 --longest-list 100".split()
    assert run(sampler, *flags, out=tmp_path) == 0
    samples, page = results(tmp_path, "sampler")
    assert "left out: its list would take 0 GB (1 of 1)" in page
    figures = {each["measure"]: each["values"] for each in samples if each["contender"] == sampler.OURS}
    assert figures.keys() == {"epoch", "first", "memory", "traced"}
    assert all(values[0] > 0 for measure, values in figures.items() if measure != "memory")
    others = {each["contender"]: each["values"] for each in samples if each["contender"] != sampler.OURS}
    names = [sampler.TORCH, sampler.TORCHDATA] if installed("torchdata") else [sampler.TORCH]
    assert others == {name: [] for name in names}


@pytest.mark.filterwarnings("ignore")  # what torchdata's import says is not ours
@pytest.mark.parametrize("contender", [sampler.TORCH, sampler.TORCHDATA])
def test_the_other_samplers_are_measured(contender: str, tmp_path: Path) -> None:
    if contender == sampler.TORCHDATA and not installed("torchdata"):
        pytest.skip("needs torchdata")
    for measure, expected in (("first", {"first", "memory"}), ("epoch", {"epoch"})):
        order = {"measure": measure, "contender": contender, "length": 5000, "ranks": 2}
        (tmp_path / "order.json").write_text(json.dumps(order))
        sampler.rank(tmp_path)
        notes = json.loads((tmp_path / "notes.json").read_text())
        assert notes.keys() == expected
        assert notes[measure] > 0


def test_lengths_of_samplers() -> None:
    assert sampler.lengths("1e6,20,1e3") == (20, 1000, 10**6)
    for wrong in ("x", "1e", "0", "1e-3", ""):
        with pytest.raises(UsageError):
            sampler.BENCHMARK.parse(["--lengths", wrong])


# ---- preemption


def test_what_launchers_make_of_a_signal(tmp_path: Path) -> None:
    assert preemption.describe_end(tmp_path, "exit code 1", 6) == "no rank saves, exit code 1, 6 processes left"
    for rank, step in enumerate("78"):
        (tmp_path / f"saved-{rank}").write_text(step)
    assert preemption.describe_end(tmp_path, "hangs", 0) == "saves different steps, hangs"
    (tmp_path / "saved-1").write_text("7")
    ends = [preemption.describe_end(tmp_path, f"exit code {code}", 0) for code in (143, 143, 0)]
    samples = [Sample("every", "phalanx", 2, repeat, (1.0,), note=end) for repeat, end in enumerate(ends)]
    (text,) = preemption.tables(rows(samples), preemption.BENCHMARK.parse(["--contenders", "phalanx"]))
    assert "| saves, exit code 143 (2 of 3); saves, exit code 0 (1 of 3) |" in text


# ---- recovery

REFERENCE = {step: 100.0 / step for step in range(1, recovery.STEPS + 1)}


def note(time: float, event: str, rank: int = 0, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": event, "rank": rank, "attempt": attempt, **fields}


def notes() -> list[dict[str, Any]]:
    """Of a run that was killed after step 25 and did what it should; every phase has another length."""
    first = [note(0, "step", attempt=0, step=step, loss=REFERENCE[step]) for step in range(1, 26)]
    times = {"begun": 17.0, "joined": 21.0, "built": 26.0, "loaded": 32.0}
    second = [note(time - rank / 2, event, rank, step=20) for rank in (0, 1) for event, time in times.items()]
    steps = [note(18.0 + step, "step", step=step, loss=REFERENCE[step]) for step in range(21, 31)]
    return [*first, note(11.0, "killed", rank=1, attempt=0), *second, *steps]


AGENT = [{"time": time, "event": event} for time, event in ((12.0, "exited"), (13.5, "exited"), (14.0, "restarting"))]


def test_the_phases_follow_one_another_from_the_kill_to_the_step() -> None:
    found = recovery.phases(notes(), AGENT)
    assert found == dict(zip(recovery.PHASES, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), strict=True))
    without = recovery.phases(notes(), [])
    assert without == {"begin": 6.0, "join": 4.0, "build": 5.0, "load": 6.0, "step": 7.0}
    assert sum(found.values()) == sum(without.values()) == 39.0 - 11.0
    failed = [each for each in notes() if each["attempt"] == 0 or each["event"] in ("begun", "joined")]
    assert recovery.phases(failed, []) == {"begin": 6.0, "join": 4.0}


def test_only_a_run_that_resumed_rightly_counts() -> None:
    def problem(found: list[dict[str, Any]]) -> str:
        return recovery.problem(found, 2, REFERENCE)

    def changed(what: str, attempt: int, **fields: Any) -> list[dict[str, Any]]:
        """In all such notes of rank 0."""
        return [
            {**each, **fields} if (each["event"], each["attempt"], each["rank"]) == (what, attempt, 0) else each
            for each in notes()
        ]

    assert problem(notes()) == ""
    assert problem([each for each in notes() if each["event"] != "killed"]) == "had 0 ranks killed instead of 1"
    assert problem(changed("loaded", 1, step=0)).startswith("resumed at the steps [0, 20], and 2 ranks")
    assert problem(changed("loaded", 1, event="lost")).startswith("resumed at the steps [20], and 2 ranks")
    assert problem(changed("step", 1, loss=1.01)) == "has the loss 1.01 at step 21 of attempt 1, not 4.7619"
    assert problem(changed("step", 0, loss=100.0)) == "has the loss 100 at step 2 of attempt 0, not 50"
    assert problem(changed("step", 1, step=30)).startswith("has not taken the steps [21, 22")
    # Rank 0 may have lost its peer within the step after which that one was killed.
    assert problem([each for each in notes() if (each["attempt"], each.get("step")) != (0, 25)]) == ""


def test_the_tables_of_recovery() -> None:
    samples = []
    for repeat, torchrun in enumerate((4.0, 5.0, None)):
        samples += [Sample("recovery", "phalanx", 4, repeat, (1.0,)), Sample("notice", "phalanx", 4, repeat, (0.01,))]
        samples.append(Sample("recovery", "torchrun", 4, repeat, (), note="fails: ended with exit code 1"))
        if torchrun:  # it was tried again
            samples.append(Sample("recovery", "torchrun", 4, repeat, (torchrun,)))
    settings = recovery.BENCHMARK.parse(["--ranks", "4", "--contenders", "phalanx,torchrun"])
    whole, phases = (" ".join(text.split()) for text in recovery.tables(rows(samples), settings))
    assert "| 4 | phalanx | 1.00 (1.00–1.00) | 0.23 (0.20–0.25) | |" in whole
    assert "| torchrun | 4.50 (4.00–5.00) | 1.00 (1.00–1.00) | fails: ended with exit code 1 (3 of 5) |" in whole
    assert "| 4 | phalanx | 10 |" in phases
    for wrong in (["--contenders", "phalanx,slurm"], ["--tries", "0"], ["--width", "x"], ["--ranks", "1,2"]):
        with pytest.raises(UsageError, match=wrong[0]):
            list(recovery.plan(recovery.BENCHMARK.parse(wrong)))


def test_recovery_for_real(tmp_path: Path) -> None:
    """With phalanx alone, for torchrun's restarts fail or hang as it happens."""
    assert run(recovery, "--ranks", "2", "--width", "64", "--contenders", "phalanx", out=tmp_path) == 0
    samples, _ = results(tmp_path, "recovery")
    taken = {each["measure"]: each["values"][0] for each in samples}
    assert tuple(taken) == (*recovery.PHASES, "recovery")
    assert all(seconds > 0 for seconds in taken.values())
    assert taken.pop("recovery") == pytest.approx(sum(taken.values()))


def test_the_script_with_torch_save_resumes(measured: dict[str, list[Row]], shared: Path) -> None:
    """At step 20, where its first part ended; from there on its losses are those of the reference."""
    found = recovery._read(shared / "recovery")
    assert [each["step"] for each in found if each["event"] == "loaded"] == [0, 20] * 2
    assert recovery.losses(found, 1) == pytest.approx(recovery.take_reference(2, 16), rel=recovery.SAME)

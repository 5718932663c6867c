"""For the script, a forked worker is like a fresh interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.system import cgroups
from tests.conftest import WITHOUT_TORCH, Runner, by_rank

PROBE = Path(__file__).with_name("probe.py")
# Against plain `python script.py`: what a launcher changes on purpose.
CHANGED_BY_A_LAUNCHER = {
    *("environment", "torch threads", "stdin", "stdout", "stderr", "session leader", "descriptors", "faulthandler"),
    "frames",
}


def probe(phalanx: Runner, tmp_path: Path, method: str, ranks: int, *how: str) -> list[dict]:
    out = tmp_path / method
    stdin = tmp_path / "stdin.txt"
    stdin.write_text("a line\n")
    with stdin.open() as file:
        outcome = phalanx(
            "run",
            "--nproc-per-node",
            str(ranks),
            "--start-method",
            method,
            *how,
            str(out),
            "--lr",
            "1",
            stdin=file,
        )
    assert outcome.code == 0, outcome.err
    for rank in range(ranks):
        own = [line for line in outcome.lines if ranks == 1 or line.startswith(f"[rank {rank}]")]
        assert [line.rpartition("] ")[2] for line in own] == ["probed", "thread ran", "atexit ran"]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)]


BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("kind", "ranks"), [("script", 2), ("module", 1)], ids=["script", "module"])
@pytest.mark.long
def test_the_same_probe_both_ways(kind: str, ranks: int, phalanx: Runner, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    shutil.copy(PROBE, tmp_path / "pkg" / "probe.py")
    how = ["-m", "pkg.probe"] if kind == "module" else ["pkg/probe.py"]
    forked = probe(phalanx, tmp_path, "fork", ranks, *how)
    fresh = probe(phalanx, tmp_path, "exec", ranks, *how)
    if kind == "script":
        assert forked[0]["facts"].pop("loaders") == {"fork": BATCHES, "spawn": BATCHES}
        assert fresh[0]["facts"].pop("loaders") is None
    for ours, theirs in zip(forked, fresh, strict=True):
        # The two probes share one standard input, so only one of the ranks can read the line.
        for facts in (ours["facts"], theirs["facts"]):
            assert facts.pop("stdin") in ("a line\n", "")
        differing = {name for name in theirs["facts"] if ours["facts"].get(name) != theirs["facts"][name]}
        assert not differing, {name: (ours["facts"].get(name), theirs["facts"][name]) for name in differing}
    numbers = [number for result in (*forked, *fresh) for number in result["random"]["random"]]
    assert len(set(numbers)) == len(numbers), "random states must differ between processes"
    assert len({result["random"]["authkey"] for result in (*forked, *fresh)}) == 2 * ranks
    if kind == "script":
        plain = plain_probe(tmp_path, how[0])
        assert plain.pop("loaders") is None
        differing = {
            name for name in plain if name not in CHANGED_BY_A_LAUNCHER and forked[0]["facts"][name] != plain[name]
        }
        assert not differing, {name: (forked[0]["facts"][name], plain[name]) for name in differing}


def plain_probe(tmp_path: Path, name: str) -> dict:
    """`python script.py`, without any launcher."""
    variables = ("RANK", "PHALANX_RUN_TOKEN", "PHALANX_RUN_DIR", "TORCHELASTIC_RUN_ID")
    subprocess.run(
        [sys.executable, name, str(tmp_path / "plain"), "--lr", "1"],
        cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(variables, "0")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return json.loads((tmp_path / "plain.0.json").read_text())["facts"]


def test_interpreter_flags_reach_the_workers(script, tmp_path: Path) -> None:
    """The forked one gets no -O: Python would compile all of torch for it, for nobody else."""
    name = script("import sys; print(sys.flags, sys.warnoptions, sys._xoptions)")
    for method, own in (("fork", "-b"), ("exec", "-O")):
        flags = [own, "-X", "dev", "-W", "once"]
        command = [sys.executable, *flags, "-m", "phalanx", "run", "--start-method", method, name]
        plain = [sys.executable, *flags, name]
        expected, got = (
            subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            for words in (plain, command)
        )
        assert got == expected


ENDS = {
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit('a reason')": 1,
    "raise ValueError('x')": 1,
    "import os; os._exit(9)": 9,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": 137,
    "raise KeyboardInterrupt": 130,
}


@pytest.mark.parametrize(("line", "code"), ENDS.items())
def test_exit_codes(line: str, code: int, phalanx: Runner, script) -> None:
    assert phalanx("run", *WITHOUT_TORCH, script(line)).code == code


def test_every_end_is_the_same_both_ways(phalanx: Runner, script, tmp_path: Path) -> None:
    """One run for each way of starting, in which every attempt ends as one of those above, and the last one well."""
    ends = [*ENDS, "pass"]
    name = script(f"import os; exec({ends}[int(os.environ['TORCHELASTIC_RESTART_COUNT'])])")
    causes = {}
    for method in ("fork", "exec"):
        outcome = phalanx("run", "--start-method", method, "--max-restarts", str(len(ends) - 1), name)
        assert outcome.code == 0, outcome.err
        events = [json.loads(line) for line in (tmp_path / "runs/latest/agent.events.jsonl").read_text().splitlines()]
        causes[method] = [event["cause"] for event in events if event["event"] == "restarting"]
    assert causes["fork"] == causes["exec"]
    assert len(set(causes["fork"])) == len(ends) - 1


def test_settings_of_the_script_are_heard_or_said_to_come_too_late(phalanx: Runner, script) -> None:
    """One run for each way of starting, in which every rank looks at something else."""
    name = script(
        """
        import os, sys
        rank = int(os.environ["RANK"])
        if rank < 2:  # set before the import
            os.environ["OMP_NUM_THREADS"] = "15"[rank]
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
            import torch
            settings = torch._C._accelerator_getAllocatorSettings()
            print(settings, torch.get_num_threads(), torch.distributed.get_debug_level().name)
        elif rank == 2:  # numpy's threads are those of a fresh process
            import numpy
            numpy.ones((300, 300)) @ numpy.ones((300, 300))
            print(len(os.listdir("/proc/self/task")))
        elif sys.argv[1] == "fork":  # where torch is loaded already, this is of no use
            os.environ["KMP_AFFINITY"] = "none"
            os.environ["KMP_DUPLICATE_LIB_OK"] = "True"  # these two are what importing sklearn sets
            os.environ["KMP_INIT_AT_FORK"] = "FALSE"
            os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync,max_split_size_mb:32"
            import torch
            assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:32"  # torch would meet an assert of its own
            assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:32"
        """
    )
    # As a module that allocates memory while it is imported: torch has read its settings then.
    script("import torch; torch._C._accelerator_getAllocatorSettings()", name="reads.py")
    forked, fresh = (
        phalanx(
            *("run", "--nproc-per-node", "4", "--start-method", method, "--preload", "reads", name, method),
            env={"OMP_NUM_THREADS": str(cgroups.usable_cores())},
        )
        for method in ("fork", "exec")
    )
    assert by_rank(forked) == by_rank(fresh)
    for rank in (0, 1):
        assert by_rank(forked)[rank][0].startswith("max_split_size_mb:64 ")
        assert by_rank(forked)[rank][0].endswith(" DETAIL")
    assert (forked.code, fresh.code) == (0, 0)
    (late,) = [line for line in forked.told if "KMP_AFFINITY" in line]
    assert late.startswith("[rank 3] ")
    assert "the script set KMP_AFFINITY, backend: of PYTORCH_ALLOC_CONF after torch was loaded" in late
    assert "--start-method exec" in late


def test_modules_beside_the_script_are_preloaded_and_shadow_torchs(phalanx: Runner, script) -> None:
    script("import os; pid = os.getpid(); print('loaded')", name="heavy.py")
    script("answer = 42", name="sympy.py")
    name = script(
        """
        import sys; assert 'heavy' not in sys.modules
        import heavy, os, sympy; print(heavy.pid != os.getpid(), sympy.answer)
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", "--preload", "heavy", name)
    assert sorted(outcome.lines) == ["[rank 0] True 42", "[rank 1] True 42", "loaded"], outcome.err
    script("import sys; answer = 43", name="numpy.py")
    outcome = phalanx("run", script("import numpy; print(numpy.answer)"))
    assert outcome.out == "43\n", outcome.err
    assert "numpy.py has the name of a module" in outcome.err
    refused = phalanx("run", "--start-method", "fork", script("print('no')"))
    assert refused.code != 0
    assert "--start-method fork is not possible" in refused.err


def test_a_preload_that_starts_threads_falls_back_to_exec(phalanx: Runner, script) -> None:
    script(
        "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", name="busy.py"
    )
    outcome = phalanx("run", "--preload", "busy", script("print('ran')"))
    assert outcome.out == "ran\n"
    assert "each rank imports torch by itself" in outcome.err
    assert "busy" in outcome.err


def test_a_preload_that_initialises_a_driver_falls_back_to_exec(phalanx: Runner, script) -> None:
    script(
        """
        import os
        from phalanx.system import procfs
        # torch.cuda.is_available() would ask CUDA itself without this, and leave no sign of it in torch.
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
        plain = procfs.open_files
        procfs.open_files = lambda pid: ["/dev/null", "/dev/nvidia0", "/dev/nvidia-uvm", *plain(pid)]
        """,
        name="driver.py",
    )
    name = script("import os; print('ran', os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'))")
    outcome = phalanx("run", "--preload", "driver", name)
    assert outcome.out == "ran None\n", outcome.err
    assert "because /dev/nvidia-uvm was opened while importing driver" in outcome.err


def test_a_preload_that_cannot_be_imported(phalanx: Runner, script) -> None:
    outcome = phalanx("run", "--preload", "no_such_thing", script("print('no')"))
    assert (outcome.code, outcome.out) == (1, "")
    assert len(outcome.err.splitlines()) == 1
    assert "cannot import no_such_thing" in outcome.err


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_pdb_talks_through_standard_input(method: str, phalanx: Runner, script, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("p 6 * 7\nc\n")
    name = script("x = 1\nbreakpoint()\nprint('after')")
    with (tmp_path / "keys").open() as keys:
        outcome = phalanx("run", "--start-method", method, name, stdin=keys)
    assert outcome.code == 0
    assert "(Pdb) 42" in outcome.out
    assert "after" in outcome.out


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_coverage_of_a_worker(method: str, phalanx: Runner, script, tmp_path: Path) -> None:
    import coverage

    module = "torch" if method == "fork" else "json"  # a fresh interpreter is measured whatever it imports
    name = script(f"import {module}\nif {module} is None:\n    print('never')\nprint('ran')")
    data = tmp_path / "data"
    outcome = phalanx("run", "--start-method", method, "-m", "coverage", "run", f"--data-file={data}", name)
    assert outcome.out == "ran\n", outcome.err
    measured = coverage.CoverageData(str(data))
    measured.read()
    assert measured.lines(str(tmp_path / name)) == [1, 2, 4]


def test_program_of_any_kind(phalanx: Runner) -> None:
    outcome = phalanx("run", "--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(outcome.lines) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


def test_a_program_finds_the_usual_signal_handlers(phalanx: Runner) -> None:
    outcome = phalanx("run", "--no-python", "sh", "-c", "yes | head -n 1")
    assert (outcome.code, outcome.out, outcome.err) == (0, "y\n", "")


def test_run_path_and_directories_and_zip_files(phalanx: Runner, script, tmp_path: Path) -> None:
    script("import sys; print(__name__, sys.argv[1:])", name="app/__main__.py")
    assert phalanx("run", "app", "x").out == "__main__ ['x']\n"
    shutil.make_archive(str(tmp_path / "zipped"), "zip", tmp_path / "app")
    # The same function runs them all, in a forked worker and in a fresh one.
    path = str(tmp_path / "app" / "__main__.py")
    assert phalanx("run", *WITHOUT_TORCH, "zipped.zip", "y").out == "__main__ ['y']\n"
    assert phalanx("run", *WITHOUT_TORCH, "--run-path", path, "z").out == "__main__ ['z']\n"


def test_another_interpreter(phalanx: Runner, script, tmp_path: Path) -> None:
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\necho wrapped\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    outcome = phalanx("run", script("print('ran')"), env={"PYTHON_EXEC": str(other)})
    assert outcome.lines == ["wrapped", "ran"]
    assert "the interpreter is" in outcome.err


def test_a_file_with_the_name_of_a_standard_module(phalanx: Runner, script) -> None:
    """Plain Python finds the script's own; so must a worker, however it is started."""
    script("answer = 44", name="sub/random.py")
    name = script("import random; print(random.answer)", name="sub/train.py")
    for method in ("auto", "exec"):
        assert phalanx("run", "--start-method", method, name).out == "44\n"

"""Frameworks that know nothing of phalanx save when a scheduler ends them, whichever processes it has signalled."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import start
from tests.contact.programs.outcome import digest_weights
from tests.faults.test_preemption import TRAINS

PROGRAMS = Path(__file__).parent / "programs"
TRIALS = int(os.environ.get("TRIALS", "20"))
MOMENTS = os.environ.get("MOMENTS", "steps,saving,evaluation,loading,first,import,steps,steps,steps,early").split(",")
"""What the ranks do when the signal comes: one of these in each trial."""
SLOWEST_IMPORT = 6.0


@pytest.mark.parametrize("whom", ["the launcher", "every process"])
@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_it_saves(package: str, whom: str, tmp_path: Path, record_property) -> None:
    """Stopped by SIGTERM at random moments, loaders on, ranks askew: all ranks save the same step."""
    program = PROGRAMS / f"stop_{'hf' if package == 'transformers' else package}.py"
    failed = []
    for trial in range(TRIALS):
        place, moment = tmp_path / str(trial), MOMENTS[trial % len(MOMENTS)]
        place.mkdir()
        # Imports take most of the time. transformers starts a thread, and is not preloaded.
        flags = () if moment == "import" or package == "transformers" else ("--preload", package)
        code, err = stop_at(moment, whom, place, *flags, str(program), str(place))
        wrong = problem(package, place, code, may_be_nothing=moment == "import")
        if wrong:
            failed.append(f"trial {trial}, {moment}: {wrong}\n{err}")
        print("FAILED" if wrong else "", moment, end=" ", file=sys.stderr, flush=True)
    record_property("version", f"{package} {metadata.version(package)}")
    record_property("result", f"{TRIALS - len(failed)} of {TRIALS}, SIGTERM to {whom}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("backend", ["auto", "as-written"])
@pytest.mark.parametrize("how", ["flag", "saves"])
def test_plain_scripts(how: str, backend: str, tmp_path: Path, record_property) -> None:
    """SIGTERM to every process of a plain script, on shm and gloo: its handler sets a local flag, or itself saves."""
    failed, trials = [], min(TRIALS, 12)
    for trial in range(trials):
        place = tmp_path / str(trial)
        place.mkdir()
        (place / "train.py").write_text(TRAINS)
        arguments = ("--backend", backend, "train.py", how, "SIGTERM", "0.2")
        code, err = stop_at("ready", "every process", place, *arguments)
        saved = [path.read_text() for path in sorted(place.glob("saved-*"))]
        if code != 143 or len(saved) != 2 or saved[0] != saved[1] or saved[0].count("\n") != 1:
            failed.append(f"trial {trial}: exit code {code}, saved {saved}\n{err}")
        print("FAILED" if failed else "", trial, end=" ", file=sys.stderr, flush=True)
    record_property("result", f"{trials - len(failed)} of {trials}")
    assert not failed, "\n".join(failed)


def stop_at(moment: str, whom: str, place: Path, *arguments: str) -> tuple[int, str]:
    """Runs a program on two ranks, and signals it when one of them is there. Returns its exit code and its errors."""
    process = start("-m", "phalanx", "run", "--nproc-per-node", "2", *arguments, cwd=place)
    if moment == "import":
        time.sleep(random.random() * SLOWEST_IMPORT)
    else:
        mark, limit = place / f"{moment}-{random.randrange(2)}", time.monotonic() + 120
        while not mark.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit, f"the ranks did not come to {moment}"
            time.sleep(0.005)
        time.sleep(random.random() * (1.0 if moment in ("steps", "ready") else 0.1))
    pids = [process.pid]
    if whom == "every process":
        pids += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        random.shuffle(pids)
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGTERM)
        time.sleep(random.choice((0.0, 0.0, 0.02)))
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def problem(package: str, place: Path, code: int, *, may_be_nothing: bool = False) -> str:
    """Says what is wrong with the end of a run; nothing if all ranks have saved the same step, and all of it."""
    left = [json.loads(path.read_text()) for path in sorted(place.glob("rank-*.json"))]
    if not left and may_be_nothing and code in (143, -signal.SIGTERM):
        return ""  # there was no handler yet, or not even a launcher
    if code != 143 or len(left) != 2:
        return f"{len(left)} of 2 ranks have saved, and the exit code is {code}"
    if left[0] != left[1]:
        return f"the ranks have stopped at different steps: {left}"
    weights, step, missing = load(package, place / left[0]["checkpoint"])
    if missing:
        return f"the checkpoint has no {', '.join(missing)}"
    is_same = digest_weights(weights) == left[0]["weights"] and step in (None, left[0]["step"])
    return "" if is_same else f"the checkpoint of step {step} has other weights than the ranks"


def load(package: str, path: Path) -> tuple[dict[str, Any], int | None, list[str]]:
    """Returns the weights and the step in a checkpoint, and the files that are missing in it."""
    if package == "lightning":
        checkpoint = torch.load(path, weights_only=False)
        return checkpoint["state_dict"], checkpoint["global_step"], []
    from safetensors.torch import load_file

    each = "rng_state_{}.pth" if package == "transformers" else "random_states_{}.pkl"
    files = ["model.safetensors", "optimizer.pt" if package == "transformers" else "optimizer.bin"]
    files += [each.format(rank) for rank in range(2)]
    missing = [name for name in files if not (path / name).exists()]
    if (path / "checkpoint-is-incomplete.txt").exists():
        missing.append("end")
    if missing:
        return {}, None, missing
    for name in files[1:]:
        torch.load(path / name, weights_only=False)
    state = path / "trainer_state.json"
    step = json.loads(state.read_text())["global_step"] if state.exists() else None
    return load_file(path / files[0]), step, []

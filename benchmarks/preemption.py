"""What launchers make of the signals by which schedulers end a run: do both ranks save, how does it end, what is left.

Two ranks train a small model with DDP on gloo, with two workers of a DataLoader each. The script has a handler for
SIGTERM and SIGUSR1 that sets a flag; the ranks agree on it by an all_reduce in each step, save, and end. torchrun,
accelerate launch and phalanx start the same script; "Lightning" is a script with Lightning's Trainer that starts its
second rank itself, and saves on the exception that Lightning raises after SIGTERM. A run that has not ended 30 seconds
after the signal hangs; one that does not begin to train is tried again. What a launcher leaves behind is counted, and
ended.
"""

import collections
import contextlib
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import main, read_order
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.bench import launch
from phalanx.bench.commands import CommandFailed, Running, Sample, Settings, Step, installed, report_progress, running
from phalanx.bench.common import Benchmark, Flag, Row, among, table

LIGHTNING = "Lightning"
CONTENDERS = {
    "phalanx": launch.FORK,
    "torchrun": launch.TORCHRUN,
    "accelerate": launch.ACCELERATE,
    LIGHTNING: LIGHTNING,
}
PACKAGES = {"accelerate": "accelerate", LIGHTNING: "lightning"}
LAUNCHER, EVERY, LOADERS = "the launcher", "every process", "the loaders"
TERM, USR1 = "SIGTERM", "SIGUSR1"
CASES = {
    # case: the signals, with the seconds before each; who gets them; seconds of a save; the environment
    "launcher": ("SIGTERM to the launcher", [(0.0, TERM)], LAUNCHER, 0.5, {}),
    "every": ("SIGTERM to every process", [(0.0, TERM)], EVERY, 0.5, {}),
    "twice": ("SIGTERM to the launcher, again after 0.1 s", [(0.0, TERM), (0.1, TERM)], LAUNCHER, 0.5, {}),
    "usr1": ("SIGUSR1 to the launcher", [(0.0, USR1)], LAUNCHER, 0.5, {}),
    "loaders": ("SIGTERM to the workers of the loaders", [(0.0, TERM)], LOADERS, 0.5, {}),
    "long": ("SIGTERM to the launcher, a save of 13 s", [(0.0, TERM)], LAUNCHER, 13.0, {}),
    "pod": (
        "the same in a Kubernetes pod",
        [(0.0, TERM)],
        LAUNCHER,
        13.0,
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ),
}
RANKS, TRIES, HANGS_AFTER, CONTINUES_AFTER = 2, 3, 30.0, 3.0
CONTINUES, HANGS = "continues", "hangs"


def plan(settings: Settings) -> Iterator[Step]:
    missing = [name for name in settings.contenders if name in PACKAGES and not installed(PACKAGES[name])]
    if missing:
        report_progress(f"not installed, and left out: {', '.join(missing)}")
    settings.contenders = tuple(name for name in settings.contenders if name not in missing)
    for repeat in range(settings.repeats):
        for case, name in itertools.product(settings.cases, settings.contenders):
            label = f"{case}, {name}, repeat {repeat + 1} of {settings.repeats}"
            yield Step(label, functools.partial(_take, settings, case, name, repeat))


def _take(settings: Settings, case: str, name: str, repeat: int, directory: Path) -> list[Sample]:
    """Tries again where the ranks do not begin to train: what is measured has not happened then."""
    for number in range(TRIES):
        place = directory / f"try-{number}"
        place.mkdir()
        try:
            lasted, note = _stop(settings, case, name, place)
        except CommandFailed:
            if number == TRIES - 1:
                raise
        else:
            return [Sample(case, name, RANKS, repeat, (lasted,), note=note)]
    raise AssertionError


def _stop(settings: Settings, case: str, name: str, directory: Path) -> tuple[float, str]:
    """Returns the seconds from the signal to the end, and what has happened."""
    _, signals, whom, seconds, environ = CASES[case]
    kind = LIGHTNING if name == LIGHTNING else "loop"
    (directory / "order.json").write_text(f'{{"kind": "{kind}", "seconds": {seconds}}}')
    start = [sys.executable] if name == LIGHTNING else launch.command(CONTENDERS[name], RANKS)
    # SLURM, Kubernetes and systemd around the benchmark itself are not part of the case.
    absent = ["-u", "SLURM_JOB_ID", "-u", "KUBERNETES_SERVICE_HOST", "-u", "INVOCATION_ID"]
    given = [f"{key}={value}" for key, value in {"OMP_NUM_THREADS": "1", **environ}.items()]
    argv = ["env", *absent, *given, *start, __file__, "--rank", str(directory)]
    before = _children()
    with running(argv, directory, settings.timeout) as command:
        (launcher,) = _children() - before
        ranks = _await_ranks(command, directory, settings.timeout)
        below = launcher.children(recursive=True)
        loaders = [child for rank in ranks for child in below if child.ppid() == rank]
        for pause, number in signals:
            time.sleep(pause)
            for process in {LAUNCHER: [launcher], EVERY: [*below, launcher], LOADERS: loaders}[whom]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(getattr(signal, number))
        signalled = time.time()
        end = _end(launcher, CONTINUES_AFTER) if whom == LOADERS else HANGS
        if end == HANGS and whom == LOADERS and _steps(directory, ranks):
            end = CONTINUES
        elif end == HANGS:
            end = _end(launcher, HANGS_AFTER + seconds)
        lasted = time.time() - signalled
        has_ended = end not in (CONTINUES, HANGS)
        _, left = psutil.wait_procs(below, timeout=2) if has_ended else ([], [])
        note = describe_end(directory, end, len(left))
    return lasted, note


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def _await_ranks(command: Running, directory: Path, timeout: float) -> list[int]:
    """The pids of the ranks, once all of them train."""
    paths, limit = [directory / f"ready-{rank}" for rank in range(RANKS)], time.monotonic() + timeout
    while not all(path.exists() and path.read_text() for path in paths):
        if time.monotonic() > limit:
            raise command.failure(f"has not trained within {timeout:g} s")
        time.sleep(0.02)
    time.sleep(0.5)
    return [int(path.read_text()) for path in paths]


def _end(launcher: psutil.Process, timeout: float) -> str:
    try:
        code = launcher.wait(timeout)
    except psutil.TimeoutExpired:
        return HANGS
    return f"exit code {code if code >= 0 else 128 - code}"


def _steps(directory: Path, ranks: Sequence[int]) -> bool:
    """Whether the ranks still train."""
    before = (directory / "step-0").read_text()
    time.sleep(1.0)
    return all(map(psutil.pid_exists, ranks)) and (directory / "step-0").read_text() != before


def describe_end(directory: Path, end: str, left: int) -> str:
    """``left``: the number of processes that the launcher has left behind."""
    saved = sorted(path.read_text() for path in directory.glob("saved-*"))
    what = ["no rank saves", "1 rank saves", "saves"][len(saved)]
    if len(saved) == RANKS and saved[0] != saved[-1]:
        what = "saves different steps"
    parts = [end] if end == CONTINUES else [what, end]
    return ", ".join([*parts, f"{left} processes left"] if left else parts)


def tables(rows: Sequence[Row], settings: Settings) -> list[str]:
    body = []
    for row in rows:
        cells = []
        for name in settings.contenders:
            notes = collections.Counter(sample.note for sample in row.samples.get(name, ()))
            total = notes.total()
            cells.append("; ".join(note if n == total else f"{note} ({n} of {total})" for note, n in notes.items()))
        body.append([CASES[row.measure][0], *cells])
    return [table("Two ranks with two loader workers each", ["", *settings.contenders], body)]


# ---- the ranks


def rank(directory: Path) -> None:
    order = read_order(directory)
    (_train_lightning if order["kind"] == LIGHTNING else _train)(directory, order["seconds"])


def _data() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(1 << 16, 8), torch.randint(0, 3, (1 << 16,)))
    return DataLoader(data, batch_size=4, num_workers=2)


def _mark(directory: Path, rank: int, step: int) -> None:
    (directory / f"step-{rank}").write_text(str(step))
    if step == 5:
        (directory / f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(0.01)


def _train(directory: Path, seconds: float) -> None:
    flag = torch.zeros(1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: flag.fill_(1))
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), nn.Linear(8, 3)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(itertools.chain.from_iterable(itertools.repeat(_data()))):
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        _mark(directory, rank, step)
        wanted = flag.clone()
        dist.all_reduce(wanted)
        if wanted.item():
            time.sleep(seconds)
            torch.save(model.state_dict(), directory / f"{rank}.pt")
            dist.barrier()
            (directory / f"saved-{rank}").write_text(str(step))
            break
    os._exit(0)  # with torch 2.13 the end of the group may hang, whatever the launcher


def _train_lightning(directory: Path, seconds: float) -> None:
    import lightning  # type: ignore[import-not-found]
    from lightning.pytorch.utilities.exceptions import SIGTERMException  # type: ignore[import-not-found]

    class Saves(lightning.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if isinstance(exception, SIGTERMException):
                time.sleep(seconds)
                trainer.save_checkpoint(directory / "stopped.ckpt")
                (directory / f"saved-{trainer.global_rank}").write_text(str(trainer.global_step))

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            _mark(directory, self.trainer.global_rank, self.global_step)
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_steps=1_000_000, logger=False, callbacks=[Saves()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
    )  # fmt: skip
    trainer.fit(Classifier(), _data())


FLAGS = (
    Flag("--cases", "A,B", among(CASES), ",".join(CASES)),
    Flag("--contenders", "A,B", among(CONTENDERS), ",".join(CONTENDERS)),
)
BENCHMARK = Benchmark("preemption", __doc__, plan, tables, FLAGS, repeats=3)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, rank))

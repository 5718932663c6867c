"""The script that every contender starts. It is copied to a directory of its own and run there, never imported.

    probe.py DIRECTORY MODE RANKS

    up       join, pass a barrier, note the time, end
    spawn    the same, in RANKS processes started by torch.multiprocessing.spawn
    hold     the same as up, but stay until the benchmark closes its end of the FIFO "go"
    restart  rank 1 kills itself in the first attempt; the second notes the time after its first all_reduce

Each rank appends its notes to DIRECTORY/rank-N.jsonl.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(directory: Path, mode: str, ranks: int) -> None:
    if mode == "spawn":
        import torch.multiprocessing as mp

        mp.spawn(_spawned, (directory, ranks, _free_port()), nprocs=ranks)
        return
    if "RANK" not in os.environ:  # a launcher that starts one process only, as plain Python would
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    dist.barrier()
    if mode == "restart":
        _restart(directory)
    else:
        _note(directory)
    if mode == "hold":
        _hold(directory)
    dist.destroy_process_group()


def _spawned(rank: int, directory: Path, ranks: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    dist.barrier()
    _note(directory)
    dist.destroy_process_group()


def _free_port() -> int:
    """The usual recipe for mp.spawn: between here and the bind somebody else might take it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _restart(directory: Path) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        _note(directory)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))  # in the first attempt, this is where the others learn of it
    _note(directory)


def _hold(directory: Path) -> None:
    with (directory / "ready").open("wb") as ready:
        ready.write(b".")
    (directory / "go").read_bytes()


def _note(directory: Path) -> None:
    now = time.time()
    note = {
        "time": now,
        "world_size": dist.get_world_size(),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    with (directory / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

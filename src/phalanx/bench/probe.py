"""The script that every contender of `phalanx bench launch` starts, copied to a directory of its own; never imported.

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

        with socket.socket() as sock:  # the usual recipe: before the bind somebody else might take the port
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        mp.spawn(_spawned, (directory, ranks, port), nprocs=ranks)
        return
    if "RANK" not in os.environ:  # a launcher that starts one process only, as plain Python would
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    dist.barrier()
    if mode == "restart":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            _note(directory)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))  # in the first attempt, this is where the others learn of it
    _note(directory)
    if mode == "hold":
        with (directory / "ready").open("wb") as ready:
            ready.write(b".")
        (directory / "go").read_bytes()
    dist.destroy_process_group()


def _spawned(rank: int, directory: Path, ranks: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    dist.barrier()
    _note(directory)
    dist.destroy_process_group()


def _note(directory: Path) -> None:
    now, attempt = time.time(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with (directory / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps({"time": now, "world_size": dist.get_world_size(), "attempt": attempt}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

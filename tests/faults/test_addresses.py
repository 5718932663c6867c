"""Process groups at addresses that the script has chosen itself, and a store that nobody serves."""

from __future__ import annotations

import re

from tests.conftest import Runner, by_rank, free_port

SCRIPT = """
import os, socket, sys
import torch, torch.distributed as dist
import phalanx as px

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
own = int(os.environ["MASTER_PORT"])
first, second, third, nobody = map(int, sys.argv[1:])

def group(what, init_method, rank=rank, size=size):
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
    total = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(total)
    print(what, dist.get_rank(), int(total))
    dist.barrier()
    dist.destroy_process_group()

group("tcp", f"tcp://localhost:{first}")
group("again", f"tcp://127.0.0.1:{first}")
group("reversed", f"tcp://10.255.255.1:{second}", rank=size - 1 - rank)  # of another machine, as in the tutorial
group("alone", f"tcp://127.0.0.1:{(first, second)[rank]}", rank=0, size=1)
group("launcher's", f"tcp://localhost:{own}")
group("launcher's by name", f"tcp://{socket.gethostname()}:{own}")
with px.init(init_method=f"tcp://localhost:{own}") as world:
    print("px", world.rank, world.size)
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(third)  # as the tutorials have it
group("env", "env://")
dist.TCPStore("localhost", nobody, is_master=False)
"""


def test_addresses_of_the_scripts_own(phalanx: Runner, script) -> None:
    """The last one is served by nobody: the verdict says so, and torch prints no C++ stack for having been asked."""
    ports = [str(free_port()) for _ in range(4)]
    flags = ("--nproc-per-node", "2", "--stall-after", "2", "--on-stall", "kill")
    outcome = phalanx("run", *flags, script(SCRIPT), *ports)
    for rank, lines in by_rank(outcome).items():
        assert lines == [
            f"tcp {rank} 11",
            f"again {rank} 11",
            f"reversed {1 - rank} 11",
            "alone 0 1",
            f"launcher's {rank} 11",
            f"launcher's by name {rank} 11",
            f"px {rank} 2",
            f"env {rank} 11",
        ]
    assert outcome.code == 1
    assert f"  nobody listens on localhost:{ports[3]}, where ranks 0, 1 connect to" in outcome.err
    assert re.search(r"ranks 0, 1 wait in TCPStore, train.py:\d+: dist.TCPStore\(", outcome.err)
    assert "frame #" not in outcome.err
    assert "Interrupted system call" not in outcome.err

#!/bin/sh
# The reference experiment on two machines, with 2 processes on each, started by one command on each machine.
# Both machines are simulated with network namespaces on this one, which needs root. Arguments are passed to the script.
cd "$(dirname "$0")/.." || exit
exec "${PYTHON:-python3}" - "$@" <<'END'
import sys

from phalanx.testing import virtual_nodes

with virtual_nodes(2) as nodes:
    flags = ["--nnodes", "2", "--master-addr", nodes[0].address, "--master-port", "29500", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "phalanx", "run", *flags]
    for number, node in enumerate(nodes):
        print(f"{node.name}$ phalanx run {' '.join(flags)} --node-rank {number} examples/reference.py", flush=True)
    agents = [
        node.start([*command, "--node-rank", str(number), "examples/reference.py", *sys.argv[1:]])
        for number, node in enumerate(nodes)
    ]
    codes = [agent.wait() for agent in agents]
sys.exit(max(codes))
END

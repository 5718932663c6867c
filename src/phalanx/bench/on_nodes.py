"""`phalanx run` on each of two virtual nodes, with one script. A program of its own, so that everything ends with it.

    python -m phalanx.bench.on_nodes LINK PER_NODE SCRIPT ARGUMENT …

LINK is a bandwidth such as 1gbit, or "unshaped". Each node works in a directory of its own below this one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from phalanx.testing import virtual_nodes
from phalanx.torch_compat import COMPILER

NODES = 2
UNSHAPED = "unshaped"
_PORT = "29500"  # the nodes have a network of their own


def main(link: str, per_node: str, *script: str) -> int:
    with virtual_nodes(NODES, None if link == UNSHAPED else link) as nodes:
        agents = []
        for number, node in enumerate(nodes):
            place = Path(f"node-{number}")
            place.mkdir()
            meeting = ["--nnodes", str(NODES), "--master-addr", nodes[0].address, "--master-port", _PORT]
            flags = [*meeting, "--node-rank", str(number), "--nproc-per-node", per_node]
            flags += ["--preload", COMPILER]  # which DDP imports: once a node, not in every rank
            quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [sys.executable, "-m", "phalanx", "run", *flags, *script]
            agents.append(node.start(command, cwd=place.absolute(), env=quiet))
        return max(agent.wait() for agent in agents)  # they fail together


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

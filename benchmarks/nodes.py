"""How fast shm is over two virtual nodes with a link of known bandwidth, beside gloo from rank to rank. It takes root.

shm and gloo take turns in the same processes at all_reduce, and at steps of DDP: zero_grad, forward, backward and SGD
of an MLP of three linear layers with 8 samples a rank. Every result is checked. The nodes are network namespaces of
this machine, so all ranks share its cores. A turn is a barrier and one call, or up to 20 back to back below 256 KB.
"Of the link" is the time that the link needs at least, divided by shm's: each node has to send the other one as many
bytes as the tensor has; headers of packets, 4 to 5 % more, are not counted. Flat gloo sends 2 (n - 1) / n times as
many, so where gloo fills the link, too, shm cannot be faster by more than that.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from common import Order, check_same, main, mlp, mlp_batch, run_rank, stepper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.collectives import GLOO, MOST_RANKS, SHM
from phalanx.bench.commands import Settings, Step, job
from phalanx.bench.common import Benchmark, Flag, Row, Summary, compare, counts, positive, seconds, show, sizes
from phalanx.bench.ranks import Contender, Groups, Turns, all_reduce, calls_of
from phalanx.errors import UsageError
from phalanx.testing import virtual_nodes
from phalanx.testing.virtual_links import bits_per_second

NODES, UNSHAPED, ALONE = 2, "unshaped", "alone"


def plan(settings: Settings) -> Iterator[Step]:
    if os.geteuid() != 0:
        raise UsageError(f"virtual nodes need root, and this is user {os.geteuid()}; run the benchmark as root.")
    if settings.per_node[-1] * NODES > MOST_RANKS:
        most = f"the results of more than {MOST_RANKS // NODES} on each of {NODES} nodes cannot be checked exactly"
        raise UsageError(f"--per-node has {settings.per_node[-1]}; {most}, so give fewer.")
    for link in settings.links:
        _ = link == UNSHAPED or bits_per_second(link)  # raises for what is no bandwidth
    order = {name: getattr(settings, name) for name in ("sizes", "width", "seconds")}
    for repeat in range(settings.repeats):
        for each in settings.per_node:
            for link in settings.links:
                words, ordered = f"{NODES} nodes, {link}", {**order, "link": link}
                yield job(words, (), each * NODES, ordered, (repeat, settings), functools.partial(on_nodes, link))


@contextlib.contextmanager
def on_nodes(link: str, ranks: int) -> Iterator[list[str]]:
    """This file once more, as a program of its own, so that everything of the nodes ends with it."""
    yield [sys.executable, __file__, "--nodes", link, str(ranks // NODES)]


def start_nodes(link: str, per_node: str, directory: str) -> int:
    """`phalanx run` on each of the virtual nodes, each in a directory of its own below this one."""
    with virtual_nodes(NODES, None if link == UNSHAPED else link) as nodes:
        agents = []
        for number, node in enumerate(nodes):
            place = Path(f"node-{number}")
            place.mkdir()
            flags = ["--nnodes", str(NODES), "--master-addr", nodes[0].address, "--master-port", "29500"]
            flags += ["--node-rank", str(number), "--nproc-per-node", per_node]
            flags += ["--preload", "torch._dynamo"]  # which DDP imports: once a node, not in every rank
            command = [sys.executable, "-m", "phalanx", "run", *flags, __file__, "--rank", directory]
            quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            agents.append(node.start(command, cwd=place.absolute(), env=quiet))
        return max(agent.wait() for agent in agents)  # they fail together


def of_the_link(row: Row) -> str:
    """What part of shm's time the link needs at least for what one node must send the other; empty without a limit."""
    link = row.measure.partition(" over ")[2]
    if link == UNSHAPED:
        return ""
    least = row.size * 8 / bits_per_second(link)
    return show(Summary.extremes([least / time for time in row.medians(SHM).values()]))


def tables(rows: Sequence[Row], _: Settings) -> list[str]:
    title = f"all_reduce of float32, and a training step with DDP, over {NODES} nodes"
    return [compare(title, rows, (ALONE, GLOO, SHM), [(GLOO, SHM)], extra=[("of the link", of_the_link)])]


def measure(turns: Turns, groups: Groups, order: Order) -> None:
    link, width = order["link"], order["width"]
    for size in order["sizes"]:
        calls = calls_of(size, most=20, single_from=2**18)
        turns.measure(f"all_reduce over {link}", size, list(all_reduce(groups, calls, size)))
    models: dict[str, nn.Module] = {}
    for name in (ALONE, *groups):
        torch.manual_seed(0)
        model = mlp(width)
        models[name] = model if name == ALONE else DistributedDataParallel(model, process_group=groups[name])
    torch.manual_seed(1 + dist.get_rank())
    batch = mlp_batch(width)
    size = 4 * sum(parameter.numel() for parameter in models[ALONE].parameters())
    contenders = [Contender(name, [stepper(each, batch)]) for name, each in models.items()]
    turns.measure(f"DDP step over {link}", size, contenders)
    check_same(models, (SHM, GLOO))


FLAGS = (
    Flag("--per-node", "A,B", counts, "2,4", "ranks of each node"),
    Flag("--links", "A,B", lambda text: tuple(text.split(",")), f"{UNSHAPED},1gbit,100mbit"),
    Flag("--sizes", "A,B", sizes, "4K,1M,25M", "of all_reduce"),
    Flag("--width", "N", positive, 1024, "of the model"),
    Flag("--seconds", "S", seconds, 5.0, "for one piece of work in one job, about"),
)
BENCHMARK = Benchmark("nodes", __doc__, plan, tables, FLAGS, timeout=600.0)
rank = functools.partial(run_rank, measure)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--nodes"]:
        sys.exit(start_nodes(*sys.argv[2:]))
    sys.exit(main(BENCHMARK, rank))

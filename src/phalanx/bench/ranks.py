"""Inside the ranks: contenders take turns at one piece of work, each turn prepared, timed and checked.

phalanx run -m phalanx.bench.ranks DIRECTORY                  what `phalanx bench collectives` runs under torch
mpirun python -m mpi4py -m phalanx.bench.ranks DIRECTORY      and under MPI
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import backends

_WARM_UPS = 2  # connections, first touches of memory; DDP arranges its buckets anew after the first step
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_PERIOD = 251  # a prime: blocks and chunks begin elsewhere in the pattern

Span = tuple[float, float]  # start and end by the monotonic clock, which all processes of a machine share


def do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    name: str
    calls: Sequence[Callable[[], object]]
    """One turn: these, back to back. The time of the turn is divided by their number."""
    prepare: Callable[[], object] = do_nothing
    check: Callable[[], object] = do_nothing  # raises when the turn had a wrong result


class Turns:
    """Measures on all ranks alike, and keeps this rank's times."""

    def __init__(self, barrier: Callable[[], object], agree: Callable[[int], int], seconds: float) -> None:
        """``agree`` gives every rank the number of the first; ``seconds`` is about what one measurement may take."""
        self._barrier, self._agree, self._seconds = barrier, agree, seconds
        self.most_rounds = _MOST_ROUNDS
        self.notes: list[dict[str, Any]] = []

    def measure(self, what: str, size: int, contenders: Sequence[Contender]) -> None:
        """All contenders get the same number of turns. Every other round is in reverse order: whoever comes after a
        slow one may find other caches than whoever comes after a fast one."""
        started = time.perf_counter()
        for _ in range(_WARM_UPS):
            started = time.perf_counter()
            for contender in contenders:
                self._turn(contender)
        cost = time.perf_counter() - started
        rounds = self._agree(min(self.most_rounds, max(_LEAST_ROUNDS, int(self._seconds / cost))))
        spans: dict[str, list[Span]] = {contender.name: [] for contender in contenders}
        for number in range(rounds):
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                spans[contender.name].append(self._turn(contender))
        for contender in contenders:
            self.add(what, size, contender.name, spans[contender.name], len(contender.calls))

    def add(self, what: str, size: int, contender: str, spans: Sequence[Span], calls: int = 1) -> None:
        self.notes.append({"measure": what, "size": size, "contender": contender, "calls": calls, "spans": spans})

    def write(self, directory: Path, rank: int) -> None:
        (directory / f"rank-{rank}.json").write_text(json.dumps(self.notes))

    def _turn(self, contender: Contender) -> Span:
        contender.prepare()
        calls = contender.calls
        self._barrier()
        started = time.monotonic()
        for call in calls:
            call()
        ended = time.monotonic()
        self._barrier()  # a rank that checks already would take a core from one that is not done
        contender.check()
        return started, ended


def calls_of(size: int, most: int = 100, single_from: int = 2**20, together: int = 2**22) -> int:
    """The number of calls of this size in a turn: enough to be warm, and no more than caches hold."""
    return 1 if size >= single_from else max(1, min(most, together // size))


# ---- numbers that show every wrong result: element i is a small whole number that differs from its neighbours, and
# rank r has it 2**r times, so a sum tells which ranks went into it, and float32 holds it exactly in any order


def pattern(calls: int, count: int) -> numpy.ndarray:
    """The numbers that all ranks have in common: one row for each call."""
    return numpy.resize(numpy.arange(1, _PERIOD + 1, dtype=numpy.float32), (calls, count))


def check(found: numpy.ndarray, expected: numpy.ndarray, what: str) -> None:
    """Raises when they differ anywhere."""
    if not numpy.array_equal(found, expected):
        wrong = numpy.flatnonzero(found.ravel() != expected.ravel())
        first = int(wrong[0])
        raise ArithmeticError(
            f"{what} gave wrong numbers: {wrong.size} of {found.size}; "
            f"element {first} is {found.flat[first]:g}, not {expected.flat[first]:g}"
        )


Groups = dict[str, dist.ProcessGroup]


def main(directory: Path) -> None:
    order = json.loads((directory / "order.json").read_text())
    if "mpi" in order:
        _main_of_mpi(directory, order)
        return
    groups = both_groups()
    turns = Turns(dist.barrier, agree, order["seconds"])
    for size in order["sizes"]:
        turns.measure("all_reduce", size, list(all_reduce(groups, calls_of(size), size, size == order["limit"])))
    for name in order["others"]:
        turns.measure(name, order["other_size"], list(_other(groups, name, order["other_size"])))
    turns.write(directory, dist.get_rank())
    dist.destroy_process_group()


def both_groups() -> Groups:
    """Joins the world, through shm, and makes a second group of all ranks through gloo."""
    dist.init_process_group("shm")
    found: Groups = {}
    for name, group in (("shm", dist.group.WORLD), ("gloo", dist.new_group(backend="gloo"))):
        # `phalanx run` gives a script shm where it asks for gloo; here that would compare shm with itself.
        if not isinstance(group, dist.ProcessGroup) or backends.is_shm(group) != (name == "shm"):
            raise RuntimeError(f"asked for {name}, and got {group}")
        found[name] = group
    return found


def agree(number: int) -> int:
    """The first rank's number, on all ranks."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, 0)
    return int(tensor.item())


def all_reduce(groups: Groups, calls: int, size: int, with_limit: bool = False) -> Iterator[Contender]:
    """One contender for each group; ``with_limit``: and one that no all_reduce can beat."""
    plain = torch.from_numpy(pattern(calls, size // 4))
    source = plain * 2 ** dist.get_rank()  # in torch's own memory: numpy asks the kernel for large pages
    data = torch.empty_like(source)
    expected = plain * (2 ** dist.get_world_size() - 1)
    prepare = functools.partial(data.copy_, source)
    for name, group in groups.items():
        reduces = [functools.partial(dist.all_reduce, row, group=group) for row in data]
        yield Contender(name, reduces, prepare, _checker(data, expected, f"all_reduce of {size} bytes with {name}"))
    if with_limit:
        add = functools.partial(data.add_, source)
        yield Contender("a += b", [add], prepare, _checker(data, source * 2, "a += b"))


def _checker(found: Tensor, expected: Tensor, what: str) -> Callable[[], None]:
    return functools.partial(check, found.numpy(), expected.numpy(), what)


def _other(groups: Groups, name: str, size: int) -> Iterator[Contender]:
    """``size`` is that of the larger side: what all_gather gives and reduce_scatter takes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block = size // 4 // ranks
    plain = torch.from_numpy(pattern(1, block * ranks))[0]
    mine = plain.view(ranks, block)[rank]
    weights = torch.tensor([[2.0**each] for each in range(ranks)])
    calls: dict[str, tuple[str, str, Tensor, Tensor]] = {
        # torch 2.13 gave some of them new names
        "broadcast": ("broadcast", "", plain, plain),
        "all_gather": ("all_gather_single", "all_gather_into_tensor", plain[:block], plain[:block] * weights),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor", plain, mine * weights.sum()),
        "all_to_all": ("all_to_all_single", "", plain, mine * weights),
    }
    newer, older, unweighted, expected = calls[name]
    call = getattr(dist, newer, None) or getattr(dist, older)
    source, expected = unweighted * 2**rank, expected.flatten()
    output = torch.empty_like(expected)
    for backend, group in groups.items():
        checks = _checker(output, expected, f"{name} with {backend}")
        if name == "broadcast":
            send = functools.partial(call, output, 0, group=group)
            yield Contender(backend, [send], functools.partial(output.copy_, source), checks)
        else:  # -1 is no result, so an output of the turn before cannot pass for one
            exchange = functools.partial(call, output, source, group=group)
            yield Contender(backend, [exchange], functools.partial(output.fill_, -1), checks)


def _main_of_mpi(directory: Path, order: dict[str, Any]) -> None:
    """The same all_reduce, in place, on numpy's arrays."""
    mpi = importlib.import_module("mpi4py.MPI")  # by name, for a type checker need not find an optional extra
    comm = mpi.COMM_WORLD
    turns = Turns(comm.Barrier, comm.bcast, order["seconds"])
    for size in order["sizes"]:
        plain = pattern(calls_of(size), size // 4)
        source = plain * numpy.float32(2**comm.rank)
        data = numpy.empty_like(source)
        calls = [functools.partial(comm.Allreduce, mpi.IN_PLACE, [row, mpi.FLOAT], mpi.SUM) for row in data]
        expected = plain * numpy.float32(2**comm.size - 1)
        checks = functools.partial(check, data, expected, f"all_reduce of {size} bytes with MPI")
        contender = Contender("MPI", calls, functools.partial(numpy.copyto, data, source), checks)
        turns.measure("all_reduce", size, [contender])
    turns.write(directory, comm.rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

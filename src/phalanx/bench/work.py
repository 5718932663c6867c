"""Inside the ranks: the pieces of work that more than one benchmark measures, under torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.bench import numbers
from phalanx.bench.torch_groups import Groups
from phalanx.bench.turns import Contender

Batch = tuple[Tensor, Tensor]

# ---- all_reduce


def own_numbers(calls: int, count: int) -> Tensor:
    """This rank's numbers. In torch's own memory: numpy asks the kernel for large pages, torch does not."""
    return torch.from_numpy(numbers.pattern(calls, count)).mul(numbers.weight(dist.get_rank()))


def checker(found: Tensor, expected: Tensor, what: str) -> Callable[[], None]:
    return functools.partial(numbers.check, found.numpy(), expected.numpy(), what)


def all_reduce(groups: Groups, calls: int, size: int, with_limit: bool = False) -> Iterator[Contender]:
    """By each group; ``with_limit``: and what no all_reduce can beat."""
    count = size // 4
    source = own_numbers(calls, count)
    data = torch.empty_like(source)
    expected = torch.from_numpy(numbers.pattern(calls, count)).mul(numbers.weight_of_all(dist.get_world_size()))
    prepare = functools.partial(data.copy_, source)
    for name, group in groups.items():
        reduces = [functools.partial(dist.all_reduce, row, group=group) for row in data]
        yield Contender(name, reduces, prepare, checker(data, expected, f"all_reduce of {size} bytes with {name}"))
    if with_limit:
        add = functools.partial(data.add_, source)
        yield Contender("a += b", [add], prepare, checker(data, source * 2, "a += b"))


# ---- training steps


def stepper(model: nn.Module, batch: Batch) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs)
        nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


def check_same(one: nn.Module, other: nn.Module) -> None:
    """Of two models that took the same steps, through shm and through gloo."""
    for (name, mine), its in zip(one.named_parameters(), other.parameters(), strict=True):
        if not torch.allclose(mine, its, rtol=1e-3, atol=1e-5):  # sums of several ranks depend on the order
            worst = (mine - its).abs().max().item()
            raise ArithmeticError(f"after the same steps, {name} with shm and with gloo differ by {worst:g}")


def mlp(width: int) -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def mlp_batch(width: int) -> Batch:
    return torch.randn(8, width), torch.randint(width, (8,))

"""`px.ShardSampler` and `px.shard` on real ranks, found by the process group, whose DataLoaders have workers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from phalanx.world import World

RunRanks = Callable[..., list[Any]]


def test_every_sample_comes_once(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[Any]:
        from phalanx import ShardSampler

        data: Any = range(1001)
        sampler = ShardSampler(data, uneven="exact")
        assert (sampler.num_replicas, sampler.rank) == (world.size, world.rank)
        loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=2, persistent_workers=True)
        found = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found.append([index for batch in loader for index in batch.tolist()])
        return found

    results = run_ranks(check, 3)
    for epoch in range(2):
        assert Counter(index for result in results for index in result[epoch]) == Counter(range(1001))
    assert results[0][0] != results[0][1]
    assert [len(result[0]) for result in results] == [334, 334, 333]


def test_a_run_goes_on_with_another_number_of_ranks(run_ranks: RunRanks) -> None:
    def check(world: World, state: dict[str, int] | None, batches: int | None) -> tuple[list[int], dict[str, int]]:
        from phalanx import ShardSampler

        data: Any = range(500)
        sampler = ShardSampler(data, seed=9, uneven="exact")
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, prefetch_factor=4)
        seen: list[int] = []
        for batch in itertools.islice(loader, batches):
            sampler.received(len(batch))
            seen += batch.tolist()
        return seen, sampler.state_dict()

    first = run_ranks(check, 3, None, 7)
    state = first[0][1]
    assert [result[1] for result in first] == [state] * 3
    assert state == {"seed": 9, "epoch": 0, "consumed": 168, "length": 500, "version": 1}
    second = run_ranks(check, 2, state, None)
    assert Counter(index for seen, _ in [*first, *second] for index in seen) == Counter(range(500))


def test_iterables_are_split_by_rank_and_worker(run_ranks: RunRanks) -> None:
    def check(world: World) -> list[int]:
        from phalanx import shard

        loader: DataLoader[int] = DataLoader(shard(range(100)), batch_size=7, num_workers=2)
        return [index for batch in loader for index in batch.tolist()]

    results = run_ranks(check, 3)
    assert sorted(itertools.chain.from_iterable(results)) == list(range(100))
    assert all(index % 3 == rank for rank, result in enumerate(results) for index in result)


def test_torchs_own_group_is_found(run_ranks: RunRanks, tmp_path: Path) -> None:
    def check(rank: int, meeting: str) -> tuple[int, int, int]:
        from phalanx import ShardSampler, shard

        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        try:
            sampler, part = ShardSampler(range(10)), shard(range(10))
            assert (part.num_replicas, part.rank) == (2, rank)
            return sampler.num_replicas, sampler.rank, len(sampler)
        finally:
            dist.destroy_process_group()

    assert run_ranks(check, 2, f"file://{tmp_path}/meeting", join_group=False) == [(2, 0, 5), (2, 1, 5)]

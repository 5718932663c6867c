"""Who is where, how blocks are cut, and the arithmetic between nodes: what the shm backend needs on several of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.shm.hierarchical import reduction_plan
from phalanx.shm.hierarchical.topology import Topology, cut, pieces, sort_into_nodes
from phalanx.shm.node import tensors
from phalanx.shm.node.tensors import REDUCE_NAMES, Operator


def test_ranks_are_sorted_into_nodes() -> None:
    nodes = sort_into_nodes(["b", "a", "b", "a", "b"], rank=3)
    assert nodes.ranks == ((0, 2, 4), (1, 3))
    assert (nodes.count, nodes.own_node, nodes.local_rank, nodes.own_ranks) == (2, 1, 1, (1, 3))
    assert (nodes.gloo_groups, nodes.has_gloo_group, nodes.is_leader) == (2, True, False)
    assert nodes.gloo_peers == (2,)
    assert nodes.order == (0, 2, 4, 1, 3)
    assert nodes.leader_of(0) == 0
    assert nodes.leader_of(1) == 1
    assert nodes.all_have_gloo_groups
    assert not Topology(nodes.ranks, 0).all_have_gloo_groups
    assert not Topology(nodes.ranks, 4).has_gloo_group


def test_the_region_of_a_node() -> None:
    nodes = sort_into_nodes(["a", "b", "b", "c"], rank=0)
    assert [nodes.region(node, 10) for node in range(3)] == [slice(0, 10), slice(10, 30), slice(30, 40)]


def test_the_more_nodes_the_smaller_is_small() -> None:
    limits = [sort_into_nodes([str(node) for node in range(count)], 0).small_bytes for count in (2, 4, 1000)]
    assert limits == [64 << 10, 32 << 10, 1024]


@given(st.integers(0, 3_000_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9))
def test_pieces_and_parts_cover_everything_once(count: int, width: int, gloo_groups: int) -> None:
    found = pieces(count, width, gloo_groups)
    assert [place for piece in found for place in (piece.start, piece.stop)] == sorted(
        place for piece in found for place in (piece.start, piece.stop)
    )
    assert sum(piece.stop - piece.start for piece in found) == count
    for piece in found[:-1]:
        assert (piece.stop - piece.start) % gloo_groups == 0
    for piece in found:
        parts = cut(piece.stop - piece.start, gloo_groups)
        assert len(parts) == gloo_groups
        assert parts[0].start == 0
        assert parts[-1].stop == piece.stop - piece.start
        assert all(one.stop == two.start for one, two in itertools.pairwise(parts))


@pytest.mark.parametrize("name", REDUCE_NAMES)
def test_every_operator_has_a_plan(name: str) -> None:
    plan = reduction_plan.plan(Operator(REDUCE_NAMES.index(name), 0.5 * (name == "premul_sum")), torch.float32, 6)
    assert plan.divisor == (6 if name == "avg" else 1)
    assert plan.between == ("sum" if name in ("avg", "premul_sum") else name)
    assert plan.within.factor == (0.5 if name == "premul_sum" else 0.0)


def test_an_average_of_halves_is_divided_before_it_is_added_up() -> None:
    plan = reduction_plan.plan(Operator(REDUCE_NAMES.index("avg")), torch.float16, 4)
    assert (plan.within.factor, plan.between, plan.divisor) == (0.25, "sum", 1)


def test_combining_is_done_in_float32_and_in_order() -> None:
    halves = [torch.tensor([1.0]).half(), torch.tensor([0.0004]).half(), torch.tensor([0.0004]).half()]
    assert reduction_plan.combine(halves, "sum").item() == torch.tensor(1.0008).half().item()
    flags = [torch.tensor([True, False]), torch.tensor([True, True])]
    assert reduction_plan.combine(flags, "sum").tolist() == [True, True]
    assert reduction_plan.combine(flags, "min").tolist() == [True, False]
    assert reduction_plan.combine(flags, "bxor").tolist() == [False, True]
    large = [torch.tensor([2**63 + 1], dtype=torch.uint64), torch.tensor([1], dtype=torch.uint64)]
    assert reduction_plan.combine(large, "max").tolist() == [2**63 + 1]


def test_gloo_is_used_where_it_does_the_same() -> None:
    def uses_gloo(dtype: torch.dtype, between: reduction_plan.Between, nodes: int = 2) -> bool:
        return reduction_plan.by_gloo(torch.zeros(1, dtype=dtype), between, nodes) is not None

    assert uses_gloo(torch.float32, "sum")
    assert not uses_gloo(torch.float32, "min"), "it loses a NaN"
    assert uses_gloo(torch.int64, "min")
    assert not uses_gloo(torch.int16, "sum"), "it does not know them"
    assert not uses_gloo(torch.bfloat16, "sum")
    assert uses_gloo(torch.bfloat16, "sum", nodes=3), "less is sent"
    assert uses_gloo(torch.bool, "sum")


def test_division_cuts_integers() -> None:
    for dtype in (torch.int32, torch.uint16, torch.int8):
        block = torch.tensor([7, 8], dtype=dtype)
        reduction_plan.divide(block, 4)
        assert block.tolist() == [1, 2]
    block = torch.tensor([-7])
    reduction_plan.divide(block, 4)
    assert block.tolist() == [-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool, torch.float8_e5m2, torch.int64])
def test_bytes_there_and_back(dtype: torch.dtype) -> None:
    block = torch.arange(6).to(torch.uint8 if dtype == torch.float8_e5m2 else dtype).view(dtype)
    data = tensors.as_bytes(block)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert torch.equal(tensors.as_bytes(tensors.typed(shifted, dtype)), data)

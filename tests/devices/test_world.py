"""px.init on an accelerator: the device of a rank, its backend, its groups."""

from __future__ import annotations

from collections.abc import Callable

from tests.conftest import Outcome

WORLD = """
    import torch.distributed as dist

    functions = torch.get_device_module("sim")

    def total(group=None):
        value = torch.full((2,), float(dist.get_rank() + 1), device=world.device)
        dist.all_reduce(value, group=group)
        return value.cpu().tolist()

    for backend in (None, "simccl"):
        with px.init(backend, device="sim") as world:
            # Every rank sees one device, so that is its own.
            assert (world.device, functions.set_to) == (torch.device("sim", 0), [0])
            assert world.backend == (backend or "cpu:gloo,sim:simccl")
            assert total() == [3.0, 3.0]
            px.barrier()
            mine = dist.new_group([0])  # of the device's backend
            other = dist.new_group([1], backend="gloo")  # beside it, for the CPU
            if world.rank == 0:
                assert total(mine) == [1.0, 1.0]
            else:
                value = torch.ones(1)
                dist.all_reduce(value, group=other)
            assert px.data_parallel(torch.nn.Linear(2, 2).to(world.device)).device_ids == [0]
            try:
                px.data_parallel(torch.nn.Linear(2, 2))
                raise SystemExit("a model on the CPU was taken")
            except px.PhalanxError as error:
                assert f"the model is on cpu, but the device of rank {world.rank} is sim:0" in str(error)
        functions.set_to.clear()

    # gloo copies for the device: the group is not bound to it, and ranks outside of a group do nothing.
    with px.init("gloo", device="sim") as world:
        assert (world.device, world.backend, functions.set_to) == (torch.device("sim", 0), "gloo", [0])
        dist.new_group([0])
        px.barrier()

    # torch's own way: the device is the script's, and nobody else sets it.
    functions.set_to.clear()
    dist.init_process_group("simccl")
    px.barrier()
    assert px.world.current().device == torch.device("sim", 0)
    assert functions.set_to == []
    dist.destroy_process_group()
    px.print("the same on every rank")
"""


def test_a_world_on_an_accelerator(on_sim: Callable[..., Outcome]) -> None:
    outcome = on_sim(WORLD)
    assert (outcome.code, outcome.out) == (0, "[rank 0] the same on every rank\n"), outcome

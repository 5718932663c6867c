"""A DDP model that outlives its process group, on gloo as written."""

from __future__ import annotations

from tests.conftest import Runner, by_rank


def test_it_neither_hangs_nor_crashes(phalanx: Runner, script) -> None:
    """The time between the last backward and the end of the model is what matters: without help torch hangs in about
    every fifth round."""
    name = script(
        """
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        rank, x = int(os.environ["RANK"]), torch.randn(8, 64)
        for turn in range(15):
            dist.init_process_group("gloo", store=dist.PrefixStore(f"turn {turn}", store), rank=rank, world_size=2)
            model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))))
            for _ in range(2):
                model(x).sum().backward()
            dist.destroy_process_group()
            if turn < 14:  # the last one lives until the interpreter ends
                del model
        print(type(model.process_group._get_backend(torch.device("cpu"))).__name__)
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", "--backend", "as-written", name)
    assert outcome.code == 0, outcome.err
    assert by_rank(outcome) == {0: ["ProcessGroupGloo"], 1: ["ProcessGroupGloo"]}

"""The simulated device behaves as a GPU does, where the other tests depend on it."""

from __future__ import annotations

from collections.abc import Callable

from tests.conftest import Outcome

ALONE = """
    import time

    # Kernels are launched, and run later.
    sim.device.delay = 0.2
    began = time.perf_counter()
    x = torch.ones(4, 4, device="sim")
    y = (x @ x).sum()
    launched = time.perf_counter() - began
    event = torch.get_device_module("sim").Event()
    event.record()
    assert not event.query()
    assert y.item() == 64.0
    assert launched < 0.2 < time.perf_counter() - began, launched
    assert event.query()
    sim.device.delay = 0.0

    # Views of views, although torch sees no strides.
    on_cpu = torch.arange(24.0).view(2, 3, 4)
    there = on_cpu.to("sim")
    for view in (
        lambda x: x.transpose(0, 2)[1],
        lambda x: x[:, :, 3:].squeeze(-1),
        lambda x: x.permute(2, 0, 1).reshape(4, 6)[:, 2:4],
        lambda x: x.transpose(0, 1).unbind(1)[1].t(),
        lambda x: x[..., 1].unsqueeze(0).expand(5, 2, 3).split(2)[1],
    ):
        assert torch.equal(view(there).cpu(), view(on_cpu))
    there.transpose(1, 2)[0].fill_(7.0)
    assert torch.equal(there.cpu()[0], torch.full((3, 4), 7.0))

    # Memory can be exhausted, and comes back.
    torch.sim.synchronize()
    sim.device.memory = sim.device.allocated + 1000
    try:
        torch.empty(1000, device="sim")
        raise SystemExit("no limit")
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate 4000 bytes" in str(error)
    torch.empty(100, device="sim")

    # An error of a kernel is noticed later, and stays.
    sim.device.fail("device-side assert triggered")
    for _ in range(2):
        try:
            torch.sim.synchronize()
            raise SystemExit("no error")
        except torch.AcceleratorError as error:
            assert "device-side assert triggered" in str(error)
    print("as a GPU")
"""


def test_an_asynchronous_device(alone_on_sim: Callable[..., Outcome]) -> None:
    outcome = alone_on_sim(ALONE)
    assert (outcome.code, outcome.out) == (0, "as a GPU\n"), outcome

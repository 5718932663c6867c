"""data_parallel in one process: alone, with replicas in threads, and split over devices."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from phalanx import world as worlds
from phalanx.errors import UsageError
from phalanx.failure.missing_gradients import missing_gradients
from phalanx.parallel import data_parallel
from phalanx.parallel.alone import Alone
from phalanx.parallel.replicas import Replicas, gather, scatter
from phalanx.parallel.split import cuts


class Net(nn.Module):
    """Nested inputs and outputs, tied weights, a recurrent layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(6, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        tied = nn.Linear(8, 8)
        self.inner = nn.Sequential(tied, nn.Tanh())
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.full((8,), 0.5))])
        self.out = nn.Linear(8, 8)
        self.out.weight = tied.weight
        self.register_buffer("shift", torch.full((8,), 0.25))

    def forward(self, x: Tensor, more: dict[str, Any] | None = None, *, factor: float = 1.0) -> dict[str, Any]:
        hidden, _ = self.rnn(self.embed(x))
        for scale in self.scales:
            hidden = hidden * scale
        result = self.out(self.inner(hidden + self.shift)) * factor
        if more is not None:
            result = result + more["add"][0][:, None]
        return {"result": result, "parts": (result.sum(-1), None), "mean": result.mean()}


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


# ---- alone


def test_alone_has_the_interface_of_ddp() -> None:
    plain = nn.Linear(3, 2)
    model = data_parallel(plain, compress="bf16", find_unused=True, bucket_cap_mb=1, sync_batchnorm=True)
    assert isinstance(model, Alone)
    assert model.module is plain
    x = torch.randn(4, 3)
    assert torch.equal(model(x), plain(x))
    with model.no_sync():
        assert not model.require_backward_grad_sync
        model(x).sum().backward()
    assert model.require_backward_grad_sync
    with model.join(divide_by_initial_world_size=False):
        model(x).sum().backward()
    model.register_comm_hook(None, print)
    assert torch.equal(gradients(model)[1], torch.tensor([8.0, 8.0]))


def test_ranks_draw_their_own_numbers_once_the_model_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(worlds, "diverge", lambda: called.append("diverge"))
    data_parallel(nn.Linear(2, 2))
    assert called == ["diverge"]


class Nested(nn.Module):
    """Has a part called `module`, as the wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"a": nn.Linear(2, 2), "module": nn.Linear(2, 2)})
        self.a = nn.Linear(2, 2)


@pytest.mark.parametrize("options", [{}, {"mode": "dp", "devices": 2}])
def test_state_dicts_of_a_model_with_a_part_called_module(options: dict[str, Any]) -> None:
    bare, ours = Nested(), data_parallel(Nested(), **options)
    assert list(ours.state_dict()) == list(bare.state_dict())
    ours.load_state_dict(bare.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), bare.parameters(), strict=True))
    bare.load_state_dict(ours.state_dict())
    ours.load_state_dict({f"module.{name}": value for name, value in Nested().state_dict().items()})
    assert not torch.equal(next(ours.parameters()), next(bare.parameters()))


class Versioned(nn.Linear):
    """Tells old files by their version."""

    _version = 7
    seen: Any = "nothing"

    def _load_from_state_dict(self, *arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen = arguments[2].get("version")
        super()._load_from_state_dict(*arguments)


def test_state_dicts_keep_the_versions_of_modules() -> None:
    bare = nn.Sequential(Versioned(2, 2))
    ours = data_parallel(nn.Sequential(Versioned(2, 2)))
    ours.load_state_dict(bare.state_dict())
    assert ours.module[0].seen == 7  # type: ignore[index]
    bare.load_state_dict(ours.state_dict())
    assert bare[0].seen == 7
    pair = nn.ModuleList([ours])
    pair.load_state_dict(copy.deepcopy(pair).state_dict())
    assert ours.module[0].seen == 7  # type: ignore[index]


# ---- replicas in threads


@pytest.mark.parametrize(("rows", "count"), [(8, 2), (7, 3), (2, 4), (1, 2), (5, 1)])
def test_replicas_give_what_the_model_gives(rows: int, count: int) -> None:
    model = Net()
    dp = data_parallel(copy.deepcopy(model), "dp", devices=count)
    assert isinstance(dp, Replicas)
    x, add = torch.randn(rows, 5, 6), torch.randn(rows, 8)
    ours_x, plain_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = dp(ours_x, {"add": [add]}, factor=2.0)
    plain = model(plain_x, {"add": [add]}, factor=2.0)
    torch.testing.assert_close(ours["result"], plain["result"])
    torch.testing.assert_close(ours["parts"][0], plain["parts"][0])
    assert ours["parts"][1] is None
    pieces = len(x.chunk(count))
    assert ours["mean"].shape == ((pieces,) if pieces > 1 else ())
    for result in (ours, plain):
        result["result"].square().sum().backward()
    torch.testing.assert_close(gradients(dp), gradients(model))
    torch.testing.assert_close(ours_x.grad, plain_x.grad)


def test_replicas_run_in_threads_with_the_callers_settings() -> None:
    seen: list[tuple[str, bool, torch.dtype]] = []
    together = threading.Barrier(3)

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            together.wait(timeout=10)  # all replicas are here at once
            result = self.layer(x)
            seen.append((threading.current_thread().name, torch.is_grad_enabled(), result.dtype))
            return result

    model = data_parallel(Spy(), "dp", devices=3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not model(torch.ones(3, 2)).requires_grad
    assert len({name for name, _, _ in seen}) == 3
    assert {found[1:] for found in seen} == {(False, torch.bfloat16)}
    with torch.inference_mode():
        assert model(torch.ones(3, 2)).is_inference()


def test_an_exception_names_its_replica() -> None:
    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if input.max() > 5:
                raise KeyError("too large")
            return super().forward(input)

    model = data_parallel(Picky(2, 2), "dp", devices=2)
    with pytest.raises(KeyError, match=r"in replica 1 of 2(.|\n)*too large"):
        model(torch.tensor([[0.0, 0.0], [9.0, 9.0]]))


def test_the_first_replica_keeps_the_running_statistics() -> None:
    model = data_parallel(nn.BatchNorm1d(2), "dp", devices=2)
    x = torch.tensor([[0.0, 0.0], [2.0, 4.0], [100.0, 100.0], [200.0, 200.0]])
    model(x)
    assert torch.allclose(model.module.running_mean, torch.tensor([0.1, 0.2]))  # type: ignore[arg-type]


def test_frozen_parameters_and_training_with_replicas() -> None:
    model, plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), None
    model[0].weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    dp = data_parallel(model, "dp", devices=2)
    for each in (dp, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            each(torch.arange(12.0).view(4, 3) / 10 + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(dp.parameters()), list(plain.parameters()))


def test_what_cannot_be_cut_or_put_together() -> None:
    class Pair(NamedTuple):
        x: Tensor
        name: str

    first, second = scatter(((Pair(torch.arange(4), "n"), torch.tensor(3)), {"k": 1}), 2)
    assert first[0][0].name == "n"
    assert second[0][0].x.tolist() == [2, 3]
    assert (first[0][1].item(), second[1]) == (3, {"k": 1})
    assert len(scatter(((), {"flag": True}), 3)) == 1
    with pytest.raises(UsageError, match="have 3, 4 rows, so they cannot be cut alike for 2 replicas"):
        scatter(((torch.ones(4), torch.ones(3)), {}), 2)
    with pytest.raises(UsageError, match="different forms"):
        gather([(torch.ones(1),), (torch.ones(1), torch.ones(1))])
    with pytest.raises(UsageError, match="returned 1, 2, which cannot be put together"):
        gather([{"n": 1}, {"n": 2}])


# ---- split


def test_cuts_are_the_best_there_are() -> None:
    for sizes in ([5, 1, 1, 1, 5], [0, 0, 9], [3, 1, 4, 1, 5, 9, 2, 6], [1, 1, 1, 1], [7], [0, 0, 0]):
        for parts in range(1, len(sizes) + 1):
            ends = cuts(sizes, parts)
            runs = [sizes[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            assert all(runs)
            assert len(runs) == parts
            assert list(itertools.chain(*runs)) == sizes
            best = min(
                max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *middle, len(sizes)]))
                for middle in itertools.combinations(range(1, len(sizes)), parts - 1)
            )
            assert max(map(sum, runs)) == best


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def test_a_split_model_gives_what_the_model_gives() -> None:
    plain = layers()
    for options in ({"devices": ["cpu:0", "cpu:1"]}, {"parts": {str(i): f"cpu:{i % 2}" for i in range(5)}}):
        model = data_parallel(layers(), "split", **options)  # type: ignore[arg-type]
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), plain(x))
        assert list(model.state_dict()) == list(plain.state_dict())


class Moved(Tensor):
    """Writes down the devices that it is moved to."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            cls.seen.append(str(args[1]))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_activations_are_moved_to_their_parts() -> None:
    """torch has one CPU, whatever the number behind it, so the moves are watched; `meta` is really another device."""
    model = data_parallel(layers(), "split", devices=["cpu:0", "cpu:1"])
    Moved.seen.clear()
    model(torch.ones(2, 4).as_subclass(Moved))
    assert Moved.seen == ["cpu:0"] * 2 + ["cpu:1"] * 3
    model = data_parallel(layers(), "split", devices=["cpu", "meta"])
    places: list[str] = []
    for layer in model.module.children():
        layer.register_forward_hook(lambda _, inputs, output: places.append(f"{inputs[0].device} {output.device}"))
    assert model(torch.ones(2, 4)).device.type == "meta"
    assert places == ["cpu cpu"] * 2 + ["meta meta"] * 3
    assert [parameter.device.type for parameter in model.parameters()] == ["cpu"] * 2 + ["meta"] * 4


def test_nested_inputs_and_keywords_are_moved() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Net(), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(x, more={"add": [torch.zeros(2, 8)]}))

    model = data_parallel(Pair(), "split", parts={"a": "meta", "b": "meta"})
    assert model(torch.ones(2, 5, 6))["parts"][0].device.type == "meta"


# ---- mistakes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
        self.b.weight = self.a.weight


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (nn.Linear, {"mode": "fsdp"}, r"mode='fsdp' is unknown; there are 'ddp', 'dp', 'replicate', 'split'"),
        (nn.Linear, {"compress": "int8"}, r"compress='int8' is unknown; there are 'bf16', 'fp16', 'powersgd', and"),
        (nn.Linear, {"bucket_cap": 1}, r"bucket_cap is no argument of data_parallel, nor of torch's"),
        (nn.Linear, {"find_unused_parameters": True}, r"here, give find_unused\."),
        (nn.Linear, {"devices": 2}, r"mode='ddp' takes the device from the model"),
        (nn.Linear, {"parts": {"a": "cpu"}}, r"parts is for mode='split', and the mode is 'ddp'"),
        (nn.Linear, {"mode": "dp", "find_unused": True}, r"mode='dp' has no use for find_unused"),
        (nn.Linear, {"mode": "dp", "sync_batchnorm": True}, r"not with mode='dp'; use 'ddp'"),
        (nn.Linear, {"mode": "dp", "devices": 0}, r"devices is 0; give the number of replicas, from 1"),
        (nn.Linear, {"mode": "dp", "devices": ["cuda:0"]}, r"but the model is on the CPU; move it to the first"),
        (nn.Linear, {"mode": "split"}, r"takes either parts=\{…\} or, for an nn.Sequential, devices"),
        (nn.Linear, {"mode": "split", "devices": ["cpu"]}, r"a Linear can only be split by names"),
        (nn.Linear, {"mode": "split", "parts": {"a": "cpu"}}, r"parts names 'a', which the model does not have"),
        (Tied, {"mode": "split", "parts": {"a": "cpu", "b": "cpu"}}, r"c\.0\.weight is in no part; parts has a, b"),
        (Tied, {"mode": "split", "parts": {"a": "cpu:0", "b": "cpu:1", "c": "cpu"}}, r"b\.weight are one"),
        (Tied, {"mode": "split", "parts": {"a": "cpu", "b": "cpu", "c": "cpu", "c.0": "cpu"}}, r"parts c and c\.0"),
        (Tied, {"mode": "split", "parts": {"a": "gpu"}}, r"device 'gpu' is unknown to torch"),
        (Tied, {"mode": "split", "parts": {"a": "cuda:9"}}, r"to go to cuda:9, but torch sees \d GPU"),
        (nn.Sequential, {"mode": "split", "devices": ["cpu"]}, r"of 0 layers cannot be split over 1 devices"),
        (nn.Sequential, {"mode": "split", "devices": 2}, r"devices is 2; give the list of devices"),
    ],
)  # fmt: skip
def test_mistakes_are_told(model: type[nn.Module], options: dict[str, Any], told: str) -> None:
    made = model(2, 2) if model is nn.Linear else model()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=told):
        data_parallel(made, **options)


def test_a_model_on_another_device_than_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that no machine of ours has."""
    from phalanx.parallel import wrap

    group = wrap._Group(1, 2, torch.device("cuda", 1))
    with pytest.raises(UsageError, match="the model is on cpu, but the device of rank 1 is cuda:1; move it there"):
        group.check(nn.Linear(2, 2))
    monkeypatch.setattr(wrap, "_devices", lambda _: {torch.device("cuda", 0)})
    with pytest.raises(UsageError, match="the model is on cuda:0, but the device of rank 1 is cuda:1"):
        group.check(nn.Linear(2, 2))
    assert wrap._device_ids(nn.Linear(2, 2)) == [torch.device("cuda", 0)]
    with pytest.raises(UsageError, match="mode='replicate' needs the GPUs of rank 1"):
        wrap._replicated(nn.Linear(2, 2), None, group)
    monkeypatch.setattr(wrap, "_devices", lambda _: {torch.device("cuda", 0), torch.device("cuda", 1)})
    assert wrap._device_ids(nn.Linear(2, 2)) is None


def test_the_words_about_missing_gradients() -> None:
    ddp = "Expected to have finished reduction in the prior iteration before starting a new one. … "
    names = [f"p{index}" for index in range(12)]
    one = missing_gradients(
        f"{ddp}Parameter indices which did not receive grad for rank 3: 2\n In addition", names, False
    )
    assert one is not None
    assert one.startswith("p2 got no gradient in the last step on rank 3, so it was never finished; give ")
    assert "freeze it" in one
    indices = " ".join(str(index) for index in range(12))
    many = missing_gradients(f"{ddp}Parameter indices which did not receive grad for rank 0: {indices}", names, True)
    assert many is not None
    assert many.startswith("p0, p1, p2, p3, p4, p5, p6, p7 and 4 more got no gradient")
    assert "every output of forward must take part" in many
    assert missing_gradients("something else", names, False) is None
    assert missing_gradients(ddp, names, False) is None

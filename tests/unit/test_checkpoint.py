"""Checkpoints in a world of one: what is on the disk, what is skipped and why, when a save is due, who writes what."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.checkpoint import command, flatten, sharding
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.flatten import NamedTensor
from phalanx.checkpoint.schedule import Schedule
from phalanx.checkpoint.storage import local, shard_file
from phalanx.checkpoint.storage.base import Checksum, open_storage
from phalanx.checkpoint.storage.manifest import Broken, Chunk, Manifest, SavedTensor, decode
from phalanx.errors import CheckpointError, UsageError
from phalanx.torch_compat.tensors import tree_flatten


def model_of(value: float, rows: int = 4) -> nn.Module:
    model = nn.Linear(3, rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def saved(path: Path | str, *steps: int, **options: Any) -> None:
    """A checkpoint of each step, in which every weight is the step's number."""
    with px.Checkpointer(path, **options) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, model=model_of(step), extra={"note": f"of {step}"})


def loaded(path: Path | str) -> int | None:
    """The step that load_latest finds; its weights are the right ones."""
    model = model_of(-1)
    state = px.Checkpointer(path).load_latest(model=model)
    if state is None:
        return None
    assert all((parameter == state.step).all() for parameter in model.parameters())
    assert state.extra == {"note": f"of {state.step}"}
    return state.step


# ---- on the disk


def test_only_whole_checkpoints_and_only_the_newest_are_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert loaded(path) is None
    saved(path, 1, 2, 3, 4, keep=2)
    assert sorted(each.name for each in path.iterdir()) == ["step-3", "step-4"]
    assert loaded(path) == 4
    assert px.Checkpointer(path).steps() == [3, 4]
    names = sorted(each.name for each in (path / "step-4").iterdir())
    assert names == ["manifest.json", "rank-0.safetensors"]


def test_a_copy_is_saved_not_what_training_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is held back until the weights have changed; the copy's memory is used for the next save."""
    import threading

    changed, create = threading.Event(), local.LocalStorage.create
    monkeypatch.setattr(local.LocalStorage, "create", lambda *given: (changed.wait(), create(*given))[1])
    model = model_of(1)
    with px.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            changed.clear()
            checkpointer.save(step, model=model, extra={"note": f"of {step}"})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step + 1)
            changed.set()
            checkpointer.wait()
            assert loaded(tmp_path) == step


def test_files_are_on_the_disk_before_their_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(fd: int) -> None:
        fsync(fd)
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    def record_rename(source: Any, target: Any, **options: Any) -> None:
        rename(source, target, **options)
        done.append(("rename", os.path.basename(target)))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    saved(tmp_path, 7)
    aside = next(name for kind, name in done if name.startswith("step-7.tmp-"))
    assert done == [
        ("sync", "rank-0.safetensors"),
        ("sync", "manifest.json"),
        ("sync", aside),
        ("rename", "step-7"),
        ("sync", tmp_path.name),
    ]


def test_a_step_that_is_saved_again_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 5)
    found, publish = [], local.LocalStorage.publish

    def look(storage: local.LocalStorage, temporary: str, final: str) -> None:
        found.append(loaded(tmp_path))
        publish(storage, temporary, final)
        found.append(loaded(tmp_path))

    monkeypatch.setattr(local.LocalStorage, "publish", look)
    saved(tmp_path, 5)
    assert found == [5, 5]
    assert len(list(tmp_path.iterdir())) == 1
    assert loaded(tmp_path) == 5


def test_an_older_step_beside_newer_ones_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    with pytest.raises(UsageError, match="has a checkpoint of step 10, and step 3 is to be saved"):
        saved(tmp_path, 3)
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(11)
        with pytest.raises(UsageError, match="step 4 is to be saved after step 11"):
            checkpointer.save(4)
    assert not (tmp_path / ".writer").exists()


def test_what_an_earlier_run_left_is_removed_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-3.tmp-0123456789ab").mkdir()
    (tmp_path / "step-3.tmp-0123456789ab" / "rank-0.safetensors").write_bytes(b"half")
    (tmp_path / "step-1.old-01234567").mkdir()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "notes").mkdir()
    assert loaded(tmp_path) is None
    assert "skipped the checkpoint step-2" in capsys.readouterr().err
    saved(tmp_path, 4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "step-4"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("phalanx: removed step-") for line in lines)


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    hold = "import sys\nfrom phalanx.checkpoint.storage.local import LocalStorage\nLocalStorage(sys.argv[1]).lock()"
    hold += "\nprint('has it', flush=True)\nsys.stdin.read()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(UsageError, match=f"are being written by pid {other.pid} on host"):
            saved(tmp_path, 1)
        assert loaded(tmp_path) is None  # reading is for everybody
        other.kill()
    saved(tmp_path, 1)
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda step: (step / "rank-0.safetensors").unlink(), "rank-0.safetensors is missing"),
        (
            lambda step: os.truncate(step / "rank-0.safetensors", 100),
            "rank-0.safetensors has 100 bytes and should have",
        ),
        (lambda step: flip(step / "rank-0.safetensors"), "rank-0.safetensors is damaged: its checksum is"),
        (lambda step: flip(step / "manifest.json"), "manifest.json is damaged"),
        (lambda step: os.truncate(step / "manifest.json", 50), "manifest.json is damaged"),
        (lambda step: (step / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda step: unreadable(step / "manifest.json"), "it cannot be read: it is no plain file"),
        (lambda step: unreadable(step / "rank-0.safetensors"), "rank-0.safetensors has"),
    ],
)
def test_a_damaged_one_is_skipped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], words: str
) -> None:
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-3")
    damage(tmp_path / "step-2")
    assert loaded(tmp_path) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(words)[0] for line in lines] == [
        f"phalanx: skipped the checkpoint step-{step} in {tmp_path}: " for step in (3, 2)
    ]
    with pytest.raises(CheckpointError, match=f"step 3 in {tmp_path} is damaged"):
        px.Checkpointer(tmp_path).load(3)
    assert command.main(["verify", str(tmp_path), "--step", "3"]) == 1
    # The run that resumes at step 1 puts whole ones in their place.
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load_latest()
        for step in (2, 3):
            checkpointer.save(step, model=model_of(step), extra={"note": f"of {step}"})
    assert command.main(["verify", str(tmp_path)]) == 0
    assert loaded(tmp_path) == 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def unreadable(path: Path) -> None:
    """Root may read any file, but no directory as a file."""
    path.unlink()
    path.mkdir()


def test_a_failed_save_is_an_error_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load_latest()
        with monkeypatch.context() as patch:
            patch.setattr(local.LocalStorage, "create", broken_disk)
            checkpointer.save(2, model=model_of(2))
            with pytest.raises(CheckpointError, match=r"rank 0 could not write .* step 2 to .*: Input/output error\."):
                checkpointer.save(3, model=model_of(3))
        assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["step-1"]
        checkpointer.save(3, model=model_of(3), extra={"note": "of 3"})
    assert loaded(tmp_path) == 3


def broken_disk(*_: Any, **__: Any) -> Any:
    raise OSError(5, os.strerror(5))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model = model_of(9, rows=5)
    with pytest.raises(CheckpointError, match=r"weight has shape \(4, 3\) in the checkpoint and \(5, 3\) in the model"):
        px.Checkpointer(tmp_path).load_latest(model=model)
    assert (model.get_parameter("weight") == 9).all()
    with pytest.raises(CheckpointError, match=r"0.weight is not in the checkpoint; .* and 1 more"):
        px.Checkpointer(tmp_path).load_latest(model=nn.Sequential(model_of(0)))
    with pytest.raises(CheckpointError, match="has no scheduler; it was saved with model, extra"):
        px.Checkpointer(tmp_path).load_latest(scheduler=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="has no checkpoint of step 2; there are: 1"):
        px.Checkpointer(tmp_path).load(2)
    with pytest.raises(UsageError, match="sampler is a range, which has no state_dict"):
        px.State(sampler=range(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="both a State and model were given"):
        px.Checkpointer(tmp_path).save(px.State(), model=model)


def kilobytes(name: str) -> int:
    return int(re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def test_loading_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    """Not of the whole state: on a node with 8 GPUs every rank would hold it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is used now
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be reset here: {error}")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    nn.utils.vector_to_parameters(torch.zeros(sum(each.numel() for each in expected)), model.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    px.Checkpointer(tmp_path).load_latest(model=model)
    grown = kilobytes("VmHWM") - before
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))
    assert grown < 24_000, f"{grown} kB for a state of 65,536 kB"


def test_a_state_that_was_read_piecemeal_is_made_of_plain_tensors(tmp_path: Path) -> None:
    """Whatever an optimizer keeps, and whatever a hook of the model does with the tensors."""
    model, seen = nn.Linear(3, 3), []
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.LBFGS(model.parameters())]
    for optimizer in optimizers:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(lambda: model(torch.ones(1, 3)).pow(2).sum())
    for step, optimizer in enumerate(optimizers):
        with px.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(step, model=model, optimizer=optimizer)

    def hook(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
        seen.append((type(state["weight"].cpu()), state["weight"].numpy().shape, f"{state['bias']}"))
        state["weight"] = state["weight"] * 2

    for step, optimizer in enumerate(optimizers):
        other = nn.Linear(3, 3)
        other.register_load_state_dict_pre_hook(hook)
        fresh = type(optimizer)(other.parameters())
        px.Checkpointer(tmp_path).load(step, model=other, optimizer=fresh)
        assert torch.equal(other.weight, model.weight * 2)
        assert seen[-1] == (Tensor, (3, 3), f"{model.bias.detach()}")
        leaves = tree_flatten([*fresh.state.values()])[0]
        assert {type(leaf) for leaf in leaves if isinstance(leaf, Tensor)} == {Tensor}
        copies = tree_flatten([*optimizer.state.values()])[0]
        pairs: Any = zip(leaves, copies, strict=True)
        assert all(torch.equal(*pair) for pair in pairs if isinstance(pair[0], Tensor))


def test_a_disk_that_fails_in_the_middle_of_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    fill = shard_file._fill
    monkeypatch.setattr(
        shard_file, "_fill", lambda file, tensor: (broken_disk if tensor.dim() == 2 else fill)(file, tensor)
    )
    with pytest.raises(CheckpointError, match=r"step-1 in .* loaded in part: .*Input/output error"):
        px.Checkpointer(tmp_path).load_latest(model=model_of(9))


def test_groups_of_an_optimizer_have_to_fit_and_its_order_need_not(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
    wrong = torch.optim.SGD([{"params": each.parameters()} for each in model], lr=0.5)
    with pytest.raises(CheckpointError, match="groups of 2, 2 parameters, and in the checkpoint they are of 4"):
        px.Checkpointer(tmp_path).load_latest(model=model, optimizer=wrong)
    turned = torch.optim.SGD(reversed(list(model.parameters())), lr=0.5, momentum=0.9)
    px.Checkpointer(tmp_path).load_latest(model=model, optimizer=turned)
    assert turned.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        assert torch.equal(turned.state[parameter]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    yield "memory://checkpoints/run"
    fs.rm("/checkpoints", recursive=True)


def test_behind_fsspec_the_manifest_makes_a_checkpoint(
    memory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("memory")
    assert loaded(memory) is None
    saved(memory, 1, 2, 3, keep=2)
    saved(memory, 3, keep=2)  # again, beside the first one until it is whole
    assert loaded(memory) == 3
    assert px.Checkpointer(memory).steps() == [2, 3]
    directories = fs.ls("/checkpoints/run", detail=False)
    assert len(directories) == 2
    newest = next(name for name in directories if "step-3" in name)
    fs.rm(f"{newest}/manifest.json")
    assert loaded(memory) == 2
    assert "it has no manifest.json" in capsys.readouterr().err
    saved(memory, 4, keep=2)
    assert f"removed {Path(newest).name} in {memory}" in capsys.readouterr().err
    assert px.Checkpointer(memory).steps() == [2, 4]
    with monkeypatch.context() as patch:  # half of it is removed
        patch.setattr(type(fs), "rm", broken_disk)
        with pytest.raises(OSError, match="Input/output error"):
            open_storage(memory).remove(Catalog(open_storage(memory)).whole()[0].directory)
    assert loaded(memory) == 2
    with pytest.raises(UsageError, match="nosuch://x cannot be opened: Protocol not known"):
        px.Checkpointer("nosuch://x")


# ---- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    saved(tmp_path / "run", 1, 20)
    capsys.readouterr()
    assert command.main(["ls", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-20", "step-1"]
    assert lines[0].endswith("1 rank  model, extra")
    assert command.main(["ls", str(tmp_path / "run"), "--json"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [20, 1]
    flip(tmp_path / "run/step-20/rank-0.safetensors")
    assert command.main(["verify", str(tmp_path / "run"), "--json"]) == 1
    assert [bool(each["problem"]) for each in json.loads(capsys.readouterr().out)] == [True, False]
    assert command.main(["verify", str(tmp_path / "run/step-1")]) == 0
    assert command.main(["export", str(tmp_path / "run"), str(tmp_path / "w.safetensors")]) == 0
    assert "skipped the checkpoint step-20" in capsys.readouterr().err
    weights = load_file(tmp_path / "w.safetensors")
    assert sorted(weights) == ["bias", "weight"]
    assert all((weight == 1).all() for weight in weights.values())
    with pytest.raises(CheckpointError, match="there is no checkpoint in /no/where"):
        command.main(["ls", "/no/where"])
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5; there are: 1, 20"):
        command.main(["verify", str(tmp_path / "run"), "--step", "5"])
    with pytest.raises(CheckpointError, match=r"cannot write .*: No such file or directory"):
        command.main(["export", str(tmp_path / "run"), str(tmp_path / "no/w.safetensors")])


def test_listing_and_verifying_import_no_torch(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    code = "import sys\nfrom phalanx.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules)"
    for words in (["ls", str(tmp_path)], ["verify", str(tmp_path)]):
        out = subprocess.run(
            [sys.executable, "-c", code, "checkpoint", *words], capture_output=True, text=True, check=True
        ).stdout
        assert out.splitlines()[-1] == "False"
        assert out.startswith("step-1 ")


# ---- when


def test_every_so_many_steps(tmp_path: Path) -> None:
    with px.Checkpointer(tmp_path, keep=None, every=10) as checkpointer:
        written = [step for step in range(0, 48, 3) if checkpointer.save(step)]
        assert written == [12, 21, 30, 42]
        assert checkpointer.save(47, force=True)
        assert not checkpointer.save(47, force=True)
    with px.Checkpointer(tmp_path, keep=None, every=10) as checkpointer:
        checkpointer.load_latest()
        assert [step for step in range(48, 62) if checkpointer.save(step)] == [50, 60]
        assert checkpointer.steps() == [12, 21, 30, 42, 47, 50, 60]


def test_every_so_much_time_asks_rank_zero_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    asked = []
    every = Schedule("10s", lambda work, _: (asked.append(now[0]), work())[1])
    due = []
    for step in range(2900):
        now[0] += 0.01
        if every.is_due(step):
            due.append(now[0])
            every.record(step)
    gaps = [later - earlier for earlier, later in pairwise([100.0, *due])]
    assert len(due) == 2
    assert all(10 <= gap < 10.02 for gap in gaps)
    assert len(asked) < 80


@pytest.mark.parametrize("every", [0, -3, True, 1.5, "10", "0s", "ten min", "5 days"])
def test_times_that_are_none(every: Any) -> None:
    with pytest.raises(UsageError, match="every="):
        Schedule(every, lambda work, _: work())


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10min", 600), ("1.5 h", 5400)])
def test_times(text: str, seconds: float) -> None:
    assert getattr(Schedule(text, lambda work, _: work()), "_seconds") == seconds  # noqa: B009


# ---- who


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_equal_and_cover_everything_once(size: int) -> None:
    shapes = [(3_000, 700), (5,), (), (0, 4), (1, 900_000), (1_000_001,), (17, 3)]
    tensors = [NamedTensor(f"model.{n}", torch.zeros(shape), "shared") for n, shape in enumerate(shapes)]
    tensors += [NamedTensor("model.buffer", torch.zeros(50_000), "buffer"), NamedTensor("extra.a", torch.zeros(7))]
    covered = {named.name: torch.zeros_like(named.tensor) for named in tensors}
    loads = []
    for rank, share in enumerate(sharding.plan(tensors, size)):
        loads.append(0)
        for part in share:
            whole = covered[part.named.name]
            rows = whole[part.first : part.first + part.rows] if whole.dim() else whole
            rows += 1
            loads[-1] += rows.nbytes
            assert part.named.name != "model.buffer" or rank == 0
        assert sum(part.named.name == "model.0" for part in share) <= 1
    assert not covered.pop("extra.a").any()  # nobody but the rank that has it knows of it
    assert all((count == 1).all() for count in covered.values())
    assert max(loads) - min(loads) <= 3_600_000 + 2800  # one tensor has a single row, and stays in one piece


def test_parameters_and_their_optimizer_are_shared_and_nothing_else() -> None:
    """Buffers differ between the ranks, and DDP continues with those of rank 0."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    state = px.State(model=px.data_parallel(model), optimizer=optimizer, extra={"a": torch.ones(1)})
    tensors = flatten.flatten(state, 0, trust=False).tensors
    shared = {named.name for named in tensors if named.kind == "shared"}
    assert shared == {named.name for named in tensors if named.copy_later}
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert shared == {f"model.{name}" for name in names} | {f"optimizer.state.{n}.{k}" for n in names for k in keys}
    buffers = {named.name for named in tensors if named.kind == "buffer"}
    assert buffers == {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"}
    own = {named.name for named in tensors if named.kind == "own"}
    assert own == {"extra.a", "rng.0.numpy.1", "rng.0.torch"}
    others = {named.name for named in flatten.flatten(state, 1, trust=False).tensors}
    assert others == shared | buffers | {"rng.1.numpy.1", "rng.1.torch"}


def test_what_is_not_a_plain_tensor_is_refused_or_kept_whole(tmp_path: Path) -> None:
    class Odd(Tensor):
        pass

    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"state": {"w": {"x": self.value}}, "param_groups": [{"params": []}]}

        param_groups: Any = ({"params": []},)

        def load_state_dict(self, state: Any) -> None:
            self.value = state

    with pytest.raises(UsageError, match=r"optimizer.state.w.x is a Odd, and px.Checkpointer saves plain tensors"):
        px.Checkpointer(tmp_path).save(1, optimizer=Holder(torch.zeros(2).as_subclass(Odd)))
    for odd in (torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex128)):
        with pytest.raises(UsageError, match=r"optimizer\['state'\]\['w'\]\['x'\] is a tensor of torch.*trust=True"):
            px.Checkpointer(tmp_path).save(1, optimizer=Holder(odd))
        with px.Checkpointer(tmp_path / "trusted", trust=True) as checkpointer:
            checkpointer.save(1, optimizer=Holder(odd))
        holder = Holder(None)
        with pytest.raises(CheckpointError, match=r"has objects that were pickled, .* trust=True"):
            px.Checkpointer(tmp_path / "trusted").load_latest(optimizer=holder)
        px.Checkpointer(tmp_path / "trusted", trust=True).load_latest(optimizer=holder)
        assert (holder.value["state"] == {}) or torch.equal(holder.value["state"][0]["x"].to_dense(), odd.to_dense())


def test_a_state_goes_through_torch_save(tmp_path: Path) -> None:
    model, other = model_of(1), model_of(2)
    state = px.State(model=model, optimizer=torch.optim.AdamW(model.parameters()), step=3, extra={"best": 0.5})
    model(torch.ones(1, 3)).sum().backward()
    state.optimizer.step()
    torch.save(state.state_dict(), tmp_path / "s.pt")
    drawn = torch.rand(3)
    again = px.State(model=other, optimizer=torch.optim.AdamW(other.parameters()), extra={"best": 0.0})
    again.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=False))
    assert torch.equal(torch.rand(3), drawn)
    assert (again.step, again.extra) == (3, {"best": 0.5})
    assert torch.equal(other.get_parameter("weight"), model.get_parameter("weight"))
    assert again.optimizer.state[other.weight]["step"] == 1
    with pytest.raises(UsageError, match="the state has no sampler"):
        px.State(sampler=again.optimizer).load_state_dict(state.state_dict())


# ---- the manifest


def test_a_manifest_says_what_it_said(tmp_path: Path) -> None:
    tensors = {"model.a": SavedTensor("F32", (2,), (Chunk(0, 0, 1), Chunk(1, 1, 1)))}
    files = {"rank-0.safetensors": Checksum(10, 77), "rank-1.safetensors": Checksum(9, 5)}
    manifest = Manifest(
        step=3,
        time=1.5,
        world_size=2,
        parts=("model",),
        phalanx="0.1",
        torch="2.13",
        files=files,
        tensors=tensors,
        values={"model": {}},
        rng=[None, None],
    )
    assert decode(manifest.encode()) == manifest
    for content in (b"", b"{}", b"[1]", manifest.encode().replace(b"77", b"78"), manifest.encode()[:-9]):
        with pytest.raises(Broken):
            decode(content)
    later = json.loads(manifest.encode())
    assert later["version"] == 2
    assert Catalog(open_storage(tmp_path)).entries() == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, not a directory of checkpoints"):
        Catalog(open_storage(tmp_path / "file")).entries()

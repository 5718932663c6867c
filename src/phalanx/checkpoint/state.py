"""`State`: everything a training run is made of, as one object that can be saved and loaded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from phalanx import world as worlds
from phalanx.argparser import whole_number
from phalanx.checkpoint import optimizers
from phalanx.checkpoint.optimizers import OptimizerLike
from phalanx.checkpoint.storage.manifest import Broken
from phalanx.checkpoint.storage.values import StateDict, Stateful
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.torch_compat.dynamo import inside_of_compiled
from phalanx.torch_compat.nn import METADATA
from phalanx.torch_compat.tensors import tree_map_only
from phalanx.world import mixed_seed, seed_all

PARTS = ("model", "optimizer", "scheduler", "sampler", "extra")
"""The optional parts. The step and the random number generators always belong to a state."""


class State:
    """The model, the optimizer, the scheduler, the sampler, the step, and whatever else a run needs to resume.

        state = px.State(model=model, optimizer=optimizer, sampler=sampler)
        with px.Checkpointer("checkpoints", every=100) as checkpointer:
            checkpointer.load_latest(state)
            ...
            state.step += 1
            checkpointer.save(state)

    Args:
        model: a module, bare or wrapped by px.data_parallel, DistributedDataParallel or torch.compile.
        optimizer, scheduler, sampler: anything with state_dict and load_state_dict.
        step: how many steps have been done.
        extra: a dict of what else belongs to the run. Values with state_dict and load_state_dict, such as a
            GradScaler, are saved and loaded by these; the others are replaced when a state is loaded.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: OptimizerLike | None = None,
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        step: int = 0,
        extra: StateDict | None = None,
    ) -> None:
        self.model = model
        # The classes of these are the user's, who reads them here again.
        self.optimizer: Any = optimizer
        self.scheduler: Any = scheduler
        self.sampler: Any = sampler
        self.step = step
        self.extra: StateDict = {} if extra is None else extra
        if not isinstance(self.extra, dict):
            raise UsageError(f"extra is {extra!r:.80}; give a dict of what else belongs to the run.")
        for name in ("model", "optimizer", "scheduler", "sampler"):
            _check_stateful(name, getattr(self, name))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that were given."""
        return tuple(name for name in PARTS if getattr(self, name) not in (None, {}))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns them by their names in the model's state dict. Unlike buffers, they are equal on all ranks."""
        if self.model is None:
            return {}
        found = unwrapped(self.model).state_dict(keep_vars=True)
        return {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}

    def state_dict(self) -> StateDict:
        """Returns all parts, without copies of tensors, and the random number generators of this process.

        The optimizer's state has the names of parameters where torch's has their numbers.
        """
        found: StateDict = {"step": self.step, "rng": capture_random(_device())}
        if self.model is not None:
            found["model"] = unwrapped(self.model).state_dict()
        if self.optimizer is not None:
            found["optimizer"] = optimizers.by_name(self.optimizer, self.parameters())
        for name, part in (("scheduler", self.scheduler), ("sampler", self.sampler)):
            if part is not None:
                found[name] = part.state_dict()
        if self.extra:
            found["extra"] = {
                key: value.state_dict() if _is_stateful(value) else value for key, value in self.extra.items()
            }
        return found

    def load_state_dict(self, state: StateDict) -> None:
        """Loads the parts that this object has. Tensors may be on any device."""
        missing = [name for name in self.parts if name not in state and name != "extra"]
        if missing:
            raise UsageError(f"the state has no {' and no '.join(missing)}; it has {', '.join(sorted(state))}.")
        if self.model is not None:
            load_model(unwrapped(self.model), state["model"])
        if self.optimizer is not None:
            optimizers.load(self.optimizer, self.parameters(), state["optimizer"])
        for name, part in (("scheduler", self.scheduler), ("sampler", self.sampler)):
            if part is not None:
                part.load_state_dict(state[name])
        for key, value in state.get("extra", {}).items():
            if _is_stateful(self.extra.get(key)):
                self.extra[key].load_state_dict(value)
            else:
                self.extra[key] = value
        self.step = state["step"]
        if "rng" in state:
            self.set_random(lambda: restore_random(state["rng"], _device()))

    def set_random(self, restore: Callable[[], None]) -> None:
        """Calls ``restore`` now, and again when the loaded sampler begins.

        A DataLoader draws a random number when it begins. In the run that is resumed it had begun before the state was
        saved, so here that number must not count.
        """
        worlds.diverge()  # px.track or px.data_parallel would do it later, and overwrite what is restored now
        restore()
        if hasattr(self.sampler, "on_resume"):
            self.sampler.on_resume(restore)


def to_save(state: int | State, **parts: object) -> State:
    """Makes a state of the arguments of Checkpointer.save."""
    given: StateDict = {name: value for name, value in parts.items() if value is not None}
    if not isinstance(state, State):
        return State(step=whole_number("step", state), **given)
    if given:
        raise UsageError(f"both a State and {', '.join(given)} were given; put them into the State.")
    state.step = whole_number("step", state.step)
    return state


def to_load(state: State | None, **parts: object) -> State:
    """Makes a state of the arguments of Checkpointer.load."""
    if state is not None and not isinstance(state, State):
        raise UsageError(f"{state!r:.80} is no px.State to load into; give one, or model=…, optimizer=… and so on.")
    return to_save(0 if state is None else state, **parts)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model without wrappers that change the names of its state dict. phalanx's own ones keep them."""
    while True:
        if isinstance(inner := inside_of_compiled(model), nn.Module):
            model = inner
        elif isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        else:
            return model


def load_model(model: nn.Module, state: StateDict) -> None:
    own = model.state_dict()
    given: StateDict = type(own)(state)
    # torch keeps the versions of the modules beside the tensors: the ones of the running code are right here.
    setattr(given, METADATA.attribute, METADATA.needed_of(own, {}))
    try:
        model.load_state_dict(given)
    except RuntimeError as error:
        raise UsageError(f"the model does not take this state: {error}") from None


def on_cpu(value: object) -> object:
    """Copies every tensor to the CPU: a pickle must not ask for the GPU that it came from."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def _device() -> torch.device:
    return worlds.current().device


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    # Not by isinstance: a runtime protocol does not see the attributes of a wrapper that has them by __getattr__.
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _check_stateful(name: str, value: object) -> None:
    if value is not None and not _is_stateful(value):
        raise UsageError(
            f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict; leave it out"
            + (", or use px.ShardSampler." if name == "sampler" else ".")
        )


# ---- random number generators


def capture_random(device: torch.device) -> StateDict:
    """Returns the state of each generator of this process.

    The one of an accelerator of any kind is called ``cuda``, as in checkpoints of earlier versions, which also read it.
    """
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": accelerator.rng_state(device),
        "device_type": device.type,
    }


def check_random(generators: object) -> StateDict:
    """Raises Broken for anything that `capture_random` has not returned."""
    state = generators if isinstance(generators, dict) else {}
    try:
        version, numbers, _ = state["python"]
        kind, keys, *rest = state["numpy"]
        tensors = [state["torch"], *([] if state["cuda"] is None else [state["cuda"]])]
        is_right = type(version) is int and len(numbers) == 625 and all(type(each) is int for each in numbers)
        is_right &= isinstance(kind, str) and isinstance(keys, numpy.ndarray) and len(rest) == 3
        is_right &= all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in tensors)
    except (KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise Broken("its random generators are damaged")
    return state


def restore_random(state: StateDict, device: torch.device) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == state.get("device_type", "cuda"):
        accelerator.set_rng_state(state["cuda"], device)


def reseed_random(state_of_rank_0: StateDict, rank: int, size: int) -> None:
    """Seeds the generators of a run that resumes with another world size, where no rank's state can be restored.

    The seeds depend on the state of rank 0 and on the size alone, so that resuming twice gives the same run.
    """
    digest = hashlib.blake2b(state_of_rank_0["torch"].numpy().tobytes() + b"%d" % size, digest_size=7).digest()
    seed_all(mixed_seed(int.from_bytes(digest, "little"), rank))

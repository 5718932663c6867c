"""`State`: everything a training run is made of, as one object that can be saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from phalanx import world as worlds
from phalanx.argparser import whole_number
from phalanx.checkpoint import optimizers, rng_state
from phalanx.errors import UsageError
from phalanx.torch_compat.dynamo import inside_of_compiled
from phalanx.torch_compat.nn import METADATA
from phalanx.torch_compat.tensors import tree_map_only

PARTS = ("model", "optimizer", "scheduler", "sampler", "extra")
"""What may be left out. The step and the random numbers always belong to a state."""


class State:
    """The model, the optimizer, the scheduler, the sampler, the step, and what else a run needs to go on.

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
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        step: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.sampler = model, optimizer, scheduler, sampler
        self.step = step
        self.extra: dict[str, Any] = {} if extra is None else extra
        if not isinstance(self.extra, dict):
            raise UsageError(f"extra is {extra!r:.80}; give a dict of what else belongs to the run.")
        for name in ("model", "optimizer", "scheduler", "sampler"):
            _check_stateful(name, getattr(self, name))

    @property
    def parts(self) -> tuple[str, ...]:
        """Those that were given."""
        return tuple(name for name in PARTS if getattr(self, name) not in (None, {}))

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the model's state dict. On all ranks they are equal at every step, unlike buffers."""
        if self.model is None:
            return {}
        found = unwrapped(self.model).state_dict(keep_vars=True)
        return {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}

    def state_dict(self) -> dict[str, Any]:
        """All parts, without copies of tensors, and the random numbers of this process.

        The optimizer's state has the names of parameters where torch's has their numbers.
        """
        found: dict[str, Any] = {"step": self.step, "rng": rng_state.take(_device())}
        if self.model is not None:
            found["model"] = unwrapped(self.model).state_dict()
        if self.optimizer is not None:
            found["optimizer"] = optimizers.by_name(self.optimizer, self.parameters())
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler.state_dict()
        if self.sampler is not None:
            found["sampler"] = self.sampler.state_dict()
        if self.extra:
            found["extra"] = {
                key: value.state_dict() if _is_stateful(value) else value for key, value in self.extra.items()
            }
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, for those parts that this object has. Tensors may be on any device."""
        missing = [name for name in self.parts if name not in state and name != "extra"]
        if missing:
            raise UsageError(f"the state has no {' and no '.join(missing)}; it has {', '.join(sorted(state))}.")
        if self.model is not None:
            load_model(unwrapped(self.model), state["model"])
        if self.optimizer is not None:
            optimizers.load(self.optimizer, self.parameters(), state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])
        for key, value in state.get("extra", {}).items():
            if _is_stateful(self.extra.get(key)):
                self.extra[key].load_state_dict(value)
            else:
                self.extra[key] = value
        self.step = state["step"]
        if "rng" in state:
            self.set_random(lambda: rng_state.give_back(state["rng"], _device()))

    def set_random(self, restore: Callable[[], None]) -> None:
        """Calls ``restore`` now, and again when the loaded sampler begins.

        A DataLoader draws a random number when it begins. In the run that is gone on with it began before the state
        was saved, so here that number must not count.
        """
        worlds.diverge()  # what px.track or px.data_parallel would do later, over what is restored now
        restore()
        if hasattr(self.sampler, "when_it_goes_on"):
            self.sampler.when_it_goes_on(restore)


def to_save(state: int | State, **parts: Any) -> State:
    """What the arguments of Checkpointer.save mean."""
    given = {name: value for name, value in parts.items() if value is not None}
    if not isinstance(state, State):
        return State(step=whole_number("step", state), **given)
    if given:
        raise UsageError(f"both a State and {', '.join(given)} were given; put them into the State.")
    state.step = whole_number("step", state.step)
    return state


def to_load(state: State | None, **parts: Any) -> State:
    """What the arguments of Checkpointer.load mean."""
    if state is not None and not isinstance(state, State):
        raise UsageError(f"{state!r:.80} is no px.State to load into; give one, or model=…, optimizer=… and so on.")
    return to_save(0 if state is None else state, **parts)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model whose state dict has the names that the user gave. phalanx's own wrappers see to that themselves."""
    while True:
        if isinstance(inner := inside_of_compiled(model), nn.Module):
            model = inner
        elif isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        else:
            return model


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    own = model.state_dict()
    given: dict[str, Any] = type(own)(state)
    # The versions of the modules, which torch keeps beside the tensors: those of the code that runs.
    setattr(given, METADATA.attribute, METADATA.needed_of(own, {}))
    try:
        model.load_state_dict(given)
    except RuntimeError as error:
        raise UsageError(f"the model does not take this state: {error}") from None


def on_cpu(value: Any) -> Any:
    """The same, with every tensor copied to the CPU: what is pickled must not ask for the GPU it came from."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def _device() -> torch.device:
    return worlds.current().device


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _check_stateful(name: str, value: Any) -> None:
    if value is not None and not _is_stateful(value):
        raise UsageError(
            f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict; leave it out"
            + (", or use px.ShardSampler." if name == "sampler" else ".")
        )

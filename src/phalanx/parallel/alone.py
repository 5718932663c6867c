"""Wrappers of a model in one process, and the model's own names in the state dicts of all wrappers.

Hooks take the prefix ``module.`` out of state dicts, and put it back when one is loaded, so it also works for a wrapped
model inside another model. They are plain functions: one that refers to its module would keep it alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from phalanx.torch_compat.nn import METADATA

_WRAPPED = "module."


class OneProcess(nn.Module):
    """The interface of DistributedDataParallel, without communication. The model is its child ``module``."""

    module: nn.Module
    require_backward_grad_sync = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up, as they do without it: there is no communication to leave out."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """No other process can run out of data."""
        yield

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Accepts a hook and never calls it: no gradient is sent."""


class Alone(OneProcess):
    """A world of one: the model itself, behind the interface of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        save_without_prefix(self)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        return self.module(*inputs, **kwargs)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the user's model inside the wrappers of this package."""
    while isinstance(model, OneProcess):
        model = model.module
    return model


# ---- state dicts


def save_without_prefix(wrapper: nn.Module) -> None:
    """Gives the state dict of a wrapper the names of its child ``module``. It loads those, and those with prefix."""
    wrapper.register_state_dict_post_hook(_remove_prefix)
    wrapper.register_load_state_dict_pre_hook(_add_prefix)


def _remove_prefix(_: nn.Module, state: dict[str, object], prefix: str, __: Mapping[str, object]) -> None:
    wrapped = prefix + _WRAPPED
    # All are taken out before the first one is put back: the model may have a part called `module` itself.
    found = [(key, state.pop(key)) for key in list(state) if key.startswith(wrapped)]
    state.update((prefix + key[len(wrapped) :], value) for key, value in found)
    metadata = METADATA.of(state)
    if metadata is not None:
        # Versions of modules are kept under both names: they are looked up by the name at the time of loading.
        inside = {key: value for key, value in metadata.items() if f"{key}.".startswith(wrapped)}
        metadata.update((f"{prefix}{f'{key}.'[len(wrapped) :]}"[:-1], value) for key, value in inside.items())


def _add_prefix(wrapper: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    given = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    found = [(key, state.pop(prefix + key)) for key in _without_prefix(wrapper.get_submodule("module"), given)]
    state.update((prefix + _WRAPPED + key, value) for key, value in found)
    metadata = METADATA.of(state)
    if metadata is not None:  # torch reads it by the names of the loading modules, which have the prefix
        versions = {f"{prefix}{_WRAPPED}{key[len(prefix) :]}".rstrip("."): metadata[key] for key in metadata}
        metadata.update({key: value for key, value in versions.items() if key not in metadata})


def _without_prefix(model: nn.Module, given: list[str]) -> list[str]:
    """Returns those of the ``given`` names that lack the wrapper's prefix."""
    if not isinstance(getattr(model, "module", None), nn.Module):
        return [key for key in given if not key.startswith(_WRAPPED)]
    # A name that begins with the prefix may be the model's own, so the state dict is judged as a whole.
    own = set(model.state_dict())
    prefixed = sum(key.startswith(_WRAPPED) and key[len(_WRAPPED) :] in own for key in given)
    return given if prefixed <= sum(key in own for key in given) else []

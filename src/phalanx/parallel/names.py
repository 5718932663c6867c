"""State dicts of wrapped models, as if they were not wrapped: without the prefix ``module.`` in both directions.

It is done by hooks, so it holds for a wrapped model that is a part of another model as well. The hooks are plain
functions: one that knows its module would keep it alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from phalanx.torch_compat.nn import METADATA

_WRAPPED = "module."


def save_without_prefix(wrapper: nn.Module) -> None:
    """``wrapper`` has the model as its child ``module``. Its state dict gets the model's names; what it loads may have
    those or the ones that torch's own wrappers give."""
    wrapper.register_state_dict_post_hook(_take_away)
    wrapper.register_load_state_dict_pre_hook(_put_back)


def _take_away(_: nn.Module, state: dict[str, Any], prefix: str, __: Mapping[str, Any]) -> None:
    wrapped = prefix + _WRAPPED
    # All are taken out before the first goes back: a model may have a part called `module` itself.
    found = [(key, state.pop(key)) for key in list(state) if key.startswith(wrapped)]
    state.update((prefix + key[len(wrapped) :], value) for key, value in found)
    metadata = METADATA.of(state)
    if metadata is not None:
        # Versions of modules are kept under both names: they are looked up by the name at the time of loading.
        inside = {key: value for key, value in metadata.items() if f"{key}.".startswith(wrapped)}
        metadata.update((f"{prefix}{f'{key}.'[len(wrapped) :]}"[:-1], value) for key, value in inside.items())


def _put_back(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    given = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    found = [(key, state.pop(prefix + key)) for key in _bare(wrapper.get_submodule("module"), given)]
    state.update((prefix + _WRAPPED + key, value) for key, value in found)
    metadata = METADATA.of(state)
    if metadata is not None:  # torch reads it by the names of the modules that load, which have the prefix
        versions = {f"{prefix}{_WRAPPED}{key[len(prefix) :]}".rstrip("."): metadata[key] for key in metadata}
        metadata.update({key: value for key, value in versions.items() if key not in metadata})


def _bare(model: nn.Module, given: list[str]) -> list[str]:
    """Those of the ``given`` names that lack the wrapper's prefix."""
    if not isinstance(getattr(model, "module", None), nn.Module):
        return [key for key in given if not key.startswith(_WRAPPED)]
    # A name that begins like this may be the model's own, so the file is taken as a whole.
    own = set(model.state_dict())
    prefixed = sum(key.startswith(_WRAPPED) and key[len(_WRAPPED) :] in own for key in given)
    return given if prefixed <= sum(key in own for key in given) else []

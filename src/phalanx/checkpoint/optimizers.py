"""An optimizer's state by the names of the parameters, as torch.distributed.checkpoint.state_dict has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from phalanx.checkpoint.storage.manifest import Broken
from phalanx.errors import CheckpointError


def by_name(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """What state_dict() gives, with names for numbers. A parameter that the model does not have keeps its number."""
    state = optimizer.state_dict()
    names = _names(optimizer, parameters)
    flat = [name for group in names for name in group]
    groups = [{**group, "params": own} for group, own in zip(state["param_groups"], names, strict=True)]
    return {
        "state": {flat[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
        "param_groups": groups,
    }


def load(optimizer: Any, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]) -> None:
    """The inverse of `by_name`."""
    check(optimizer, state)
    saved = [group["params"] for group in state["param_groups"]]
    sources = _match(saved, _names(optimizer, parameters))
    numbers = optimizer.state_dict()["param_groups"]
    groups, states = [], {}
    for group, names, own in zip(state["param_groups"], sources, numbers, strict=True):
        groups.append({**group, "params": own["params"]})
        for name, number in zip(names, own["params"], strict=True):
            if name in state["state"]:
                states[number] = state["state"][name]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def check_form(state: Any) -> None:
    """Raises Broken for what `by_name` has not made."""
    try:
        names = [name for group in state["param_groups"] for name in group["params"]]
        is_right = isinstance(state["state"], dict) and all(type(name) is str for name in names)
    except (LookupError, TypeError):
        is_right = False
    if not is_right:
        raise Broken("its optimizer is damaged")


def check(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the optimizer has other groups than the state."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if own != saved:
        raise CheckpointError(
            f"the optimizer has groups of {_list(own)} parameters, and in the checkpoint they are of {_list(saved)}; "
            "make it as it was made then."
        )


def _match(saved: list[list[str]], own: list[list[str]]) -> list[list[str]]:
    """For each parameter of each group here, the name it was saved under: its own, or else the one at its position."""
    return [mine if set(mine) == set(theirs) else list(theirs) for mine, theirs in zip(own, saved, strict=True)]


def _list(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def _names(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    known = {id(parameter): name for name, parameter in parameters.items()}
    numbers = optimizer.state_dict()["param_groups"]
    return [
        [
            known.get(id(parameter), str(number))
            for parameter, number in zip(group["params"], own["params"], strict=True)
        ]
        for group, own in zip(optimizer.param_groups, numbers, strict=True)
    ]

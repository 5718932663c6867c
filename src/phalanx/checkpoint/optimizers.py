"""The state of an optimizer, by the names of its parameters, as torch.distributed.checkpoint.state_dict has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from phalanx.checkpoint.storage.manifest import Broken
from phalanx.checkpoint.storage.shard_file import read_deferred
from phalanx.checkpoint.storage.values import StateDict, Stateful
from phalanx.errors import CheckpointError


class OptimizerLike(Stateful, Protocol):
    """A torch.optim.Optimizer, or a class with the same attributes."""

    param_groups: list[StateDict]


def by_name(optimizer: OptimizerLike, parameters: Mapping[str, nn.Parameter]) -> StateDict:
    """Returns its state_dict() with names for numbers. A parameter that the model does not have keeps its number."""
    state = optimizer.state_dict()
    names = _names(optimizer, parameters)
    flat = [name for group in names for name in group]
    groups = [{**group, "params": own} for group, own in zip(state["param_groups"], names, strict=True)]
    return {
        "state": {flat[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
        "param_groups": groups,
    }


def load(optimizer: OptimizerLike, parameters: Mapping[str, nn.Parameter], state: StateDict) -> None:
    """Loads what `by_name` has returned. Tensors that are still in a file go to the devices of their parameters."""
    check(optimizer, state)
    saved = [group["params"] for group in state["param_groups"]]
    # A parameter was saved under its own name, or else under the one at its position.
    pairs = zip(_names(optimizer, parameters), saved, strict=True)
    sources = [own if set(own) == set(theirs) else theirs for own, theirs in pairs]
    numbers = optimizer.state_dict()["param_groups"]
    groups, states = [], {}
    for group, names, own, given in zip(state["param_groups"], sources, numbers, optimizer.param_groups, strict=True):
        groups.append({**group, "params": own["params"]})
        for name, number, parameter in zip(names, own["params"], given["params"], strict=True):
            if name in state["state"]:
                states[number] = read_deferred(state["state"][name], parameter.device)
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def check_form(state: object) -> None:
    """Raises Broken for anything that `by_name` has not returned."""
    found = state if isinstance(state, dict) else {}
    try:
        names = [name for group in found["param_groups"] for name in group["params"]]
        is_right = isinstance(found["state"], dict) and all(type(name) is str for name in names)
    except (LookupError, TypeError):
        is_right = False
    if not is_right:
        raise Broken("its optimizer is damaged")


def check(optimizer: OptimizerLike, state: StateDict) -> None:
    """Raises CheckpointError if the optimizer has other groups than the state."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if own != saved:
        here, there = (", ".join(map(str, counts)) for counts in (own, saved))
        raise CheckpointError(
            f"the optimizer has groups of {here} parameters, and in the checkpoint they are of {there}; "
            "make it as it was made then."
        )


def _names(optimizer: OptimizerLike, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    known = {id(parameter): name for name, parameter in parameters.items()}
    numbers = optimizer.state_dict()["param_groups"]
    return [
        [
            known.get(id(parameter), str(number))
            for parameter, number in zip(group["params"], own["params"], strict=True)
        ]
        for group, own in zip(optimizer.param_groups, numbers, strict=True)
    ]

"""The weights of a checkpoint as one safetensors file, for other tools."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint.files import read_metadata, read_values
from phalanx.checkpoint.place import Place
from phalanx.checkpoint.shelf import Entry
from phalanx.errors import CheckpointError, UsageError


def export(place: Place, entry: Entry, out: Path) -> int:
    """Writes the tensors of the model, under their own names; returns how many."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise UsageError("safetensors is not installed; `pip install 'phalanx[export]'` brings it.") from None
    metadata = read_metadata(place, entry.directory)
    names = [name for name in metadata.state_dict_metadata if metadata.planner_data[name][0] == "model"]
    values = read_values(place, entry.directory, metadata, names)
    tensors = {name.removeprefix("model."): value for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{entry.directory} in {place} has no model to export; it was saved without one.")
    aside = out.with_name(f".{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        save_file(tensors, aside, metadata={"format": "pt", "step": str(entry.step)})
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}.") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
    return len(tensors)

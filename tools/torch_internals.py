"""Prints docs/torch-internals.md, made of the table of torch's names."""

from __future__ import annotations

from phalanx.torch_compat import SHOWN
from phalanx.torch_compat.names import EVENT, Name, Replaced, by_area

_HEAD = f"""# torch's internals

What phalanx replaces in torch, and which of its private names it reads. Only `phalanx.torch_compat` touches them, with
one file per area of torch; the features hand it what they put in the place of a name. A torch that lacks one of them
turns off what is named in the last column, and nothing else: the rank's `rank-N.events.jsonl` then has one line
`{EVENT}` with the name, and the run continues. `make test-torch VERSION=…` has run the smoke tests with torch
{", ".join(SHOWN)}.
In versions other than that of constraints.txt the names were looked up in the published files, not run.

This page is made by `python tools/torch_internals.py > docs/torch-internals.md`; a test compares the two.
"""


def page() -> str:
    parts = [_HEAD]
    for area, names in by_area().items():
        rows = [f"| `{name}` | {_use(name)} | {name.purpose} | {_versions(name)} | {name.lost} |" for name in names]
        parts += [
            f"## {area}.py\n",
            "| name | use | what for | seen in torch | lost without it |\n| --- | --- | --- | --- | --- |",
        ]
        parts += ["\n".join(rows) + "\n"]
    return "\n".join(parts)


def _use(name: Name) -> str:
    return "replaced" if isinstance(name, Replaced) else "read"


def _versions(name: Name) -> str:
    if name.since is None:
        return "not seen: needs GPUs"
    seen = [version for version in SHOWN if tuple(map(int, version.split(".")[:2])) >= name.since]
    return f"{seen[0]} to {seen[-1]}"


if __name__ == "__main__":
    print(page(), end="")

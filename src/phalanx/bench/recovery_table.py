"""The tables of `phalanx bench recovery`."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.bench.recovery_notes import PHASES, Recovery
from phalanx.bench.report import grid
from phalanx.bench.summary import Summary
from phalanx.bench.table import section

_TITLE = "Recovery: from the SIGKILL of one rank to the first step that is finished after it"
_MILLI = 1e-3

_WORDS = """\
Medians in ms, on rank 0. Notice: until the agent knows of the death. Stop: until no rank is left. Begin: until the
script runs again and has torch. Join: the process group. Build: the model, the optimizer and, with px.Checkpointer,
the modules that it needs. Load: the state of the last saved step. Step: the first one. torchrun does not tell when it
noticed and stopped, so these are part of its begin. A restart that failed counts as far as it came."""


def tables(samples: Sequence[Recovery]) -> str:
    return "\n".join([*section(samples, "recovery", _TITLE, "seconds"), *_phases(samples)])


def _phases(samples: Sequence[Recovery]) -> list[str]:
    groups: dict[tuple[int, str], list[Recovery]] = {}
    for sample in samples:
        groups.setdefault((sample.ranks, sample.contender), []).append(sample)
    body = []
    for (ranks, contender), group in groups.items():
        medians = [Summary.of([each.phases[phase] for each in group if phase in each.phases]) for phase in PHASES]
        body.append([str(ranks), contender, *(f"{each.median / _MILLI:.0f}" if each else "" for each in medians)])
    return ["## Where the time goes", "", _WORDS, "", *grid([["ranks", "", *PHASES], *body])]

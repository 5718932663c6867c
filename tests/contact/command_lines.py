"""Random command lines of phalanx: right and wrong flags, values and variables mixed. A seed gives the same ones."""

from __future__ import annotations

import random
import shlex
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch import flags

NUMBERS = ("0", "1", "2", "3", "-1", "1.5", "nan", "inf", "1e300", "9" * 20, "9" * 5000, "0x10", "٣", " 2 ", "+1", "")
NAMES = ("localhost", "nowhere.invalid", "127.0.0.1", "::1", "[::1]", "10.0.0.1", "a.b:c", "-x", "*", "a,b", "lo", "")
ODD = (
    "",
    " ",
    "x" * 5000,
    "é\U0001f600",
    "\udcff",
    "a\nb",
    "--",
    "-",
    "{}",
    "%s%n",
    "$(x)",
    "'",
    "a=b=c",
    ",",
    ":",
    "..",
)
LISTS = (
    "0,1",
    "0:1,1:2",
    "1:3",
    "0:",
    ":0",
    "0,,1",
    "0,0",
    "-1:3",
    "a:b",
    "3",
    "7",
    "join_timeout=1",
    "timeout=-1,x=y",
)
GOOD: dict[str, tuple[str, ...]] = {
    "--nproc-per-node": ("1", "2", "auto", "cpu", "gpu"),
    "--nnodes": ("1", "1:1", "2", "1:3"),
    "--start-method": ("exec", "auto", "spawn"),
    "--backend": ("auto", "as-written"),
    "--rdzv-backend": ("static", "c10d", "etcd"),
    "--numa-binding": ("node", "socket", "exclusive", "core-complex"),
    "--signals-to-handle": ("SIGTERM", "SIGTERM,SIGUSR1", "SIGKILL", "TERM"),
    "--hosts": ("a:2,b", "localhost:2", "me@a,[fd00::7]:1", "a:999999999"),
    "--ssh": ("ssh", "ssh -p 'x", "false"),
    "--on-stall": ("wait", "kill"),
    "--preload": ("json", "no.such.module"),
}
SWITCHES = [flag.name for group in flags.TABLE.values() for flag in group if flag.metavar is None]
VALUED = [flag for group in flags.TABLE.values() for flag in group if flag.metavar is not None]
SCRIPTS = ("good.py", "good.py", "good.py", "raises.py", "exits.py", "empty", "binary", "directory", "missing.py")
VARIABLES = (
    "PHALANX_BACKEND",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "SLURM_JOB_NODELIST",
    "PYTHON_EXEC",
    "NO_COLOR",
)
OTHERS = (
    "report",
    "inspect",
    "checkpoint ls",
    "checkpoint verify",
    "checkpoint export",
    "doctor",
    "bench launch",
    "bench",
)


@dataclass(frozen=True)
class Line:
    """One command, and the variables around it."""

    words: tuple[str, ...]
    environ: dict[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        text = " ".join([*variables, "phalanx", *map(shlex.quote, self.words)])
        return text if len(text) < 400 else f"{text[:200]}…{text[-200:]}"


def prepare(directory: Path) -> None:
    """The files that the lines name."""
    (directory / "good.py").write_text("print('good')\n")
    (directory / "raises.py").write_text("raise RuntimeError('of the script')\n")
    (directory / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (directory / "empty").touch()
    (directory / "binary").write_bytes(bytes(range(256)))
    (directory / "directory").mkdir()
    for number, content in enumerate(("", "[]", "{}", "null", '{"spec": 5}', "\x00", '{"time": "x", "pid": []}')):
        run = directory / "runs" / f"2026-{number}"
        run.mkdir(parents=True)
        for name in ("run.json", "report.json", "agent.events.jsonl", "rank-0.events.jsonl", "rank-0.status"):
            (run / name).write_text(content)


def make(seed: int, count: int) -> list[Line]:
    """``count`` lines; a longer list begins with the shorter one."""
    rng = random.Random(seed)
    return [_line(rng) for _ in range(count)]


def _line(rng: random.Random) -> Line:
    kind = rng.random()
    if kind < 0.75:
        environ = _environ(rng)
        return Line(("run", *_flags(rng), *_program(rng)), environ)
    if kind < 0.95:
        words = rng.choice(OTHERS).split()
        # What would really measure or look for seconds gets a flag that does not exist.
        words += ["--wrong"] if words[0] in ("doctor", "bench") else []
        return Line((*words, *(_path(rng) for _ in range(rng.randint(0, 3)))), {})
    return Line(tuple(rng.choice(ODD) for _ in range(rng.randint(0, 3))), {})


def _flags(rng: random.Random) -> list[str]:
    words: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
        if rng.random() < 0.2:
            words.append(rng.choice([*SWITCHES, "--wrong", "-m", "-np", "--logs-specs"]))
            continue
        flag = rng.choice(VALUED)
        name = flag.name if rng.random() < 0.7 else "--" + flag.name[2:].replace("-", "_")
        value = _value(rng, flag)
        words += [f"{name}={value}"] if rng.random() < 0.5 else [name, value]
    return words


def _value(rng: random.Random, flag: flags.Flag) -> str:
    if rng.random() < 0.5 and flag.name in GOOD:
        return rng.choice(GOOD[flag.name])
    if flag.type in (int, float) and rng.random() < 0.7:
        return rng.choice(NUMBERS)
    return rng.choice(rng.choice((NUMBERS, NAMES, ODD, LISTS)))


def _program(rng: random.Random) -> list[str]:
    if rng.random() < 0.05:
        return []
    return [rng.choice(SCRIPTS) if rng.random() < 0.9 else rng.choice(ODD), *rng.sample(ODD, rng.randint(0, 2))]


def _path(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"runs/2026-{rng.randint(0, 7)}"
    return rng.choice(("--json", "--seconds", "--stacks", "--step", *SCRIPTS, *ODD, *NUMBERS))


def _environ(rng: random.Random) -> dict[str, str]:
    if rng.random() < 0.6:
        return {}
    flag = rng.choice([flag for group in flags.TABLE.values() for flag in group])
    name = rng.choice((flag.variable, flag.variable, *VARIABLES))
    value = rng.choice(("0", "1", "maybe", *GOOD.get(flag.name, ()), rng.choice(NUMBERS), rng.choice(ODD)))
    return {name: value}

"""What the flags of the benchmarks have in common."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from phalanx.argparser import Parser


@dataclass(frozen=True)
class CommonSettings:
    """The flags that every benchmark has."""

    repeats: int
    timeout: float
    out: Path


def new_parser(name: str, description: str | None, repeats: int, timeout: float) -> Parser:
    """With the flags that every benchmark has, and these defaults."""
    parser = Parser(prog=f"phalanx bench {name}", description=description, allow_abbrev=False)
    parser.add_argument("--repeats", metavar="N", type=positive, default=repeats, help="default %(default)s")
    parser.add_argument(
        "--timeout", metavar="S", type=seconds, default=timeout, help=f"for one command, default {timeout:g}"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("results"), help="default %(default)s")
    return parser


def counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive(part) for part in text.split(",")}))


def positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value


def sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({size(part) for part in text.split(",")}))


def size(text: str) -> int:
    """``64``, ``16K`` or ``4M``, in bytes."""
    number, unit = text.strip(), 1
    if number[-1:] in ("K", "M"):
        number, unit = number[:-1], {"K": 2**10, "M": 2**20}[number[-1]]
    if not number.isdigit() or int(number) * unit == 0 or int(number) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 64, 16K or 4M, of whole float32 numbers")
    return int(number) * unit

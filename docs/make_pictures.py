"""Draws the pictures of the documentation from real runs: ``python docs/make_pictures.py``."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
PICTURES = {"failure": "phalanx run --nproc-per-node 4 examples/broken.py"}


def on_a_terminal(command: str) -> str:
    """What a person sees, colours included."""
    primary, secondary = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        command.split(),
        cwd=DOCS.parent,
        env={**os.environ, "PATH": path, "COLUMNS": "110", "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    seen = b""
    while True:
        try:
            seen += os.read(primary, 65536)
        except OSError:  # the terminal's way to say that nobody writes any more
            break
    os.close(primary)
    process.wait()
    return seen.decode().replace("\r\n", "\n")


def main() -> None:
    for name, command in PICTURES.items():
        console = Console(record=True, width=112, file=io.StringIO())
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(on_a_terminal(command)))
        picture = console.export_svg(title="phalanx")
        # The reader's own monospaced font will do: a picture should not fetch anything.
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        (DOCS / "images" / f"{name}.svg").write_text(picture)
        print(f"{name}.svg: {command}")


if __name__ == "__main__":
    main()

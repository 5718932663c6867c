"""Draws the pictures of the documentation from real runs: ``python docs/make_pictures.py``."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
PICTURES = {
    "failure": "phalanx run --nproc-per-node 4 examples/broken.py",
    "recovery": "phalanx run --nproc-per-node 4 --max-restarts 2 examples/digits.py "
    "--checkpoints {empty} --kill 1@70 --kill 3@150",
}


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


def as_it_stands(seen: str) -> str:
    """Of a line that was written over, what was written last."""
    lines = (re.split(r"\r|\x1b\[\d*[GK]", line.rstrip("\r")) for line in seen.split("\n"))
    return "\n".join(next((part for part in reversed(parts) if part.strip()), "") for parts in lines)


def main() -> None:
    for name, command in PICTURES.items():
        console = Console(record=True, width=112, file=io.StringIO())
        console.print(Text(f"$ {command.format(empty='checkpoints')}", style="bold"))
        with tempfile.TemporaryDirectory() as empty:
            seen = on_a_terminal(command.format(empty=empty)).replace(empty, "checkpoints")
        console.print(Text.from_ansi(as_it_stands(seen)))
        picture = console.export_svg(title="phalanx")
        # The reader's own monospaced font will do: a picture should not fetch anything.
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        (DOCS / "images" / f"{name}.svg").write_text(picture)
        print(f"{name}.svg: {command}")


if __name__ == "__main__":
    main()

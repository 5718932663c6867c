"""Who holds a port, as a sentence names it."""

from __future__ import annotations

import subprocess
import sys

from phalanx.system import ports


def test_the_command_of_an_owner_is_printed_without_its_control_characters() -> None:
    """Another user may have chosen its words."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = ["\x1b[31m\nphalanx: all is well", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, executable=sys.executable, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        told = ports.owner(int(process.stdout.readline()))
        process.communicate("\n")
    assert told.startswith(f"pid {process.pid} (?[31m?phalanx: all is well -c import")
    assert told.isprintable()

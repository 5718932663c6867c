"""Who holds a port, as a sentence names it, and the addresses of interfaces."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

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


def test_addresses_of_interfaces_are_ipv4_first_and_keep_their_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo binds to the first one of GLOO_SOCKET_IFNAME; a link-local one is of no use without its scope."""
    families = ((socket.AF_PACKET, "00:11"), (socket.AF_INET6, "fe80::1%eth0"), (socket.AF_INET, "10.0.0.7"))
    entries = [SimpleNamespace(family=family, address=address) for family, address in families]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries})
    assert ports.interface_addresses() == {"eth0": ["10.0.0.7", "fe80::1"]}
    assert ports.interface_addresses(with_scope=True) == {"eth0": ["10.0.0.7", "fe80::1%eth0"]}

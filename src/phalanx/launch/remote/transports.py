"""The ways to a host: a plain child, ssh, srun. Their command lines, and what their failures mean.

The command that runs there has no word of the user's in it: what it is to do comes through its standard input, so
that nothing secret is seen in a list of processes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.entry_point import python_command
from phalanx.errors import LaunchError
from phalanx.launch.spec.hosts import is_here
from phalanx.launch.spec.launch_spec import Host, HostList
from phalanx.source_lines import SYS_PATH_ENTRY

_SSH_FAILED = 255
# ssh takes the first value it finds, and its command line comes before the user's files. So what he may have set there
# is asked for first (ssh -G), and these are given only in place of ssh's own defaults.
_DEFAULTS = {
    "serveraliveinterval": ("0", "ServerAliveInterval=5"),
    "connecttimeout": ("none", "ConnectTimeout=20"),
}
_SAID_BY_SSH = re.compile(
    r"(Timeout, server|Connection (to|reset|closed)|client_loop|Read from remote host|packet_write)"
)


@dataclass(frozen=True)
class Transport:
    """How the remote of one host is started."""

    host: Host
    kind: str
    """``here``, ``ssh`` or ``srun``."""
    command: tuple[str, ...]

    def why_not_started(self, code: int, said: Sequence[str]) -> str:
        """The sentence for a way that ended before the remote had answered; ``said`` is what came on its streams."""
        name, last = self.host.name, (said[-1] if said else "it printed nothing")
        if any("No module named 'phalanx" in line for line in said):
            return f"{name}: phalanx is not installed for {sys.executable} there, or is an older one; install the same."
        if code in (126, 127) and self.kind != "here":
            return (
                f"{name}: there is no interpreter {sys.executable} that can be executed; "
                "make the same environment there, at the same path."
            )
        if self.kind == "ssh" and code == _SSH_FAILED:
            return f"{name} cannot be reached: {last.rstrip('.')}{self._hint(last)}."
        return f"{name}: the start failed with {_how(code)}: {last.rstrip('.')}."

    def _hint(self, last: str) -> str:
        by_hand = shlex.join(["ssh", self.host.target, "true"])
        if "Permission denied" in last:
            return f"; there is nobody to type a password, so `{by_hand}` must work without one (a key, an agent)"
        if "Host key verification failed" in last:
            return f"; its key is not known here, or has changed: try `{by_hand}` by hand"
        return ""

    def why_lost(self, code: int, said: Sequence[str]) -> str:
        """The sentence for a way that ended without a last word of its remote."""
        name = self.host.name
        if self.kind != "ssh":
            return f"the agent on {name} ended without a message, with {_how(code)}"
        if code < 0:
            return f"the connection to {name} was lost: ssh ended with {_how(code)}"
        last = next((line for line in reversed(said) if _SAID_BY_SSH.match(line)), None)
        if last is not None:
            return f"the connection to {name} was lost: {last.rstrip('.')}"
        if code == _SSH_FAILED:  # what ssh makes of a signal there
            return f"the agent on {name} was killed"
        return f"the agent on {name} ended without a message, with {_how(code)}"


def find_transport(host: Host, host_list: HostList) -> Transport:
    remote = _remote()
    if host_list.way == "srun":
        # Beside the step that may run already, and not bound to the one core that one task would get.
        flags = ("--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--cpu-bind=none", "--quiet")
        return Transport(host, "srun", ("srun", *flags, *remote))
    if is_here(host):
        return Transport(host, "here", tuple(remote))
    # `exec`: no shell stays between ssh's server and the remote.
    return Transport(
        host, "ssh", (*host_list.ssh, *_options(host_list.ssh, host), host.target, f"exec {shlex.join(remote)}")
    )


def _remote() -> list[str]:
    """The agents must be of the same phalanx as what they start, and that finds it by PYTHONPATH if we did."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ahead = SYS_PATH_ENTRY in (str(Path(entry).absolute()) for entry in path if entry)
    return python_command("phalanx.launch.command.remote()", ahead=ahead)


def _options(ssh: Sequence[str], host: Host) -> list[str]:
    """After the user's own words, so that these win."""
    try:
        asked = subprocess.run(
            [*ssh, "-G", host.target], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise LaunchError(f"the program {ssh[0]} was not found; install it, or name another with --ssh.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"the program {ssh[0]} cannot be used: {error}.") from None
    if asked.returncode != 0:
        return []  # it will say why when it is to connect; or it is another program, with other options
    settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    # Nobody is there to answer a question; and a shared connection must not keep our pipes when ssh itself has ended.
    chosen = ["BatchMode=yes", "ControlMaster=no"]
    chosen += [option for name, (default, option) in _DEFAULTS.items() if settings.get(name) == default]
    return ["-T", *(word for option in chosen for word in ("-o", option))]


def _how(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"

"""The transports to a host: a plain child, ssh, srun. Their command lines, the variables, and what failures mean.

The command line there is always the same: the order comes through standard input, so that no list of processes shows
anything secret.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from phalanx.entry_point import python_command
from phalanx.errors import LaunchError, UsageError
from phalanx.launch.agent.run_stop import SCHEDULERS
from phalanx.launch.spec.hosts import is_here
from phalanx.launch.spec.launch_spec import Host, HostList
from phalanx.source_lines import SYS_PATH_ENTRY

_SSH_FAILED = 255
# ssh takes the first value it finds, and its command line comes before the user's files. So the user's settings are
# read first (ssh -G), and these replace ssh's own defaults alone.
_DEFAULTS = {
    "serveraliveinterval": ("0", "ServerAliveInterval=5"),
    "connecttimeout": ("none", "ConnectTimeout=20"),
}
_SSH_ERROR = re.compile(
    r"(Timeout, server|Connection (to|reset|closed)|client_loop|Read from remote host|packet_write)"
)
FORWARDED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LANG", "LC_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*"),
    *("TORCH*", "PYTORCH_*", "TRITON_*", "NCCL_*", "GLOO_*", "CUDA_*", "HF_*", "PET_*", "PHALANX_BACKEND"),
    *("FI_*", "UCX_*", "HSA_*", "HIP_*", "ROCR_*", "RCCL_*", "ZE_*", "SYCL_*", "CCL_*", "ASCEND_*", "HCCL_*"),
    *SCHEDULERS,
)
"""The variables with which ranks find on another host what they find here, and by which agents know the scheduler."""
NOT_FORWARDED = ("*_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "TORCHELASTIC_*")
"""The GPUs of this machine, and the rank of this process in a run around this one: both are wrong elsewhere."""


def forwarded_environment(environ: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """Returns the variables for the other hosts; ``more`` are the names given by --export."""
    for name in more:
        if name not in environ:
            raise UsageError(f"--export {name}: there is no such variable here; set it, or leave it out.")

    def is_forwarded(name: str) -> bool:
        included, excluded = (any(fnmatchcase(name, each) for each in names) for names in (FORWARDED, NOT_FORWARDED))
        return included and not excluded

    return {name: value for name, value in environ.items() if name in more or is_forwarded(name)}


Kind = Literal["here", "ssh", "srun"]


@dataclass(frozen=True)
class Transport:
    """The command that starts the agent of one host."""

    host: Host
    kind: Kind
    command: tuple[str, ...]

    def why_not_started(self, code: int, output: Sequence[str]) -> str:
        """Returns why the command ended before the host had answered; ``output`` has its last lines."""
        name, last = self.host.name, (output[-1] if output else "it printed nothing")
        if any("No module named 'phalanx" in line for line in output):
            return f"{name}: phalanx is not installed for {sys.executable} there, or is an older one; install the same."
        if code in (126, 127) and self.kind != "here":
            return (
                f"{name}: there is no interpreter {sys.executable} that can be executed; "
                "make the same environment there, at the same path."
            )
        if self.kind == "ssh" and code == _SSH_FAILED:
            return f"{name} cannot be reached: {last.rstrip('.')}{self._hint(last)}."
        return f"{name}: the start failed with {_end_text(code)}: {last.rstrip('.')}."

    def _hint(self, last: str) -> str:
        by_hand = shlex.join(["ssh", self.host.target, "true"])
        if "Permission denied" in last:
            return f"; there is nobody to type a password, so `{by_hand}` must work without one (a key, an agent)"
        if "Host key verification failed" in last:
            return f"; its key is not known here, or has changed: try `{by_hand}` by hand"
        return ""

    def why_lost(self, code: int, output: Sequence[str]) -> str:
        """Returns why the command ended without a last message of its host."""
        name = self.host.name
        if self.kind != "ssh":
            return f"the agent on {name} ended without a message, with {_end_text(code)}"
        if code < 0:
            return f"the connection to {name} was lost: ssh ended with {_end_text(code)}"
        last = next((line for line in reversed(output) if _SSH_ERROR.match(line)), None)
        if last is not None:
            return f"the connection to {name} was lost: {last.rstrip('.')}"
        if code == _SSH_FAILED:  # ssh's exit code for a signal there, too
            return f"the agent on {name} was killed"
        return f"the agent on {name} ended without a message, with {_end_text(code)}"


def find_transport(host: Host, host_list: HostList) -> Transport:
    command = _command()
    if host_list.transport == "srun":
        # Beside a step that may be running already, and not bound to the single core of one task.
        flags = ("--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--cpu-bind=none", "--quiet")
        gpus = (f"--gpus-per-node={host.gpus}",) if host.gpus else ()
        return Transport(host, "srun", ("srun", *flags, *gpus, *command))
    if is_here(host):
        return Transport(host, "here", tuple(command))
    # `exec`: no shell stays between ssh's server and the agent.
    return Transport(
        host, "ssh", (*host_list.ssh, *_options(host_list.ssh, host), host.target, f"exec {shlex.join(command)}")
    )


def _command() -> list[str]:
    """Returns the command of the agent there, with this very phalanx if PYTHONPATH leads to it."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ahead = SYS_PATH_ENTRY in (str(Path(entry).absolute()) for entry in path if entry)
    return python_command("phalanx.launch.command.remote()", ahead=ahead)


def _options(ssh: Sequence[str], host: Host) -> list[str]:
    """Returns options that follow the user's own, so that the user's win."""
    try:
        asked = subprocess.run(
            [*ssh, "-G", host.target], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise LaunchError(f"the program {ssh[0]} was not found; install it, or name another with --ssh.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"the program {ssh[0]} cannot be used: {error}.") from None
    if asked.returncode != 0:
        return []  # ssh will report why when it connects; or this is another program, with other options
    settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    # Nobody can answer a question, and a shared connection must not keep our pipes open when ssh has ended.
    chosen = ["BatchMode=yes", "ControlMaster=no"]
    chosen += [option for name, (default, option) in _DEFAULTS.items() if settings.get(name) == default]
    return ["-T", *(word for option in chosen for word in ("-o", option))]


def _end_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"

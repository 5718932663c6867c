"""The hosts of a run that one command starts: read from a flag, a file or SLURM. Nothing here connects to them."""

from __future__ import annotations

import argparse
import re
import shlex
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from phalanx.cluster import slurm
from phalanx.errors import UsageError
from phalanx.launch.spec import network
from phalanx.launch.spec.launch_spec import MOST_PROCESSES, Host, HostList
from phalanx.system.ports import is_loopback

_HOST = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^\s:@\[\]]+))(?::(?P<slots>.*))?"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def find_hosts(arguments: argparse.Namespace, environ: Mapping[str, str]) -> HostList | None:
    """Returns the hosts that this command starts; None if it starts this machine alone."""
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise UsageError("--hosts and --hostfile contradict each other; give one of them.")
    if arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        hosts = read_hostfile(arguments.hostfile)
    elif hosts := _allocated(arguments, environ):
        return HostList(hosts, "srun", _words(arguments.ssh), _names(arguments.export))
    else:
        return None
    _check_flags(arguments, len(hosts))
    return HostList(hosts, "ssh", _words(arguments.ssh), _names(arguments.export))


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads ``a:8,user@b:4,[fd00::7]:2,c``."""
    parts = [part.strip() for part in text.split(",")]
    return _unique((parse_host(part, f"--hosts has {part!r}"), f"--hosts {text}") for part in parts)


def parse_host(text: str, where: str) -> Host:
    """Reads one host; ``where`` begins the sentence of an error."""
    found = _HOST.fullmatch(text)
    if found is None or text.startswith("-") or ":" in (found["slots"] or ""):
        raise UsageError(f"{where}, which is no host; write name, name:8, user@name:8, or [fd00::7]:8 for IPv6.")
    name = found["six"] or found["name"]
    if name.startswith("-"):  # ssh would take it for an option
        raise UsageError(f"{where}, which is no host: a name cannot begin with a dash.")
    return Host(name, _slots(found["slots"], where), found["user"])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Reads one host per line: ``name``, ``name slots=8`` or ``name:8``; ``#`` begins a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hostfile {path} cannot be read: {reason}.") from None
    hosts = _unique(_entries(path, lines))
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host; write one per line, such as `node1 slots=8`.")
    return hosts


def _entries(path: str, lines: Iterable[str]) -> Iterable[tuple[Host, str]]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of {path}"
        host = parse_host(words[0], f"{where} has {words[0]!r}")
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key != "slots" or host.slots is not None:
                raise UsageError(f"{where} has {word!r}, which is unknown there; write `{host.name} slots=8`.")
            host = Host(host.name, _slots(value, f"{where} has {word!r}"), host.user)
        yield host, where


def _slots(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    try:
        slots = int(text) if text.isascii() and text.isdigit() else 0
    except ValueError:  # more digits than Python reads
        slots = 0
    if not 1 <= slots <= MOST_PROCESSES:
        raise UsageError(f"{where}, but the number of processes is a whole number from 1 to {MOST_PROCESSES}.")
    return slots


def _unique(found: Iterable[tuple[Host, str]]) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for host, where in found:
        if host.name in hosts:
            raise UsageError(f"{where} names {host.name} twice; give each host once, with all of its processes.")
        hosts[host.name] = host
    return tuple(hosts.values())


def _check_flags(arguments: argparse.Namespace, count: int) -> None:
    """Rejects flags for machines that are started one by one: here one command starts them all."""
    if arguments.nnodes not in (None, str(count)):
        raise UsageError(f"--nnodes {arguments.nnodes}, but {count} host(s) are given; leave out --nnodes.")
    for flag, given in (
        ("--node-rank", bool(arguments.node_rank)),
        ("--standalone", arguments.standalone),
        ("--rdzv-endpoint", arguments.rdzv_endpoint),
        ("--rdzv-backend c10d", arguments.rdzv_backend == "c10d"),
    ):
        if given:
            raise UsageError(f"{flag} is for one command on each machine; leave it out, or leave out the hosts.")
    address = arguments.master_addr
    if count > 1 and address is not None and (address == "localhost" or is_loopback(address)):
        raise UsageError(
            f"--master-addr {address} means another machine on each of the {count} hosts; leave it out, or give the "
            "first host's address on the network."
        )


def _words(ssh: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(ssh))
    except ValueError as error:
        raise UsageError(f"--ssh {ssh!r} cannot be read ({error}); give a command such as 'ssh -p 2222'.") from None
    if not words:
        raise UsageError("--ssh is empty; give a command such as 'ssh -p 2222'.")
    return words


def _names(export: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in export.split(",") if name.strip())
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"--export has {name!r}; give names of variables, such as WANDB_MODE, not values.")
    return names


def is_here(host: Host) -> bool:
    """Returns True for this very machine, unless a user is given, who then logs in."""
    own = socket.gethostname()
    if host.user is not None or host.name in ("localhost", own):
        return host.user is None
    if host.name.partition(".")[0] != own.partition(".")[0] and not re.fullmatch(r"[\d.]+|.*:.*", host.name):
        return False  # asking the name service about each of a hundred hosts could take minutes
    return network.leads_here(host.name)


# ---- SLURM


def _allocated(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Returns the hosts of the allocation around this command; none if a flag asks for this machine.

    Each has as many processes as the allocation has tasks there, unless a flag has another number.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    asked = arguments.nnodes is not None or arguments.standalone or arguments.rdzv_endpoint or arguments.node_rank
    if not nodelist or asked or slurm.is_task(environ):
        return ()
    names, tasks = slurm.hosts(nodelist), slurm.allocated_tasks(environ)
    if len(tasks) != len(names):
        return tuple(map(Host, names))
    has_number = arguments.nproc_per_node is not None or arguments.devices is not None
    return tuple(
        Host(name, None if has_number else count, gpus=slurm.gpus_of_tasks(environ, count))
        for name, count in zip(names, tasks, strict=True)
    )

"""Linux namespaces for `virtual_nodes`: the processes that hold them, and the way into them.

It is run as a script in a bare interpreter, which starts in some ten milliseconds, so it imports nothing of phalanx.

    the test's process
     └─ gate              waits for the warden, so that its parent can wait for it
         └─ warden        pid 1 of a pid namespace; its network namespace is the switch
             ├─ holder    pid 1 of the pid namespace of node0; sleeps
             └─ holder    …

Nothing here has a name that could outlive it: no entry under /run/netns, no file, no device on the machine's own
network. The warden ends when the test's process does, however that ends, because it watches a pidfd of it. With the
warden, which is a pid 1, the kernel kills whatever lives in its pid namespace and in those below: the holders, and all
that was started on the nodes. With their last process go the network namespaces, and with these the devices; likewise
the mounts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

TYPE_CHECKING = False  # the module typing takes half as long to import as the interpreter to start

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import NoReturn

MOUNT, UTS, IPC, PID, NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
"""CLONE_NEWNS, CLONE_NEWUTS and so on, from linux/sched.h."""

LARGEST_MESSAGE = 1 << 17
"""Bytes; less than a Unix socket takes at once."""

_ALL_BUT_PID = MOUNT | UTS | IPC | NETWORK
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
_PR_SET_PDEATHSIG = 1
_READY = b"ready"

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def join(pidfd: int, kinds: int) -> None:
    """Moves the calling thread into the namespaces of another process; PID is where its next children are born."""
    _call("setns", pidfd, kinds)


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    encoded = kind.encode() if kind else None
    _call("mount", source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None)


def enter(pidfd: int, directory: str, command: list[str]) -> NoReturn:
    """Becomes a program on a node. The caller had this process born in the node's pid namespace already."""
    _restore_signals()
    try:
        join(pidfd, _ALL_BUT_PID)
        os.close(pidfd)
        os.chdir(directory)
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"phalanx: {command[0]} could not be started on {os.uname().nodename}: {error}\n")
        sys.exit(127)  # as a shell says it


def _restore_signals() -> None:
    """Undoes the signal settings that Python has made for itself, before another program is executed."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def hold(control: socket.socket, parent: int, nodes: Sequence[tuple[str, str]]) -> None:
    """The gate: makes the warden, in namespaces of its own, and waits for its end. A node: name, /etc/hosts."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() != parent:  # it is dead, and the pid may be somebody else's
        return
    try:
        _call("unshare", _ALL_BUT_PID | PID)
    except OSError as error:
        _send(control, error=str(error))
        return
    warden = os.fork()
    if warden == 0:
        _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        _watch(control, watched, nodes)
        return
    control.close()
    # Without the test's process there is nobody to wait for us; and the warden's end may have to wait until the zombies
    # of that process are reaped by their new parent, which is not in a hurry everywhere.
    poll(watched, os.pidfd_open(warden))


def poll(*fds: int, seconds: float | None = None) -> list[int]:
    """Waits for one of them; returns those that can be read, or are the pidfd of a process that has ended."""
    import select

    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    return [fd for fd, _ in waiting.poll(None if seconds is None else seconds * 1000)]


def _send(control: socket.socket, fds: Sequence[int] = (), **message: object) -> None:
    import contextlib
    import json
    import socket

    with contextlib.suppress(OSError):  # nobody is there to read it
        socket.send_fds(control, [json.dumps(message).encode()], list(fds))


def _watch(control: socket.socket, watched: int, nodes: Sequence[tuple[str, str]]) -> None:
    """The warden: makes the nodes, hands out a pidfd of each holder, and takes orders as long as there is somebody."""
    import json

    try:
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        _turn_ipv6_off()
        own = os.pidfd_open(os.getpid())
        started = [_start_holder(control, own, name, hosts) for name, hosts in nodes]
        for _, ready in started:
            answer = os.read(ready, 4096)
            if answer != _READY:
                raise OSError(answer.decode() or "the holder of a node has died")
    except OSError as error:
        _send(control, error=str(error))
        return
    pids = [pid for pid, _ in started]
    holders = [os.pidfd_open(pid) for pid in pids]
    _send(control, holders, pids=pids)
    while watched not in poll(watched, control.fileno()):
        try:
            order = control.recv(LARGEST_MESSAGE)
        except ConnectionResetError:  # it has gone without reading our last answer
            return
        if not order:
            return
        code, output = _run(holders, **json.loads(order))
        _send(control, code=code, output=output)
        _reap()


def _turn_ipv6_off() -> None:
    """Turns IPv6 off: the switch needs no addresses, and would advertise them."""
    import contextlib
    from pathlib import Path

    for which in ("all", "default"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")


def _start_holder(control: socket.socket, own: int, name: str, hosts: str) -> tuple[int, int]:
    """Returns the pid of a node's pid 1, and a pipe that reports when the node is set up, or why it is not."""
    ready, report = os.pipe()
    _call("unshare", PID)
    pid = os.fork()
    if pid == 0:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the orphans of the node are its children
        try:
            _set_up(name, hosts)
            os.write(report, _READY)
        except OSError as error:
            os.write(report, str(error).encode())
            os._exit(1)
        while True:
            signal.pause()
    join(own, PID)  # the kernel refuses to unshare twice in a row
    os.close(report)
    return pid, ready


def _set_up(name: str, hosts: str) -> None:
    """Gives the node its own name, network, processes, shared memory and /etc/hosts. All else is the machine's."""
    import socket
    from pathlib import Path

    _call("unshare", _ALL_BUT_PID)
    socket.sethostname(name)
    _mount("proc", "/proc", "proc")
    # A new /sys shows the network of who mounts it; the cgroups below the old one are wanted still.
    cgroups = os.open("/sys/fs/cgroup", os.O_PATH)
    _mount("sysfs", "/sys", "sysfs")
    _mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", None, _MS_BIND | _MS_REC)
    os.close(cgroups)
    _mount("tmpfs", "/dev/shm", "tmpfs")
    # In memory and without a name once it is mounted: nothing on the disk.
    file = Path("/dev/shm/hosts")
    file.write_text(hosts)
    _mount(str(file), "/etc/hosts", None, _MS_BIND)
    file.unlink()


def _run(holders: Sequence[int], node: int | None, command: list[str], text: str) -> tuple[int, str]:
    """Runs a command in the network of a node, or of the switch; returns its exit code and output."""
    files = [os.memfd_create(name) for name in ("input", "output")]
    os.write(files[0], text.encode())
    os.lseek(files[0], 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        try:
            if node is not None:
                join(holders[node], NETWORK)
            for number, file in enumerate((*files, files[1])):
                os.dup2(file, number)
            _restore_signals()
            os.execvp(command[0], command)
        except OSError as error:
            os.write(files[1], str(error).encode())
        finally:
            os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.lseek(files[1], 0, os.SEEK_SET)
    output = os.read(files[1], 4096).decode(errors="replace")
    for file in files:
        os.close(file)
    return code, output


def _reap() -> None:
    """The holders of stopped nodes."""
    import contextlib

    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _main(arguments: list[str]) -> None:
    if arguments[0] == "enter":
        enter(int(arguments[1]), arguments[2], arguments[3:])
    import json
    import socket

    hold(socket.socket(fileno=int(arguments[1])), int(arguments[2]), json.loads(arguments[3]))


if __name__ == "__main__":
    _main(sys.argv[1:])

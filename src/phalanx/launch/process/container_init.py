"""Pid 1 of a container: the command continues in a child; this process passes on signals and reaps orphans.

The kernel keeps every signal that has no handler from a pid 1, and makes it the parent of all orphans, such as those
of ``kubectl exec``. A process in between is what tini and ``docker run --init`` put there.
"""

from __future__ import annotations

import os
import signal

from phalanx.launch.process.process_tree import reap_children

_FAULTS = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
}
"""A fault of this process, not for another."""
_FROM_KERNEL = 0x80
"""si_code of a signal that a terminal has sent, to the child as well."""


def continue_in_child() -> None:
    """Returns in a child. This process stays behind and ends with its exit code, or 128 and the signal."""
    watched = signal.valid_signals() - _FAULTS
    # A blocked signal waits even for a pid 1.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_serve(child, watched))


def _serve(child: int, watched: set[signal.Signals]) -> int:
    while True:
        received = signal.sigwaitinfo(watched)
        if received.si_signo == signal.SIGCHLD:
            ended = reap_children()
            if child in ended:
                code = os.waitstatus_to_exitcode(ended[child][0])
                return code if code >= 0 else 128 - code
        elif received.si_code != _FROM_KERNEL:
            os.kill(child, received.si_signo)

"""Imported by multiprocessing's forkserver: it, and what it forks, obeys SIGTERM from its own session alone.

Its signals were blocked when it was started. It imports no torch.
"""

import signal

from phalanx.native import library
from phalanx.preemption.handlers import SCHEDULER_SIGNALS

library.library().phx_obey_own_session(False)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SCHEDULER_SIGNALS)

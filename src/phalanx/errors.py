"""The exceptions of phalanx, as one tree.

    PhalanxError                 the base: ``except px.PhalanxError`` catches everything phalanx raises on purpose
    ├── UsageError               a flag, argument or variable has a wrong value; the message names it
    ├── LaunchError              the processes could not be started
    │   └── PortBusy             the port that was asked for belongs to somebody else
    ├── JoinError                the process group could not be formed
    │   ├── MasterUnreachable    nobody answers at the master's address
    │   ├── RanksDisagree        two ranks claim one number, or two world sizes meet
    │   └── StaleStore           the rendezvous file was left over by an earlier run
    ├── ForeignData              a store or a directory holds what phalanx did not write there
    ├── CheckpointError          a checkpoint could not be written or read
    ├── PeerFailed               another rank failed while this one waited for it
    │   └── PeerLost             its process is gone, or it has left the group
    └── CollectiveError          a collective of the shm backend could not be finished
        ├── CollectiveMismatch   the ranks called different things
        ├── CollectiveTimeout    a rank did not come in time; the message names it
        └── CollectiveAborted    a rank called abort(), or was interrupted

The last five are also torch's DistBackendError when a collective raises them.

Every message says the fact, the value, and the next step, in one or two sentences. A violated invariant of
phalanx itself is an ``assert``, never one of these.
"""

from __future__ import annotations


class PhalanxError(RuntimeError):
    """The base of everything phalanx raises on purpose."""


class UsageError(PhalanxError, ValueError):
    """A flag, an argument or an environment variable has a value that cannot work."""


class LaunchError(PhalanxError):
    """The processes of a run could not be started."""


class PortBusy(LaunchError):
    """The port that was asked for is taken; the message names its owner."""


class JoinError(PhalanxError):
    """The process group could not be formed."""


class MasterUnreachable(JoinError):
    """Nobody answers at the master's address."""


class RanksDisagree(JoinError):
    """Two processes claim the same rank, or bring different world sizes."""


class StaleStore(JoinError):
    """The file of a ``file://`` rendezvous was left over by an earlier run."""


class ForeignData(PhalanxError):
    """Data from a store, a socket or a directory has not the form in which phalanx writes it."""

    reason = ""
    """The problem in a few words."""


class CheckpointError(PhalanxError):
    """A checkpoint could not be written, or there is none that can be read."""


class PeerFailed(PhalanxError):
    """Another rank failed while this one was waiting for it."""


class PeerLost(PeerFailed):
    """The process of another rank is gone, or has left the group, while this one was waiting for it."""


class CollectiveError(PhalanxError):
    """A collective of the shm backend could not be finished."""


class CollectiveMismatch(CollectiveError):
    """The ranks called different collectives, or the same one with different types, sizes or roots."""


class CollectiveTimeout(CollectiveError):
    """Some ranks did not come to a collective in time."""


class CollectiveAborted(CollectiveError):
    """A rank aborted the group."""

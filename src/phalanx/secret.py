"""The run's secret: 32 bytes that the processes of one run share, and nobody else knows.

Whoever starts the run makes it, and each process gets it through the pipe or the open file by which it is started:
never by a command line, which all users of the machine can read, nor by the environment, which every program that a
rank starts would inherit. Nodes that were started one by one share none.
"""

from __future__ import annotations

import os

SEAL_CHARACTERS = 32
_BYTES = 32
_own: bytes | None = None


def make() -> None:
    """Makes the secret of a new run, unless this process was given one when it was started."""
    global _own
    _own = _own or os.urandom(_BYTES)


def keep(text: str | None) -> None:
    """Takes what `text` has given in another process; None: there is none."""
    global _own
    _own = None if text is None else bytes.fromhex(text)


def text() -> str | None:
    """For the process that is being started."""
    return None if _own is None else _own.hex()


def seal(data: bytes) -> bytes:
    """Hexadecimal digits that only a process with the same secret can compute for these bytes."""
    import hashlib  # loads OpenSSL, which a run on one machine does not need

    assert _own is not None, "this process was given a secret"
    return hashlib.blake2b(data, key=_own, digest_size=SEAL_CHARACTERS // 2).hexdigest().encode()


def is_sealed(data: bytes, given: bytes) -> bool:
    """Whether ``given`` is their seal."""
    import hmac

    return hmac.compare_digest(seal(data), given)

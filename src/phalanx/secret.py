"""The run's secret: 32 bytes that only the processes of one run share.

The process that starts the run makes it, and each process gets it through the pipe or the open file by which it is
started: never by a command line, which all users of the machine can read, nor by the environment, which every program
that a rank starts would inherit. Nodes that are started one by one get it by --secret-file or PHALANX_SECRET, which is
not passed on to the ranks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from phalanx.errors import UsageError

VARIABLE = "PHALANX_SECRET"
_FEWEST = 16
"""Characters of a secret that cannot be guessed."""
SEAL_CHARACTERS = 32
_BYTES = 32
_own: bytes | None = None


def make() -> None:
    """Makes the secret of a new run, unless this process was given one when it was started."""
    global _own
    _own = _own or os.urandom(_BYTES)


def keep(text: str | None) -> None:
    """Takes the secret that `text` returned in the process that started this one; None: there is none."""
    global _own
    _own = None if text is None else bytes.fromhex(text)


def load(file: str | None, environ: Mapping[str, str]) -> None:
    """Takes the secret that the user has given, unless this process was given one when it was started.

    ``file``: --secret-file. PHALANX_SECRET is the text itself, or the absolute path of such a file.
    """
    global _own
    given = environ.get(VARIABLE, "")
    path = file or (given if given.startswith("/") else None)
    if _own is not None or not (path or given):
        return
    content = (_read(path) if path else os.fsencode(given)).strip()
    name = f"--secret-file {path}" if file else VARIABLE
    if len(content) < _FEWEST:
        raise UsageError(
            f"{name} holds {len(content)} characters, which can be guessed; give it {_FEWEST} or more, "
            "such as those of `openssl rand -hex 32`."
        )
    import hashlib

    _own = hashlib.blake2b(content, digest_size=_BYTES).digest()


def _read(path: str) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()):
                raise UsageError(f"the secret file {path} belongs to another user (uid {found.st_uid}); make your own.")
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise UsageError(f"the secret file {path} can be read by others; keep it for yourself: chmod 600.")
            return file.read(1 << 16)
    except OSError as error:
        raise UsageError(f"the secret file {path} cannot be read: {error.strerror}.") from None


def text() -> str | None:
    """The secret as text, for a process that is being started."""
    return None if _own is None else _own.hex()


def seal(data: bytes) -> bytes:
    """Hexadecimal digits that only a process with the same secret can compute for these bytes."""
    import hashlib  # loads OpenSSL, which a run on one machine does not need

    assert _own is not None, "this process was given a secret"
    return hashlib.blake2b(data, key=_own, digest_size=SEAL_CHARACTERS // 2).hexdigest().encode()

"""How a Python process of ours is started, so that nothing of the current directory gets in its way."""

from __future__ import annotations

import sys


def command(call: str, *, ahead: bool = False) -> list[str]:
    """The command that runs ``call``, such as ``phalanx.launch.process.zygote.main(5, fresh)``, in this interpreter.

    In it ``fresh`` names the modules that an interpreter has before anything of ours is imported.
    ``ahead``: this phalanx is taken before an installed one, in a process that has not got our PYTHONPATH.
    """
    from phalanx.source_lines import SYS_PATH_ENTRY as root  # not needed by every command that opens its streams

    module = call.partition("(")[0].rpartition(".")[0]
    add, remove = f"sys.path.append({root!r})", "sys.path.pop()"
    if ahead:
        add, remove = f"sys.path.insert(0, {root!r})", "sys.path.pop(0)"
    text = (
        f"import sys; fresh = frozenset(sys.modules); sys.path[0] == '' and sys.path.pop(0); "
        f"{add}; import {module}; {remove}; {call}"
    )
    return [sys.executable, *_flags(), "-c", text]


def _flags() -> list[str]:
    """-O, -W, -X and the like, as this interpreter was given them; multiprocessing does the same for its children."""
    import subprocess  # as above

    return subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]

"""Scripts on the simulated device, in processes of their own.

No test imports `sim` into its own process: it would add an accelerator to torch there, for every test that follows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Outcome, Runner, start

IMPORTS = "import torch\nimport phalanx as px\nfrom tests.devices import sim, simccl\n"
"""What every script begins with."""


@pytest.fixture
def on_sim(phalanx: Runner, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a script under `phalanx run`, with the device "sim" and the backend "simccl".

    The script finds torch, px, sim and simccl imported. It joins by ``px.init(device="sim:0", backend="simccl")``:
    every rank has a simulated device of its own, which is index 0 in its process. ``script`` may also be the path of
    one that imports them by itself. ``flags`` are those of `phalanx run`; ``arguments`` are the script's own.
    """

    def run(
        script: str | Path,
        *flags: str,
        ranks: int = 2,
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Outcome:
        if isinstance(script, str):
            (tmp_path / "train.py").write_text(IMPORTS + textwrap.dedent(script))
            script = Path("train.py")
        given = ("run", "--nproc-per-node", str(ranks), *flags, str(script), *arguments)
        return phalanx(*given, env={"PYTHONPATH": str(REPOSITORY), **(env or {})}, timeout=timeout)

    return run


@pytest.fixture
def alone_on_sim(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a script on the device "sim" as one plain process, without a launcher."""

    def run(text: str, *arguments: str, timeout: float = 60) -> Outcome:
        (tmp_path / "alone.py").write_text(IMPORTS + textwrap.dedent(text))
        with start("alone.py", *arguments, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return Outcome(process.returncode, out, err, 0.0)

    return run

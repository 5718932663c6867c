"""A mistake on the command line: one line that says what is wrong and where to look, whatever the command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx import cli

MISTAKES = {
    "run --stall-after soon x.py": "argument --stall-after: invalid float value: 'soon'",
    "report --jsn": "unrecognized arguments: --jsn. Is --json meant?",
    "inspect --second 2": "unrecognized arguments: --second. Is --seconds meant?",
    "inspect --seconds x": "argument --seconds: 'x' is not a number of seconds from 0 to 3600; give one like 5",
    "doctor --nproc-per-node 0": "'0' is not a number of ranks; give one like 4",
    "checkpoint ls": "the following arguments are required: PATH",
    "checkpoint": "the following arguments are required: COMMAND",
    "bench recorder --calls 0": "argument --calls: '0' is not a positive number",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("phalanx: ")
    assert MISTAKES[line] in err
    command = " ".join(word for word in line.split()[:2] if word.isalpha() and word != "soon")
    assert err.endswith(f"`phalanx {command} --help` lists the flags.\n")


def test_a_console_without_our_characters_shows_others() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-m", "phalanx", "--help"], capture_output=True, text=True, env=environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "phalanx run [flags] script.py ?" in shown.stdout

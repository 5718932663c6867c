"""A mistake on the command line: one line that says what is wrong and where to look, whatever the command."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

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
    "bench launch --ranks 0": "argument --ranks: '0' is not a positive number",
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


LONG = "x" * 5000


@pytest.mark.parametrize(
    "line",
    [
        f"run {LONG}",
        f"run --run-path /{LONG}",
        f"run --hostfile {LONG} x.py",
        f"run --nnodes 2 --master-port 1 --master-addr {LONG} x.py",
        f"report {LONG}",
        f"inspect {LONG}",
        f"checkpoint ls {LONG}",
        f"checkpoint verify {LONG}/step-1",
    ],
    ids=lambda line: line.replace(LONG, "LONG"),
)
def test_a_name_that_is_too_long(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert "File name too long" in err or "it is not a valid host name" in err


CLOSED = {
    "phalanx run --start-method exec x.py >&-": (0, ""),
    "phalanx run --start-method exec x.py <&- >&- 2>&-": (0, ""),
    "phalanx --version >&-": (0, ""),
    "phalanx wrong >&- 2>&-": (2, ""),
    "phalanx run --dry-run --nproc-per-node 2 x.py >&-": (0, ""),
    "phalanx --help >/dev/full": (1, "phalanx: standard output cannot be written: No space left on device.\n"),
}


@pytest.mark.parametrize("line", CLOSED)
def test_streams_that_are_closed(line: str, tmp_path: Path) -> None:
    """As cron and daemons start programs."""
    (tmp_path / "x.py").write_text("import sys\nprint('hello')\nassert sys.stdout.fileno() == 1\n")
    command = line.replace("phalanx", f"{sys.executable} -m phalanx", 1)
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    code, err = CLOSED[line]
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", err)
    if "exec" in line:
        assert (tmp_path / "runs/latest/rank-0.log").read_text() == "hello\n"


def test_a_full_disk_is_not_called_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str, arguments: list[str]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli, "_dispatch", run)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "x.py"])
    expected = "phalanx: a file cannot be written: No space left on device; free some space there.\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, expected)


def test_a_console_without_our_characters_shows_others() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-m", "phalanx", "--help"], capture_output=True, text=True, env=environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "phalanx run [flags] script.py ?" in shown.stdout
